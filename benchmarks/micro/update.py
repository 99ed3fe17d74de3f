"""Time an update's passes and optimizer step: padded, and packed with more and more of `tlt_lightning.fused`.

On a GPU, LoRA on a model of 7B shape with random weights, made from its configuration alone:

    python -m benchmarks update

`--full` trains all weights, float32 under autocast, of SmolLM2's `--shape 135m`, Qwen2.5's `1.5b` or `3b`; with
`--eight-bit`, optimizer states of 8 bits. `--tiny` runs a small one on a CPU. Lengths are long-tailed. Padding counts
among a pass's tokens, not for MFU. The forecast, of the largest pass, is `training/memory/`'s. First updates compile.

`--devices 4` shards the model over as many GPUs, as `strategy: fsdp2` does, and times the package's way alone. Each has
sequences of the same lengths, so that none waits for another; gradients are clipped as in a run. Passes of `--tokens`
keep their activations, those of `--checkpoint` compute them again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.arguments import parser_of
from benchmarks.common.processes import run_apart
from benchmarks.common.results import about, heading, save, table
from benchmarks.common.shapes import SHAPES
from benchmarks.lossless.checks import as_batch
from benchmarks.micro.drafter_step import kernels_of
from tlt_lightning import policy as package
from tlt_lightning.adapters import LoRA, with_adapters
from tlt_lightning.fused.adapter import fuse_adapters
from tlt_lightning.fused.layers import fuse_layers
from tlt_lightning.fused.logps import chosen_logps, is_frozen_linear
from tlt_lightning.packed_pass import IS_PACKABLE, register_varlen
from tlt_lightning.policy import causal_lm, response_logps
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.sharding.units import Sharding
from tlt_lightning.training.memory.forecast import CONTEXT, GIB, TrainedModel, forecast
from tlt_lightning.training.memory.passes import Passes
from tlt_lightning.training.micro_batches import cut_micro_batches
from tlt_lightning.training.optimization import fuse_on_gpu
from tlt_lightning.training.throughput import peak_flops, train_flops

ROUNDS = 3
GROUPS = {  # the first that a kernel's name matches, on a CPU an operation's
    "gathers, ms": r"allgather|all_gather",
    "reductions over ranks, ms": r"nccl|c10d",
    "attention, ms": r"flash|attention",
    "matrix products, ms": r"gemm|nvjet|cutlass|xmma|splitk|::mm$|::addmm$|::bmm$",
    "optimizer, norms, ms": r"multi_tensor|adam|foreach",
    "copies, ms": r"memcpy|memset|copy|cat|fill|split",
    "other, ms": "",
}


def draw_batch(num_rows: int, typical: int, longest: int, device: torch.device) -> RolloutBatch:
    """Return sequences whose lengths are log-normal around `typical`, and one of the `longest`."""
    lengths = [longest, *(torch.randn(num_rows - 1).mul(1.1).exp() * typical).long().clamp(2, longest).tolist()]
    written = [(torch.randint(2, 512, (length - 1,)).tolist(), [0.0] * (length - 1)) for length in lengths]
    return as_batch([[2]] * num_rows, written, device)


def plain_logps(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute what `chosen_logps` does by operations of torch."""
    logits = logits.float() / temperature
    normalizer = logits.logsumexp(-1)
    with torch.no_grad():
        entropy = normalizer - (torch.softmax(logits, -1) * logits).sum(-1)
    return logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer, entropy


def take_apart(model: nn.Module) -> None:
    """Leave everything that `fused` does to PEFT, transformers and torch."""
    package.chosen_logps = plain_logps
    package.is_frozen_linear = lambda head: False
    for layer in model.modules():
        vars(layer).pop("forward", None)


def fuse_logps(model: nn.Module) -> None:
    """Take the package's log-probs of logits again."""
    package.chosen_logps = chosen_logps


def fuse_head(model: nn.Module) -> None:
    """Take the package's log-probs of states before a frozen head again."""
    package.is_frozen_linear = is_frozen_linear


# What is done to the model before each way, after all that was done before.
WAYS: dict[str, Callable[[nn.Module], None]] = {
    "padded": lambda model: None,
    "packed, nothing fused": take_apart,
    "packed, and adapters": fuse_adapters,
    "packed, and norms and activations": fuse_layers,
    "packed, and log-probs": fuse_logps,
    "packed, and a frozen head: the package": fuse_head,
}


