"""Time the forward and backward passes of an update, padded and packed.

On a GPU, LoRA on a model of 7B shape with random weights, made from its configuration alone:

    python -m benchmarks update

`--tiny` runs all weights of a small one on a CPU. Lengths are long-tailed. Padding counts among the tokens of a pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.common.arguments import parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.lossless.checks import as_batch
from benchmarks.micro.step_time import SEVEN_B, TINY_SHAPE
from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.packed_pass import IS_PACKABLE, register_varlen
from tlt_lightning.policy import LoRA, causal_lm, response_logps, with_adapters
from tlt_lightning.training.micro_batches import cut_micro_batches

ROUNDS = 3


def draw_batch(num_rows: int, typical: int, longest: int, device: torch.device) -> RolloutBatch:
    """Return sequences whose lengths are log-normal around `typical`, and one of the `longest`."""
    lengths = [longest, *(torch.randn(num_rows - 1).mul(1.1).exp() * typical).long().clamp(2, longest).tolist()]
    written = [(torch.randint(2, 512, (length - 1,)).tolist(), [0.0] * (length - 1)) for length in lengths]
    return as_batch([[2]] * num_rows, written, device)


def time_passes(policy: nn.Module, batch: RolloutBatch, parts: Sequence[Sequence[int]]) -> float:
    """Run all passes forward and backward, and return the seconds."""
    began = time.perf_counter()
    for rows in parts:
        with torch.autocast("cuda", torch.bfloat16, enabled=batch.input_ids.is_cuda):
            loss = response_logps(policy, batch.select(rows))[0].sum()
        loss.backward()
    if batch.input_ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(arguments: Sequence[str]) -> None:
    """Measure both ways at each number of tokens, and write `update.json` and `.md`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    parser = parser_of(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, help="most tokens of a pass; the longest sequence must fit")
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    shape, lora = (TINY_SHAPE, None) if args.tiny else (SEVEN_B, LoRA(rank=32, base_dtype="bfloat16"))
    with torch.device("cpu" if args.tiny else "cuda") as device:
        dtype = torch.float32 if args.tiny else torch.bfloat16
        config = AutoConfig.for_model(**shape)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=register_varlen())
    policy = with_adapters(model, lora).to(device).train()
    batch = draw_batch(*((12, 20, 96) if args.tiny else (128, 139, 4116)), device)
    results = {"about": about("tiny" if args.tiny else "7b shape", args.note, args.seed, on_cpu=args.tiny), "ways": []}
    for tokens in args.tokens or ([96, 256] if args.tiny else [4116, 8192, 16384]):
        for way in ("padded", "packed"):
            setattr(causal_lm(policy).base_model, IS_PACKABLE, way == "packed")
            rows = torch.arange(len(batch))
            parts = cut_micro_batches(rows, batch.lengths.cpu(), tokens, is_padded=way == "padded")
            if not args.tiny:
                torch.cuda.reset_peak_memory_stats()
            seconds = statistics.median([time_passes(policy, batch, parts) for _ in range(1 + ROUNDS)][1:])
            peak = None if args.tiny else torch.cuda.max_memory_allocated() / 2**30
            results["ways"].append([way, tokens, len(parts), seconds, peak])
    lines = [*heading("Update", results["about"]), f"{len(batch)} sequences, {int(batch.lengths.sum()):,} tokens.", ""]
    lines += table(["way", "tokens a pass", "passes", f"seconds, median of {ROUNDS}", "peak GiB"], results["ways"])
    save(args.out / "update", results, lines)
    print("\n".join(lines))
