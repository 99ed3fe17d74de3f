"""Render the results of `python -m benchmarks rollout` as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common.results import heading, table
from benchmarks.common.statistics import middle, rounded
from benchmarks.rollout.arms import ENGINES, KS, arms_of

Runs = Sequence[dict[str, Any]]
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
STALLED = 0.1
"""Share of a turn's seconds that stalls may take before the report warns of it."""


def render(results: dict[str, Any]) -> list[str]:
    """Return everything measured so far."""
    first, *later = results["about"]
    lines = heading("Rollout", first)
    for record in later:
        lines += [f"Gone on with `{record['command']}` on {record['hardware']}.", ""]
    setup, lengths = results["setup"], sorted(results.get("lengths", []))
    lines += [f"{setup['num_prompts']} prompts x {setup['group_size']} responses, temperature 1, {setup['dtype']}.", ""]
    if lengths:
        at = ", ".join(f"{name} {lengths[int(share * (len(lengths) - 1))]}" for name, share in QUANTILES.items())
        lines += [f"Recorded lengths: {at}, {sum(lengths)} tokens in all.", ""]
    lines += [*arms_table(results), *limit_section(results), *engines_section(results)]
    for failure in results["failures"]:
        lines += [f"- {failure['job']} failed: `{failure['error'].strip().splitlines()[-1]}`"]
    if results["left_out"]:
        lines += ["", f"Left out, the budget spent or an arm having failed: {'; '.join(results['left_out'])}."]
    return lines


def by_arm(results: dict[str, Any]) -> dict[str, Runs]:
    """Return the replayed runs by arm, in the order of their first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        if run["mode"] == "replayed":
            found.setdefault(run["arm"], []).append(run)
    return dict(found)


def arms_table(results: dict[str, Any]) -> list[str]:
    """Return a row for each arm, and a warning for each turn that stood still."""
    arms = by_arm(results)
    if not arms:
        return []
    plain = middle([run["seconds"] for run in arms.get("plain", [])])
    limit = results.get("limit", {}).get("limit_seconds")
    modelled = {name for name, arm in arms_of(results["setup"]["heads"]).items() if arm.is_modelled}
    header = ["arm", "turns", "seconds", "least to most", "stalls s", "speedup", "tau", "of the limit", "K mean", "off"]
    rows = []
    for name, runs in arms.items():
        held = limit if name in modelled else None
        rows.append([name, *arm_row(runs, plain, held)])
    lines = [
        "## Same lengths: all arms write responses of the recorded lengths",
        "",
        "Medians over turns. tau: tokens per request and step with drafts. stalls: the most that",
    ]
    lines += [
        "a turn took beyond its prompts and the medians of its steps. of the limit: for arms that draft as those it"
    ]
    lines += ["is modelled on. graphs: share of steps with a CUDA graph.", ""]
    lines += table([*header, "graphs", "tokens/s", "tail share", "kept by position"], rows)
    for name, runs in arms.items():
        for run in runs:
            if run["stall_seconds"] > STALLED * run["seconds"]:
                stood = f"{run['stall_seconds']:.1f} of its {run['seconds']:.1f} s"
                lines += [f"**{name} #{run['turn']} stood still for {stood}.**", ""]
    return lines


def arm_row(runs: Runs, plain: float | None, limit: float | None) -> list[Any]:
    """Return the row of an arm's runs, beside the plain arm and the modelled limit."""
    seconds = [run["seconds"] for run in runs]
    median = statistics.median(seconds)

    def of(name: str) -> float | None:
        return middle([run[name] for run in runs if name in run])

    def percent(value: float | None) -> str | None:
        return None if value is None else f"{value:.0%}"

    kept = [rounded(of(f"acceptance_rate_pos_{i}"), 2) for i in range(1, max(KS) + 1)]
    return [
        len(runs),
        f"{median:.2f}",
        f"{min(seconds):.2f} to {max(seconds):.2f}",
        f"{max(run['stall_seconds'] for run in runs):.2f}",
        rounded(plain and plain / median, 2),
        rounded(of("acceptance_length"), 2),
        percent(limit and limit / median),
        rounded(of("k_mean"), 2),
        percent(of("off_share")),
        percent(of("graph_hits")),
        f"{of('tokens_per_s'):,.0f}",
        percent(of("tail_share")),
        " ".join(filter(None, kept)) or None,
    ]


def limit_section(results: dict[str, Any]) -> list[str]:
    """Return the modelled limit and how good its model is."""
    limit = results.get("limit")
    if not limit:
        return []
    seconds, measured = limit["limit_seconds"], limit["measured_seconds"]
    lines = ["## Limit", "", f"Best K in every step at the measured step times and acceptance: {seconds:.2f} s,"]
    lines += [f"{measured['plain'] / seconds:.2f} times as fast as plain. The model's own error:", ""]
    modelled = limit["modelled_seconds"].items()
    rows = [
        [name, f"{measured[name]:.2f}", f"{made:.2f}", f"{made / measured[name] - 1:+.1%}"] for name, made in modelled
    ]
    lines += [*table(["arm", "measured", "modelled", "error"], rows), "Milliseconds per step:", ""]
    lines += table(["batch", "plain", *(f"K={k}" for k in KS)], limit["step_ms"])
    best = ", ".join(f"{first}-{last}: {k}" for first, last, k in limit["best_k"])
    return [*lines, f"Best K by batch size: {best}.", ""]


def engines_section(results: dict[str, Any]) -> list[str]:
    """Return what each engine is and holds."""
    engines = results["engines"]
    if not engines:
        return []
    lines = ["## Engines", "", *(f"- {kind}: {ENGINES.get(kind, 'as head, another head')}" for kind in engines), ""]
    names = ("start s", "async", "tokens a step", "KV tokens", "peak GiB", "graphs MiB")
    lines += table(["engine", *names], [[kind, *map(found.get, names)] for kind, found in engines.items()])
    lines += ["MiB of graphs are what the device lost meanwhile, to engines that start at the same time too.", ""]
    for kind, found in engines.items():
        lines += [f"Graphs of the {kind} engine:", "", found["graphs"], ""] if "graphs" in found else []
    return lines
