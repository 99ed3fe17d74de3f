"""The results of `end_to_end/run.py` as a picture: a panel for each question that something was measured for."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.report import LAST, PAIRED, WORKING, curve, paired, seconds, timed
from benchmarks.end_to_end.work import FIRST_HEAD, STAGES

STAGE_COLORS = {
    "rollout": "#0072b2",
    "logprobs": "#56b4e9",
    "update": "#009e73",
    "drafter": "#e69f00",
    "sync": "#d55e00",
    "reward": "#cc79a7",
    "idle": "#999999",
    "other": "#000000",
}
ARM_COLORS = {
    "plain": "#000000",
    "siblings": "#009e73",
    "frozen": "#0072b2",
    "adaptive": "#d55e00",
    "paired": "#e69f00",
    "random": "#cc79a7",
    "trl": "#999999",
}
FIRST_DRAFT = "speculation/acceptance_rate_pos_1"
LEAST_RANGE = 0.1  # of an axis of acceptance: noise of a hundredth should not look like a fall

Runs = list[dict[str, Any]]


def draw(results: dict[str, Any], path: Path) -> None:
    """Stages of replayed runs as bars; reward over iterations and time, and acceptance, of natural runs as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    warmup = results["warmup"]
    replayed = [run for run in results["runs"] if run["mode"] == "replay" and timed(run, warmup)]
    natural = [run for run in results["runs"] if run["mode"] == "natural" and run["iterations"]]
    drafting = [run for run in natural or replayed if any(FIRST_DRAFT in row["metrics"] for row in run["iterations"])]
    panels: list[Callable[[Any], None]] = []
    if replayed:
        panels.append(lambda panel: draw_stages(panel, replayed, warmup))
    if natural:
        panels += [lambda panel: draw_reward(panel, natural, axis=0), lambda panel: draw_reward(panel, natural, axis=1)]
    if drafting:
        panels.append(lambda panel: draw_acceptance(panel, drafting))
    if both := [run for run in natural if paired(run)]:
        panels.append(lambda panel: draw_both_heads(panel, both))
    if not panels:
        return
    figure = Figure(figsize=(4.4 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"End to end: {results['rung']}", fontweight="bold")
    for panel, fill in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        fill(panel)
        panel.title.set_fontsize(10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def draw_stages(panel: Any, runs: Runs, warmup: int) -> None:
    """Median seconds of each stage, one bar an arm."""
    left = [0.0] * len(runs)
    for stage in (*WORKING, *(stage for stage in STAGES if stage not in WORKING)):
        widths = [statistics.median(seconds(timed(run, warmup), stage)) for run in runs]
        if any(widths):
            panel.barh([run["arm"] for run in runs], widths, left=left, color=STAGE_COLORS[stage], label=stage)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    panel.set(title="Replayed lengths: median seconds by stage", xlabel="seconds per iteration")
    panel.invert_yaxis()


def draw_reward(panel: Any, runs: Runs, axis: int) -> None:
    """Mean reward of each run, over iterations (`axis` 0) or over seconds (1)."""
    for run, label in labelled(runs):
        points = curve(run)
        xs, ys = [point[axis] for point in points], [point[2] for point in points]
        panel.plot(xs, ys, color=ARM_COLORS[run["arm"]], label=label, linewidth=1.3, alpha=0.8)
    against = ("steps", "time")[axis]
    panel.set(title=f"Natural lengths: reward at equal {against}", ylabel="mean reward")
    panel.set_xlabel(("iteration", "seconds of training")[axis])


def draw_acceptance(panel: Any, runs: Runs) -> None:
    """Share of first drafts that the engine accepted, and beside it how far the policy has moved."""
    drift = None
    for run, label in labelled(runs):
        color = ARM_COLORS[run["arm"]]
        points = [(row["iteration"], row["metrics"].get(FIRST_DRAFT)) for row in run["iterations"]]
        panel.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.3, alpha=0.8)
        moved = [(row["iteration"], row["metrics"].get("drafter/policy_drift")) for row in run["iterations"]]
        if any(value for _, value in moved):
            drift = drift or panel.twinx()
            drift.plot(*zip(*moved, strict=True), color=color, linestyle=":", linewidth=1.0)
            drift.set_ylabel("dotted: the policy's drift (KL, nats)")
            drift.spines["top"].set_visible(False)
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, high - LEAST_RANGE), max(high, low + LEAST_RANGE))
    panel.set(title="First drafts accepted in the engine", xlabel="iteration", ylabel="share")


def draw_both_heads(panel: Any, runs: Runs) -> None:
    """Tokens per engine step on held-out text, of the head a run began with and of the one trained along.

    Text differs more from iteration to iteration than heads do, so means of a few iterations and over the runs.
    """
    both = [paired(run) for run in runs]
    iterations = sorted(set.intersection(*({row["iteration"] for row in rows} for rows in both)))
    for prefix, style, head in (("drafter/", "-", "trained along"), (FIRST_HEAD, "--", "as it began")):
        by_run = [{row["iteration"]: row["metrics"][prefix + PAIRED] for row in rows} for rows in both]
        lengths = [statistics.mean(found[iteration] for found in by_run) for iteration in iterations]
        smooth = [statistics.mean(lengths[max(0, end - LAST) : end]) for end in range(1, len(lengths) + 1)]
        panel.plot(iterations, smooth, style, color=ARM_COLORS["paired"], label=head, linewidth=1.6)
    seeds = f", mean of {len(runs)} seeds" if len(runs) > 1 else ""
    panel.set(title=f"Both heads on the same text{seeds}", xlabel=f"iteration (mean of the last {LAST})")
    panel.set_ylabel("tokens per engine step")


def labelled(runs: Runs) -> list[tuple[dict[str, Any], str | None]]:
    """Runs with their arms' names, each name once."""
    names = [run["arm"] for run in runs]
    return [(run, None if run["arm"] in names[:place] else run["arm"]) for place, run in enumerate(runs)]
