"""What asynchronous, selective snapshots and packing save when a drafter is trained.

On a GPU, a head for a policy of 7B shape; the policy's embedding and output head and the hidden states are random:

    python -m benchmarks drafter_costs
    python -m benchmarks drafter_costs --draft-vocab-size 32000

Snapshots: a full one written while training waits, as trainers do it (head, target's frozen tensors, optimizer),
against one of the trained tensors only, written in the background. Packing: the same long-tailed sequences in packs
and in padded batches. Both sides of each comparison get their best setting. `--tiny` runs the same on a CPU within a
minute, to see that it works. Writes `drafter_costs.json` and `drafter_costs.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from math import log
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common.results_file import about, save
from benchmarks.micro.drafter_costs_report import ratios, render
from benchmarks.micro.step_time_scales import LARGE, TINY
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import PackedBatch, Piece, fill_pack, num_entries, packs_of
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.snapshots import SnapshotWriter

PARTS = ("packing", "snapshots")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is.

    Args:
        shape: The policy's configuration.
        num_sequences: Sequences trained on; their lengths are log-normal (sigma 1).
        median_length: Of them, in tokens.
        max_length: Of them; longer ones are cut.
        pack_lengths: Lengths of a pack that are tried.
        batch_sizes: Sizes of a padded batch that are tried; 1 pads nothing.
        repeats: Times everything is measured; the fastest pass, and the median snapshot, count.
    """

    shape: dict[str, Any]
    num_sequences: int
    median_length: int
    max_length: int
    pack_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    repeats: int


GPU_SCALE = Scale(
    shape=LARGE.shape,
    num_sequences=48,
    median_length=450,
    max_length=4096,
    pack_lengths=(2048, 4096, 8192),
    batch_sizes=(1, 4, 8, 16),
    repeats=2,
)
TINY_SCALE = Scale(
    shape=TINY.shape,
    num_sequences=24,
    median_length=60,
    max_length=512,
    pack_lengths=(512, 1024),
    batch_sizes=(1, 4, 8),
    repeats=2,
)


