"""Train one head on text of its policy, each token once, and see how well it drafts on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.block_drafts import head as blocks
from benchmarks.micro import cold_head
from tlt_lightning.data.formats import RowReader
from tlt_lightning.drafter.muon import MuonWithAuxAdam
from tlt_lightning.drafter.target import choose_layer_ids
from tlt_lightning.drafter.texts.states import StateReader
from tlt_lightning.drafter.texts.texts import split_by_prompt, texts_in
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.trainer import MAX_GRAD_NORM

LEARNING_RATE = 0.03  # of Muon, for every head: `MuonWithAuxAdam`'s own
WARM_UP_STEPS = 10
HELD_OUT = 0.06  # share of the prompts
MOST_ANCHORS = 512  # of a training step, as by default in `speculators`


def read_texts(args: Any, device: torch.device) -> tuple[list[list[PolicyText]], list[PolicyText], torch.Tensor]:
    """Return portions of text with its states, what is held out, and how often each token was written."""
    from transformers import AutoModel

    policy = AutoModel.from_pretrained(args.policy, dtype="auto").requires_grad_(False).to(device)
    rows = RowReader(args.policy, policy.config.max_position_embeddings)
    texts, prompts = texts_in([str(args.completions)], rows, policy.config.vocab_size)
    split = split_by_prompt(prompts, HELD_OUT, seed=0)
    train, held_out = ([texts[row] for row in part] for part in split)
    parts = cold_head.portions(train, args.portion, args.portions)
    reader = StateReader(policy, choose_layer_ids(policy.config.num_hidden_layers), 8192)
    judged = reader.read((cold_head.portions(held_out, args.judged, 1) or [list(held_out)])[0])
    counts = torch.bincount(
        torch.tensor([token for part in parts for text in part for token in text.answers]),
        minlength=policy.config.vocab_size,
    )
    return [reader.read(part) for part in parts], judged, counts


def learn(args: Any, arm: str, out: Path) -> dict[str, Any]:
    """Train the head of `arm`, `eagle3` or KIND-LAYERS-BLOCK, write it to `out`, and return its curve."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts, judged, counts = read_texts(args, device)
    if arm == "eagle3":
        drafter, found = cold_head.learn(args, f"muon={LEARNING_RATE}", args.seed, counts, parts, judged)
        drafter.export(out)
        return found
    kind, num_layers, block_size = arm.split("-")
    head = blocks.make_head(kind, args.policy, int(num_layers), int(block_size), args.seed).to(device)
    parameters = [each for each in head.parameters() if each.requires_grad]
    optimizer = MuonWithAuxAdam(parameters, lr=LEARNING_RATE)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    rules = {way: replace(rule, temperature=args.temperature) for way, rule in cold_head.WAYS.items()}

    def accepted(ways: Sequence[str]) -> list[list[float]]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return blocks.measure(head, judged, [rules[way] for way in ways], device).tolist()

    curve, seconds, num_tokens, num_steps = [(0, 1 + sum(accepted(["greedy"])[0]))], 0.0, 0, 0
    for part in parts:
        began = time.perf_counter()
        for texts in blocks.packs_of(part, args.pack_tokens // 4):
            batch = blocks.pack_of(texts, head.block_size, device)
            num_answers = sum(len(text) - text.prompt_length for text in texts)
            num_anchors = min(max(1, round(args.anchors * num_answers)), MOST_ANCHORS)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = blocks.loss_of(head, batch, num_anchors)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()
            warm_up.step()
            num_tokens, num_steps = num_tokens + sum(map(len, texts)), num_steps + 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        curve.append((num_tokens, 1 + sum(accepted(["greedy"])[0])))
        print(f"{arm}: {curve[-1][1]:.3f} tokens per step after {num_tokens:,} tokens", flush=True)
    ways = dict(zip(rules, accepted(list(rules)), strict=True))
    head.save_pretrained(out)
    return {
        "seconds": seconds,
        "curve": curve,
        "ways": {way: 1 + sum(shares) for way, shares in ways.items()},
        "accepted": ways,
        "steps": num_steps,
        "weights": sum(each.numel() for each in parameters),
    }