def time_update(
    model: nn.Module, optimizer: Any, batch: RolloutBatch, parts: Sequence[Sequence[int]], *, clips: bool = False
) -> float:
    """Run all passes forward and backward and the optimizer's step, and return the seconds."""
    began = time.perf_counter()
    for rows in parts:
        with torch.autocast("cuda", torch.bfloat16, enabled=batch.input_ids.is_cuda):
            loss = response_logps(model, batch.select(rows))[0].mean()
        loss.backward()
    if clips:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if batch.input_ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def by_group(kernels: Sequence[tuple[str, int, float]]) -> dict[str, float]:
    """Return the milliseconds of kernels by the first group whose pattern their name matches."""
    spent = dict.fromkeys(GROUPS, 0.0)
    for name, _, milliseconds in kernels:
        spent[next(group for group, pattern in GROUPS.items() if re.search(pattern, name.lower()))] += milliseconds
    return spent


def measure_sharded(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time updates of a model that the ranks of this process's group shard; return a row for each kind of pass."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cpu") if args.tiny else torch.device("cuda", torch.cuda.current_device())
    num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed(args.seed)  # ranks must have the same weights before they keep their rows
    config = AutoConfig.for_model(**SHAPES["tiny" if args.tiny else args.shape])
    with device:
        half = torch.float32 if args.tiny else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=half, attn_implementation=register_varlen())
    fuse_layers(model)
    setattr(model.base_model, IS_PACKABLE, True)
    model.train()
    mesh = torch.distributed.init_device_mesh(
        device.type, (args.replicas, num_ranks // args.replicas), mesh_dim_names=("replicate", "shard")
    )
    Sharding(mesh if args.replicas > 1 else mesh["shard"], is_half=not args.tiny).shard(model, torch.float32)
    num_rows, typical, longest = (12, 20, 96) if args.tiny else (args.sequences, args.typical, args.longest)
    batch = draw_batch(num_rows, typical, longest, device)
    batch.input_ids = batch.input_ids.roll(rank, 1)  # of the same lengths
    flops, rate = float(train_flops(model, batch.lengths, batch.response_mask.sum())), peak_flops(device)
    kinds = [(tokens, False) for tokens in args.tokens or []] + [(tokens, True) for tokens in args.checkpoint or []]
    rows = []
    for tokens, is_checkpointed in kinds:
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        parts = cut_micro_batches(torch.arange(len(batch)), batch.lengths.cpu(), tokens)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0)
        fuse_on_gpu(optimizer, device)
        if not args.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        update = partial(time_update, model, optimizer, batch, parts, clips=True)
        first, *seconds = (update() for _ in range(2 if args.tiny else 1 + ROUNDS))
        peak = None if args.tiny else torch.cuda.max_memory_allocated() / GIB
        median, largest = statistics.median(seconds), max(int(batch.lengths[part].sum()) for part in parts)
        row: dict[str, Any] = {"tokens a pass": tokens, "computed again": is_checkpointed, "passes": len(parts)}
        row |= {"first, s": first, "median, s": median, "MFU": None if rate is None else flops / median / rate}
        row |= {"peak GiB": peak, "largest": largest, "tokens": int(batch.lengths.sum())}
        rows.append(row | by_group(kernels_of(update, on_cpu=args.tiny)))
        del optimizer
        if rank == 0:
            print(rows[-1], flush=True)
            (args.out / f"{name_of(args)}.partial.json").write_text(json.dumps(rows))
    return rows


def name_of(args: argparse.Namespace) -> str:
    """Return the name of the files of results."""
    name = "update" if not args.full else f"update_{args.shape}_full" + "_8bit" * args.eight_bit
    name += f"_fsdp2_{args.devices}" * (args.devices > 1)
    return name + f"_replicas_{args.replicas}" * (args.replicas > 1)


def report_sharded(args: argparse.Namespace) -> None:
    """Measure on several devices and write the results, with the forecast of each kind of pass."""
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        rows = run_apart(measure_sharded, args, num_ranks=args.devices)
    except Exception:  # what was measured before is kept
        traceback.print_exc()
        rows = json.loads((args.out / f"{name_of(args)}.partial.json").read_text())
    title = f"{'tiny' if args.tiny else args.shape} shape, all weights, AdamW, sharded over {args.devices}"
    title += f" in {args.replicas} replicas" * (args.replicas > 1)
    results: dict[str, Any] = {"about": about(title, args.note, args.seed, on_cpu=args.tiny), "rows": rows}
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "config.json").write_text(json.dumps(SHAPES["tiny" if args.tiny else args.shape]))
        for row in rows:
            passes = Passes(
                row["largest"], row["largest"], not args.tiny, row["computed again"], args.devices // args.replicas
            )
            plan = forecast({"policy": TrainedModel(path)}, passes, torch.optim.AdamW, {})
            row["forecast GiB"] = (plan.update - CONTEXT) / GIB
    lines = [*heading("Update", results["about"]), f"{rows[0]['tokens']:,} tokens on each device.", ""]
    lines += ["Milliseconds by kind of kernel, which overlap: of one more update.", ""]
    lines += table(list(rows[0]), [list(row.values()) for row in rows])
    save(args.out / name_of(args), results, lines)
    print("\n".join(lines))


