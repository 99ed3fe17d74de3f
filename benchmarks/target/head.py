"""Train heads for the benchmarks' policy, on its hidden states over text of its kind."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.target.policy import Clock, Scale, make_optimizer, optimise
from benchmarks.target.text import WORD_BY_WORD, Streams, spelling_of, write_row
from tlt_lightning.drafter.architectures.base import DraftArchitecture
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import PackedBatch, packs_of
from tlt_lightning.drafter.quality import DraftQuality, quality_of
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.training.memory.forecast import GIB

NUM_DRAFT_TOKENS = 7  # that quality is measured at: as many as any engine drafts
BRIEF = 0.1  # share of the training after which the briefly trained head is kept
ROWS, MEASURED_ROWS = 2, 8  # of text, in a batch and to measure on
TRIED_STEPS, TIMED_STEPS = 3, 20  # of a step's cost


def load_policy(path: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the policy at `path`, for inference."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()  # type: ignore[arg-type]


def write_rows(seed: int, rows: int, length: int, spelling: Sequence[Sequence[int]] = WORD_BY_WORD) -> Tensor:
    """Write text to measure on, the same for the same seed: (rows, length)."""
    rng = random.Random(f"measure {seed}")  # a string: the streams' own seeds are numbers
    return torch.tensor([write_row(rng, length, spelling=spelling) for _ in range(rows)])


@torch.no_grad()
def draft_sequences(policy: PreTrainedModel, ids: Tensor, layer_ids: Sequence[int]) -> list[PolicyText]:
    """Return the rows of `ids` with the policy's states; only their first token is prompt.

    `ids` are (B, S). The head reads `layer_ids`, all before the last layer's output.
    """
    ids = ids.to(policy.device)
    last: list[Tensor] = []
    trunk: Any = policy.base_model
    handle = trunk.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    states = trunk(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    layers = torch.cat([states[layer] for layer in layer_ids], -1)  # (B, S, 3H)
    return [
        PolicyText(row, row_layers, row_last, prompt_length=1)
        for row, row_layers, row_last in zip(ids, layers, last[0], strict=True)
    ]


def make_packs(policy: PreTrainedModel, ids: Tensor, layer_ids: Sequence[int], num_tokens: int) -> list[PackedBatch]:
    """Return the rows of `ids` as packs of `num_tokens` entries."""
    return list(packs_of(draft_sequences(policy, ids, layer_ids), num_tokens))


def measure(module: DrafterModule, policy: PreTrainedModel, ids: Tensor) -> DraftQuality:
    """Measure how well a head drafts for `policy` on the rows of `ids`, one pack each."""
    packs = make_packs(policy, ids, module.layer_ids, ids.shape[1] - 2)
    is_half = policy.dtype is torch.bfloat16
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=is_half):
        return quality_of(torch.cat([module.measure(batch) for batch in packs]).sum(0))


def cost_of(module: DrafterModule, batch: PackedBatch, device: str) -> dict[str, float]:
    """Measure microseconds a token of training on a pack by AdamW, and on a GPU the most memory allocated, in GiB.

    The policy's pass and the text are not part of it, and the weights stay as they are.
    """
    optimizer, on_gpu, seconds = make_optimizer(module, 0.0), device == "cuda", 0.0
    for steps in (TRIED_STEPS, TIMED_STEPS):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
                loss, _ = module.loss(batch, compares=False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    found = {"us_a_token": round(1e6 * seconds / TIMED_STEPS / sum(batch.lengths), 3)}
    return {**found, "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)} if on_gpu else found


def train_heads(
    policy: Path,
    out: Path,
    name: str,
    architecture: DraftArchitecture,
    scale: Scale,
    seconds: float,
    device: str,
    seed: int,
) -> dict[str, Any]:
    """Train a head for `seconds` after start-up; write it as it is before, early and after, the last under its `name`.

    Returns:
        What `optimise` and `cost_of` return, and the quality of the three as `DraftQuality` names it.
    """
    length, spelling = scale.head_length, spelling_of(AutoTokenizer.from_pretrained(policy))
    stream = DataLoader(Streams(ROWS, length, (), seed + 1, spelling), batch_size=None, num_workers=scale.workers)
    batches = iter(stream)
    next(batches)  # the workers are forked before CUDA is touched
    module = DrafterModule(str(policy), num_draft_tokens=NUM_DRAFT_TOKENS, seed=seed, architecture=architecture)
    module.configure_model()
    module.to(device)
    target = load_policy(policy, device, torch.bfloat16 if device == "cuda" else torch.float32)
    measured, qualities = write_rows(seed, MEASURED_ROWS, length, spelling), {}
    clock = Clock(seconds, scale.head_learning_rate)

    def keep(as_name: str) -> None:
        quality = measure(module, target, measured)
        module.export(out / as_name, quality)
        qualities[as_name] = quality.metrics("")
        print(f"{as_name}: {quality.acceptance_length:.2f} tokens per step of {NUM_DRAFT_TOKENS} drafts", flush=True)

    def draw() -> PackedBatch:
        (batch,) = make_packs(target, next(batches).long(), module.layer_ids, ROWS * (length - 2))
        return batch

    def loss() -> Tensor:
        if clock.progress > BRIEF and f"{name}-brief" not in qualities:
            keep(f"{name}-brief")
        batch = draw()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return module.loss(batch)[0]

    keep(f"{name}-random")
    result = optimise(module, loss, clock, ROWS * length)
    keep(name)
    return {**result, **cost_of(module, draw(), device), "quality": qualities}
