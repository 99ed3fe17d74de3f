"""Train heads from random weights on a policy's own text, by several optimizers, and watch how well they draft.

    python -m tlt_lightning predict -c recipes/quickstart.yaml \
        --data.val.path recipes/assets/countdown/train.jsonl
    python -m benchmarks cold_head --completions outputs/quickstart/completions.jsonl

Each token is trained on once, as beside a policy, by the trainer of `LongTailIdleCallback`, whose `--pack-tokens` a new
head takes by quarters, later by halves. Tokens per step are expected on held-out prompts at `--temperature`, of 7
greedy drafts; in the end also of sampled ones, by rejection sampling and by the noise of verification. An optimizer is
given as NAME=RATE. `--tiny` takes few tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import plots
from benchmarks.common.arguments import ASSETS, parser_of
from benchmarks.common.results import about, heading, save, table
from tlt_lightning.data.formats import RowReader, Text
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.muon import MuonWithAuxAdam
from tlt_lightning.drafter.packing import PackedBatch, packs_of
from tlt_lightning.drafter.quality import AcceptanceRule, DraftQuality, quality_of
from tlt_lightning.drafter.texts.states import StateReader
from tlt_lightning.drafter.texts.texts import split_by_prompt, texts_in
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.trainer import DrafterTrainer

NUM_DRAFTS = 7  # the longest of `CostModelSelector`
OPTIMIZERS: dict[str, Any] = {"muon": MuonWithAuxAdam, "adamw": partial(torch.optim.AdamW, weight_decay=0.0)}
WAYS = {
    "greedy": AcceptanceRule(),
    "sampled": AcceptanceRule(samples_drafts=True),
    "sampled with the noise of verification": AcceptanceRule(samples_drafts=True, shares_noise=True),
}
MAX_BYTES = 4 * 2**30


def portions(texts: Sequence[Text], num_tokens: int, count: int) -> list[list[Text]]:
    """Deal `texts`, in their order, into up to `count` portions of at least `num_tokens` each."""
    dealt: list[list[Text]] = [[]]
    held = 0
    for text in texts:
        if held >= num_tokens:
            dealt, held = [*dealt, []], 0
        dealt[-1].append(text)
        held += len(text.ids)
    return dealt[:count] if held >= num_tokens else dealt[:-1][:count]


def quality(trainer: DrafterTrainer, held_out: Sequence[PackedBatch]) -> DraftQuality:
    """Return how well the head drafts on the held-out packs."""
    with trainer.autocast():
        sums = torch.cat([trainer.drafter.measure(batch) for batch in held_out]).sum(0)
    return quality_of(sums)


def learn(
    args: Any, optimizer: str, seed: int, counts: Tensor, parts: Sequence[Sequence[PolicyText]], held_out: Any
) -> tuple[DrafterModule, dict[str, Any]]:
    """Train a head of random weights on one portion after the other; return it with its curve."""
    name, _, rate = optimizer.partition("=")
    drafter = DrafterModule(
        args.policy,
        optimizer=partial(OPTIMIZERS[name], lr=float(rate)),
        draft_vocab_size=args.draft_vocab_size,
        num_draft_tokens=NUM_DRAFTS,
        seed=seed,
    )
    rules = {way: replace(rule, temperature=args.temperature) for way, rule in WAYS.items()}
    drafter.acceptance = rules["greedy"]
    if drafter.needs_vocabulary:
        drafter.choose_vocabulary(counts)
    drafter.configure_model()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = DrafterTrainer(drafter, DrafterBuffer(MAX_BYTES), pack_tokens=args.pack_tokens, device=device)
    packs = list(packs_of(held_out, args.pack_tokens, device))
    found, seconds, num_tokens = [(0, quality(trainer, packs).acceptance_length)], 0.0, 0
    for number, part in enumerate(parts):
        trainer.buffer = DrafterBuffer(MAX_BYTES, held_out_share=0.0)
        trainer.buffer.add(part)
        trainer.begin(1000 * seed + number)
        left = iter(range(round(sum(map(len, part)) / trainer.step_tokens)))
        started = time.perf_counter()
        trainer.train(lambda left=left: next(left, None) is not None)  # type: ignore[misc]
        seconds += time.perf_counter() - started
        num_tokens += trainer.num_seen
        found.append((num_tokens, quality(trainer, packs).acceptance_length))
        trainer.note_quality(found[-1][1])
    accepted = {}
    for way, drafter.acceptance in rules.items():
        accepted[way] = quality(trainer, packs).accepted
    ways = {way: 1 + sum(shares) for way, shares in accepted.items()}
    print(f"{optimizer}, seed {seed}: {found[-1][1]:.3f} tokens per step after {num_tokens:,} tokens", flush=True)
    result = {"optimizer": optimizer, "seed": seed, "seconds": seconds, "curve": found, "ways": ways}
    return drafter, result | {"accepted": accepted}


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown: tokens per step of each head after equally many tokens."""
    runs = results["runs"]
    header = [f"{tokens // 1000}k" for tokens, _ in runs[0]["curve"]]
    rows = [[run["optimizer"], run["seed"], *(each for _, each in run["curve"]), run["seconds"]] for run in runs]
    lead = "Tokens per step expected on held-out prompts, after so many tokens of text, each trained on once."
    return [
        *heading("A cold head", results["about"]),
        lead,
        "",
        *table(["optimizer", "seed", *header, "s of training"], rows),
        "In the end, by how drafts are made:\n",
        *table(["optimizer", "seed", *WAYS], [[r["optimizer"], r["seed"], *r["ways"].values()] for r in runs]),
    ]


