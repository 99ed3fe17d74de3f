"""The ratios and the report of `micro/drafter_costs.py`."""

from __future__ import annotations

from typing import Any

from benchmarks.common.results_file import heading


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """The comparisons, each side at its best setting."""
    found = {}
    if "snapshots" in results:
        ways = results["snapshots"]["ways"]
        selective = ways["selective, asynchronous"]
        for cost in ("blocked_ms", "added_ms"):
            full = min(row[cost] for name, row in ways.items() if name.startswith("full, synchronous"))
            found[f"snapshot_{cost.removesuffix('_ms')}"] = full / selective[cost]
    if "packing" in results:
        speeds = results["packing"]["samples_per_s"]
        packed = best(speeds["packed"])
        rivals = {
            "padded": best({size: speed for size, speed in speeds["padded"].items() if int(size) > 1}),
            "sorted": best(speeds["padded, sorted by length"]),
            "alone": speeds["padded"].get(1),
        }
        found |= {f"packed_over_{name}": packed / speed for name, speed in rivals.items() if packed and speed}
    return found


def best(speeds: dict[int, float | None]) -> float:
    """The highest of those that fitted into memory, 0 if none did."""
    return max((speed for speed in speeds.values() if speed), default=0.0)


def render(results: dict[str, Any]) -> str:
    """The report in Markdown."""
    found = results["ratios"]
    lines = [*heading("What the drafter's training costs", results), f"Head: {results['head']}."]
    if "snapshots" in results:
        lines += ["", "## Snapshots", "", *snapshot_table(results["snapshots"]), ""]
        lines += [
            f"Full and synchronous (the faster of two ways) over selective and asynchronous: training stands still "
            f"{found['snapshot_blocked']:.1f} times as long, and loses {found['snapshot_added']:.1f} times as much in "
            "all. The paper reports 9.2."
        ]
    if "packing" in results:
        packing = results["packing"]
        lines += ["", "## Packing", ""]
        lines += [
            f"{packing['sequences']} sequences of {packing['length_p50']:.0f} tokens in the median, "
            f"{packing['length_mean']:.0f} on average, {packing['length_max']} at most; loss and backward.",
            "",
            *packing_table(packing),
            "",
        ]
        names = {
            "packed_over_padded": "padded batches (the paper reports 2.2)",
            "packed_over_sorted": "padded batches of sequences sorted by length",
            "packed_over_alone": "one sequence at a time, which pads nothing",
        }
        gains = [f"{found[key]:.2f} times the rate of {name}" for key, name in names.items() if key in found]
        lines += [f"Packs have {', '.join(gains)}; each at its best setting."]
    return "\n".join(lines) + "\n"


def snapshot_table(snapshots: dict[str, Any]) -> list[str]:
    """A row for each way to write a snapshot."""
    rows = ["| snapshot | MiB | training stands still, ms | loses in all, ms | on disk after, ms | first call, ms |"]
    rows += ["|---|---|---|---|---|---|"]
    for name, row in snapshots["ways"].items():
        first = f"{row['first_ms']:.1f}" if "first_ms" in row else "-"
        costs = " | ".join(f"{row[cost]:.1f}" for cost in ("blocked_ms", "added_ms", "written_ms"))
        rows += [f"| {name} | {row['mib']:.1f} | {costs} | {first} |"]
    return [*rows, "", f"A training step takes {snapshots['step_ms']:.1f} ms; the first call page-locks host memory."]


def packing_table(packing: dict[str, Any]) -> list[str]:
    """A row for each way of batching and each setting."""
    rows = ["| way | setting | samples/s | entries that are not padding |", "|---|---|---|---|"]
    for way, speeds in packing["samples_per_s"].items():
        unit = "entries a pack" if way == "packed" else "rows a batch"
        for setting, speed in speeds.items():
            rate = "out of memory" if speed is None else f"{speed:.1f}"
            rows += [f"| {way} | {setting} {unit} | {rate} | {packing['filled'][way][setting]:.0%} |"]
    return rows
