"""A picture of one rollout: its long tail, and how speculation followed it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_lightning.speculation.trace import read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"learned": "#0072b2", "mixed": "#cc79a7", "sibling": "#d55e00", "ngram": "#009e73"}
"""Told apart by colour-blind readers."""
GREY = "#888888"
MEAN_OVER = 50
"""Steps over which acceptance is averaged: one step of a few requests says little."""


def draw_rollout(
    trace: str | Path, path: str | Path, rollout: int = -1, *, plain: Sequence[tuple[float, int]] = ()
) -> None:
    """Draw a rollout from the trace that `speculation.trace` asked for.

    Above, the requests that ran and waited; in the middle, the drafts verified per request in each step, coloured by
    who proposed them; below, the tokens emitted per request and step where drafts were verified. All over time.

    Args:
        trace: The trace file.
        path: Where to save; the ending chooses the format.
        rollout: Which rollout of the file; -1 is the last.
        plain: The same rollout without speculation, to compare with: (seconds since it began, requests that ran).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_trace(trace, rollout)
    if not rows:
        raise ValueError(f"`trace` {str(trace)!r} has no step of rollout {rollout}.")
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, middle, below = figure.subplots(3, 1, sharex=True)
    _draw_requests(above, rows, plain)
    _draw_drafts(middle, rows)
    _draw_acceptance(below, rows)
    below.set_xlabel("seconds since the rollout began")
    for axes in (above, middle, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_requests(axes: Axes, rows: Sequence[dict[str, Any]], plain: Sequence[tuple[float, int]]) -> None:
    times = [row["time"] for row in rows]
    axes.fill_between(times, [row["running"] for row in rows], step="post", color=GREY, alpha=0.5, linewidth=0)
    axes.set_ylabel("running requests")
    if plain:
        compared, running = zip(*plain, strict=True)
        axes.plot(compared, running, color="black", linewidth=0.8, drawstyle="steps-post")
        end = (compared[-1], running[-1])
        axes.annotate("without speculation", end, xytext=(0, 6), textcoords="offset points", ha="right")
    if any(row["waiting"] for row in rows):
        axes.plot(times, [row["waiting"] for row in rows], color=GREY, drawstyle="steps-post")
        axes.annotate("waiting", (times[0], rows[0]["waiting"]), xytext=(4, 4), textcoords="offset points")


def _draw_drafts(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for drafter, color in COLORS.items():
        mine = [row for row in rows if row["verifies"].startswith(drafter)]
        if mine:
            axes.scatter([row["time"] for row in mine], [row["k"] for row in mine], s=6, color=color, label=drafter)
    off = [row["time"] for row in rows if row["verifies"] == "off"]
    if off:
        axes.scatter(off, [0] * len(off), s=6, color=GREY, label="off")
    axes.set_ylabel("drafts per request (K)")
    axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)


def _draw_acceptance(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    speculative = [row for row in rows if row["verifications"]]
    lengths = []
    for index in range(len(speculative)):
        window = speculative[max(0, index + 1 - MEAN_OVER) : index + 1]
        verifications = sum(row["verifications"] for row in window)
        lengths.append(1 + sum(row["accepted"] for row in window) / verifications)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.plot([row["time"] for row in speculative], lengths, ".", markersize=3, color="black")
    axes.set_ylabel(f"tokens per request and step\n(mean of {MEAN_OVER} steps)")