def picture(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens per step over tokens trained on: a line for each optimizer's mean, thin ones for its seeds."""
    figure, (panel,) = plots.frame(1)
    panel.set_xlabel("thousand tokens trained on")
    panel.set_ylabel("tokens per step", fontsize=9)
    for arm, colour in plots.colours_of(run["optimizer"] for run in runs).items():
        curves = [run["curve"] for run in runs if run["optimizer"] == arm]
        thousands = [tokens / 1000 for tokens, _ in curves[0]]
        for curve in curves:
            panel.plot(thousands, [each for _, each in curve], color=colour, alpha=0.25, linewidth=0.8)
        means = [statistics.mean(curve[place][1] for curve in curves) for place in range(len(thousands))]
        panel.plot(thousands, means, color=colour, label=arm, linewidth=1.8)
    panel.legend(frameon=False, fontsize=9)
    plots.save(figure, path)


def main(arguments: list[str]) -> None:
    """Train every optimizer and seed, and write the results after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--completions", type=Path, nargs="+", required=True, help="text of the policy, by `predict`")
    parser.add_argument("--policy", default=str(ASSETS / "policy"), help="that wrote it")
    parser.add_argument("--optimizers", nargs="+", default=["muon=0.03", "adamw=0.003"], help="NAME=RATE of each arm")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the heads' weights")
    parser.add_argument("--pack-tokens", type=int, default=2048, help="of `LongTailIdleCallback`")
    parser.add_argument("--draft-vocab-size", type=int, help="tokens that heads draft")
    parser.add_argument("--temperature", type=float, default=1.0, help="that the text was written at")
    parser.add_argument("--portion", type=int, default=10_000, help="tokens between two measurements")
    parser.add_argument("--portions", type=int, default=16, help="measurements, at most")
    parser.add_argument("--name", default="quickstart", help="of the result files")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.seeds, args.portion, args.portions, args.pack_tokens = [0], 1000, 2, 512
    from transformers import AutoModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = AutoModel.from_pretrained(args.policy, dtype="auto").requires_grad_(False).to(device)
    rows = RowReader(args.policy, policy.config.max_position_embeddings)
    texts, prompts = texts_in([str(path) for path in args.completions], rows, policy.config.vocab_size)
    split = split_by_prompt(prompts, 0.06, seed=0)
    train, held_out = ([texts[row] for row in part] for part in split)
    parts = portions(train, args.portion, args.portions)
    if not parts:
        parser.error(f"`--completions` hold fewer tokens than a `--portion` of {args.portion:,}")
    counts = torch.bincount(
        torch.tensor([token for part in parts for text in part for token in text.answers]),
        minlength=policy.config.vocab_size,
    )
    reader = StateReader(policy, DrafterModule(args.policy).layer_ids, 8192)
    states = [reader.read(part) for part in parts]
    judged = reader.read((portions(held_out, args.portion, 1) or [list(held_out)])[0])
    results: dict[str, Any] = {"about": about(args.name, args.note, args.seed), "runs": []}
    for optimizer in args.optimizers:
        for seed in args.seeds:
            results["runs"].append(learn(args, optimizer, seed, counts, states, judged)[1])
            save(args.out / f"cold_head_{args.name}", results, render(results))
            picture(results["runs"], args.out / f"cold_head_{args.name}.png")
