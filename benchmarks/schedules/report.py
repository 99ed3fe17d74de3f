"""Write the report of `python -m benchmarks schedules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.results import heading, table
from benchmarks.schedules.check import report_check

Rows = Sequence[Mapping[str, Any]]


def report(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report."""
    lines = heading("Schedules, simulated", results["about"])
    lines += ["`python -m benchmarks schedules --help` says what is simplified.", ""]
    lines += report_check(results["check"])
    for part in (recorded, resampled):
        lines += part(results["rows"])
    return lines


def recorded(rows: Rows) -> list[str]:
    """Return what schedules do on recorded lengths."""
    names = list(rows[0]["relative"])
    lines = [
        "## Recorded lengths",
        "",
        "By policy, seconds of a rollout over the synchronous ones. Halves: groups of four, whose earlier answers are "
        "the other four. Steps saved: were one token a step. Idle: 1 - mean running / most running, 7B, plain. "
        "Continued: responses; read again: their text, of the tokens learned from; age: of tokens, in iterations.",
        "",
    ]
    header = ["lengths", "workers", "schedule", *names, "steps saved", "idle", "continued"]
    header += ["read again", "age"]
    cells = []
    for row in [row for row in rows if row["is_recorded"]]:
        shares = [row["saved_steps"], row["idle"]["7B, plain"], row["continued"], row["read"]]
        relative = [f"{row['relative'][name]:.2f}" for name in names]
        shown = [row["lengths"], row["workers"], row["schedule"], *relative]
        cells.append([*shown, *(f"{share:.0%}" for share in shares), f"{row['age']:.2f}"])
    return lines + table(header, cells)


def resampled(rows: Rows) -> list[str]:
    """Return what partial rollouts do by group size and share of long responses."""
    lines = [
        "## By group size and share of long responses",
        "",
        "256 responses of one worker; a long one has more than half the tokens of the longest. Groups: share of those "
        "with a long response. Then seconds over the synchronous ones, 7B plain / 7B head / 23M plain; in brackets "
        "steps saved. Those with `%` are drawn one by one.",
        "",
    ]
    cases: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in [row for row in rows if row["workers"] == 1 and not row["has_earlier"]]:
        cases.setdefault((row["lengths"], row["size"]), []).append(row)
    cells = []
    for (name, size), (first, *others) in sorted(cases.items(), key=lambda case: case[1][0]["groups"]):
        cells.append([name, size, f"{first['groups']:.0%}", *map(_summary, others)])
    header = ["lengths", "group", "groups", *(row["schedule"] for row in others)]
    return lines + table(header, cells)


def _summary(row: Mapping[str, Any]) -> str:
    relative = " / ".join(f"{row['relative'][name]:.2f}" for name in ("7B, plain", "7B, head", "23M, plain"))
    return f"{relative} ({row['saved_steps']:.0%})"