def save_target(shape: dict[str, Any], path: Path, device: torch.device) -> None:
    """Write what a drafter reads of its target: the configuration and three tensors, random."""
    dtype = getattr(torch, shape["torch_dtype"])
    vocabulary = (shape["vocab_size"], shape["hidden_size"])
    generator = torch.Generator(device).manual_seed(0)
    random_tensors = {
        name: 0.02 * torch.randn(vocabulary, dtype=dtype, device=device, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    norm = torch.ones(shape["hidden_size"], dtype=dtype)
    (path / "config.json").write_text(json.dumps(shape))
    save_file({**random_tensors, "model.norm.weight": norm}, path / "model.safetensors", metadata={"format": "pt"})


def build_drafter(target: Path, device: torch.device, draft_vocab_size: int | None) -> DrafterModule:
    """A head with random weights for the target."""
    drafter = DrafterModule(str(target), draft_vocab_size=draft_vocab_size)
    if drafter.needs_vocabulary:
        drafter.choose_vocabulary(torch.arange(drafter.target_config.vocab_size, 0, -1))
    drafter.configure_model()
    return drafter.to(device)


def make_sequences(scale: Scale, device: torch.device) -> list[PolicyText]:
    """Sequences of long-tailed lengths in random order, their contents random."""
    source, generator = random.Random(0), torch.Generator(device).manual_seed(0)
    hidden, made = scale.shape["hidden_size"], []
    for _ in range(scale.num_sequences):
        length = round(min(max(16, source.lognormvariate(log(scale.median_length), 1)), scale.max_length))
        states = torch.randn(length, 4 * hidden, dtype=torch.bfloat16, device=device, generator=generator)
        ids = torch.randint(scale.shape["vocab_size"], (length,), device=device, generator=generator)
        made.append(PolicyText(ids, states[:, : 3 * hidden], states[:, 3 * hidden :], prompt_length=8))
    return made


def precision(device: torch.device) -> AbstractContextManager:
    """`bf16-mixed` on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pad(sequences: Sequence[PolicyText], batch_size: int) -> Iterator[PackedBatch]:
    """Batches of one row per sequence, as long as the longest in the batch, the rows behind each other.

    Rows attend to themselves alone, padding included: what a padded batch computes, by the code that packs run on.
    """
    for start in range(0, len(sequences), batch_size):
        rows = sequences[start : start + batch_size]
        length = -(-max(num_entries(len(row)) for row in rows) // 16) * 16  # what tensor cores like
        filled = [fill_pack([(row, Piece(0, 0, num_entries(len(row))))], length) for row in rows]
        for number, row in enumerate(filled):
            row.document_ids[row.document_ids >= 0] = number
        tensors = {item.name: [getattr(row, item.name) for row in filled] for item in fields(PackedBatch)}
        tensors.pop("lengths")
        yield PackedBatch(
            **{name: torch.cat(parts, 1) for name, parts in tensors.items()}, lengths=(length,) * len(rows)
        )


def measure_packing(drafter: DrafterModule, scale: Scale, device: torch.device) -> dict[str, Any]:
    """Samples per second of loss and backward, by way of batching and its setting."""
    sequences = make_sequences(scale, device)
    by_length = sorted(sequences, key=len)
    entries = sum(num_entries(len(sequence)) for sequence in sequences)
    ways: dict[str, dict[int, Callable[[], Iterable[PackedBatch]]]] = {
        "padded": {size: lambda size=size: pad(sequences, size) for size in scale.batch_sizes},
        "padded, sorted by length": {size: lambda size=size: pad(by_length, size) for size in scale.batch_sizes[1:]},
        "packed": {length: lambda length=length: packs_of(sequences, length) for length in scale.pack_lengths},
    }
    lengths = sorted(map(len, sequences))
    result: dict[str, Any] = {
        "sequences": len(lengths),
        "length_mean": statistics.mean(lengths),
        "length_p50": statistics.median(lengths),
        "length_max": lengths[-1],
        "samples_per_s": {},
        "filled": {},
    }
    for way, settings in ways.items():
        rates, filled = result["samples_per_s"].setdefault(way, {}), result["filled"].setdefault(way, {})
        for setting, make in settings.items():
            seconds, computed = time_passes(drafter, make, scale.repeats)
            rates[setting], filled[setting] = seconds and len(lengths) / seconds, entries / computed
            print(f"{way} {setting}: {'out of memory' if seconds is None else f'{seconds:.2f} s a pass'}", flush=True)
    return result


def time_passes(
    drafter: DrafterModule, make: Callable[[], Iterable[PackedBatch]], repeats: int
) -> tuple[float | None, int]:
    """Seconds of the fastest pass over all batches, None if memory does not suffice; and entries computed in it."""
    device, seconds = drafter.head.fc.weight.device, []  # type: ignore[union-attr]
    computed = sum(batch.input_ids.numel() for batch in make())
    try:
        for _ in range(1 + repeats):  # the first pass compiles and allocates
            synchronize(device)
            started = time.perf_counter()
            for batch in make():
                with precision(device):
                    value = drafter.loss(batch)[0]
                value.backward()
                drafter.zero_grad(set_to_none=True)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return None, computed
    finally:
        drafter.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()  # what this setting left behind must not be what the next one lacks
    return min(seconds[1:]), computed


def measure_snapshots(drafter: DrafterModule, scale: Scale, device: torch.device, folder: Path) -> dict[str, Any]:
    """What a snapshot costs training, by what is in it and how it is written."""
    optimizer = drafter.configure_optimizers()
    batch = next(packs_of(make_sequences(scale, device), scale.pack_lengths[0]))

    def step() -> None:
        with precision(device):
            value = drafter.loss(batch)[0]
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step_ms = statistics.median([clock(step, device) for _ in range(3 + scale.repeats)][3:])
    full, selective = full_tensors(drafter, optimizer), list(drafter.trainable_tensors())
    state = {"state_dict": drafter.state_dict(), "optimizer": optimizer.state_dict()}
    path = folder / "full"
    save_ways: dict[str, Callable[[], Any]] = {
        "full, synchronous (torch.save)": lambda: torch.save(state, path),
        "full, synchronous (safetensors)": lambda: save_file(dict(full), path),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, write in save_ways.items():
        times = [clock(write, device) for _ in range(1 + scale.repeats)][1:]
        median = statistics.median(times)
        rows[name] = {"mib": total_mib(full), "blocked_ms": median, "added_ms": median, "written_ms": median}
    path.unlink()
    rows["selective, synchronous"] = measure_writer(selective, step, scale, device, folder, waits=True)
    rows["full, asynchronous"] = measure_writer(full, step, scale, device, folder, waits=False)
    rows["selective, asynchronous"] = measure_writer(selective, step, scale, device, folder, waits=False)
    return {"step_ms": step_ms, "ways": rows}


def measure_writer(
    tensors: Sequence[tuple[str, Tensor]],
    step: Callable[[], None],
    scale: Scale,
    device: torch.device,
    folder: Path,
    *,
    waits: bool,
) -> dict[str, float]:
    """Medians for a snapshot by `SnapshotWriter`: how long training stood still, and lost in all until it was written.

    Training goes on while the file is written, step by step, unless it `waits`. As many steps without a snapshot
    follow, to compare with.
    """
    measured: dict[str, list[float]] = {"blocked_ms": [], "added_ms": [], "written_ms": []}
    with tempfile.TemporaryDirectory(dir=folder) as into, SnapshotWriter(into, keep_last=1) as writer:
        first_ms = clock(lambda: writer.save(tensors, version=0), device)
        writer.wait()
        for number in range(1, 1 + scale.repeats):
            written = Path(into, f"drafter-{number:08d}.safetensors")
            started, num_steps = time.perf_counter(), 0
            blocked = clock(lambda number=number: writer.save(tensors, version=number), device)
            while not waits and not written.exists():
                clock(step, device)
                num_steps += 1
            if waits:
                writer.wait()
                blocked = 1e3 * (time.perf_counter() - started)
            elapsed = 1e3 * (time.perf_counter() - started)
            undisturbed = sum(clock(step, device) for _ in range(num_steps))
            values = (blocked, max(blocked, elapsed - undisturbed), elapsed)
            for values_of, value in zip(measured.values(), values, strict=True):
                values_of.append(value)
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return {"mib": total_mib(tensors), **medians, "first_ms": first_ms}


def clock(action: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds until the action and what it gave the device to do are done."""
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return 1e3 * (time.perf_counter() - started)


def full_tensors(drafter: DrafterModule, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """All tensors of the module and of the optimizer, those that share memory once."""
    named = dict(drafter.state_dict())
    for index, (_, values) in enumerate(optimizer.state.items()):
        named |= {f"optimizer.{index}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return list({tensor.data_ptr(): (name, tensor) for name, tensor in named.items()}.values())


def total_mib(tensors: Sequence[tuple[str, Tensor]]) -> float:
    """Their size."""
    return sum(tensor.nbytes for _, tensor in tensors) / 2**20


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both, and write the numbers and a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"), help="directory of the results")
    parser.add_argument("--folder", help="where snapshots are written; the system's temporary directory if not given")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--draft-vocab-size", type=int, help="tokens the head can draft; all if not given")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args(argv)
    scale, device = GPU_SCALE, torch.device(arguments.device)
    if arguments.tiny:
        scale, device = TINY_SCALE, torch.device("cpu")
    results = about("tiny" if arguments.tiny else "7b shape", "", 0, on_cpu=device.type == "cpu")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        save_target(scale.shape, Path(folder), device)
        drafter = build_drafter(Path(folder), device, arguments.draft_vocab_size)
        results["head"] = (
            f"hidden size {scale.shape['hidden_size']}, {scale.shape['vocab_size']} tokens, of which "
            f"{arguments.draft_vocab_size or scale.shape['vocab_size']} can be drafted, {drafter.strategy}"
        )
        measurements: dict[str, Callable[[], dict[str, Any]]] = {
            "packing": lambda: measure_packing(drafter, scale, device),
            "snapshots": lambda: measure_snapshots(drafter, scale, device, Path(folder)),
        }
        for part in arguments.parts:
            results[part] = measurements[part]()
            results["ratios"] = ratios(results)
            save(Path(arguments.out) / "drafter_costs.json", results)
            Path(arguments.out, "drafter_costs.md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