def main(arguments: Sequence[str]) -> None:
    """Measure all ways at each number of tokens, and write `update.json` and `.md`, with the shape in their names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    parser = parser_of(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, help="most tokens of a pass; the longest sequence must fit")
    parser.add_argument("--shape", choices=("135m", "1.5b", "3b", "7b"), default="7b")
    parser.add_argument("--devices", type=int, default=1, help="over which all weights are sharded")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the shards")
    parser.add_argument("--checkpoint", nargs="+", type=int, help="tokens of passes that are computed again, sharded")
    parser.add_argument("--sequences", type=int, default=128, help="of each device, sharded")
    parser.add_argument("--typical", type=int, default=139, help="tokens of a sequence, the median, sharded")
    parser.add_argument("--longest", type=int, default=4116, help="tokens of the longest, sharded")
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--eight-bit", action="store_true", help="with torchao's AdamW8bit")
    args = parser.parse_args(arguments)
    if args.devices > 1:
        if not args.full:
            parser.error("`--devices` shards all weights, with `--full`")
        report_sharded(args)
        return
    torch.manual_seed(args.seed)
    build: Any = import_module("torchao.optim").AdamW8bit if args.eight_bit else torch.optim.AdamW
    device, shape = torch.device("cpu" if args.tiny else "cuda"), SHAPES["tiny" if args.tiny else args.shape]
    lora = None if args.full else LoRA(rank=32, base_dtype="float32" if args.tiny else "bfloat16")
    config = AutoConfig.for_model(**shape)
    with device:
        dtype = torch.float32 if lora is None else getattr(torch, lora.base_dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=register_varlen())
    fuse_layers(model)
    model = with_adapters(model, lora).to(device).train()  # type: ignore[arg-type]
    batch = draw_batch(*((12, 20, 96) if args.tiny else (128, 139, 4116)), device)
    title = f"{'tiny' if args.tiny else args.shape} shape, {f'all weights, {build.__name__}' if args.full else 'LoRA'}"
    results: dict[str, Any] = {"about": about(title, args.note, args.seed, on_cpu=args.tiny), "ways": []}
    flops, rate = float(train_flops(model, batch.lengths, batch.response_mask.sum())), peak_flops(device)
    for tokens in args.tokens or ([96, 256] if args.tiny else [8192]):
        for way, prepare in WAYS.items():
            prepare(model)
            setattr(causal_lm(model).base_model, IS_PACKABLE, way != "padded")
            parts = cut_micro_batches(torch.arange(len(batch)), batch.lengths.cpu(), tokens, is_padded=way == "padded")
            if not args.tiny:
                torch.cuda.reset_peak_memory_stats()
            optimizer = build([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-6)
            fuse_on_gpu(optimizer, device)
            first, *seconds = (time_update(model, optimizer, batch, parts) for _ in range(1 + ROUNDS))
            median, peak = statistics.median(seconds), None if args.tiny else torch.cuda.max_memory_allocated() / GIB
            rates = [1e6 * median / int(batch.lengths.sum()), None if rate is None else flops / median / rate]
            results["ways"].append([way, tokens, len(parts), first, median, *rates, peak])
    # Of what was measured last: the package as it is, at the most tokens.
    largest = max(int(batch.lengths[rows].sum()) for rows in parts)
    passes = Passes(largest, largest, is_autocast=not args.tiny, is_checkpointed=False)
    with tempfile.TemporaryDirectory() as path:
        config.save_pretrained(path)
        plan = forecast({"policy": TrainedModel(path, lora)}, passes, build, {})
    results["forecast"] = (plan.update - CONTEXT) / GIB
    lines = [*heading("Update", results["about"]), f"{len(batch)} sequences, {int(batch.lengths.sum()):,} tokens.", ""]
    header = ["way", "tokens a pass", "passes", "first, s", f"median of {ROUNDS}, s", "us a token", "MFU", "peak GiB"]
    lines += table(header, results["ways"])
    lines += [f"Forecast of the last row's peak: {results['forecast']:.2f} GiB.", ""]
    save(args.out / name_of(args), results, lines)
    print("\n".join(lines))
