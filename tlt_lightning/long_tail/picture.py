"""Draw how the drafter followed the policy while the policy moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_lightning.callbacks.plots import BLUE, GREEN, GREY, ORANGE, frame, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_MARKS = 20
"""Versions named above the picture; of more, every n-th is."""

DRIFTS = {"drafter/policy_drift": "KL from the first policy", "train/kl": "KL to the reference policy"}
"""Metrics of the policy's drift, and their names on the axis; the first that was logged is drawn."""

History = Sequence[Mapping[str, float]]
"""The metrics of each iteration, the first iteration's first."""


def draw_drafter(history: History, path: str | Path) -> None:
    """Draw the drafter's acceptance over the iterations, and the policy's drift below it.

    A line for each iteration that trained goes from the acceptance on held-out sequences before training to that after;
    a cross ends it if that drafter was not published. The metrics are `drafter/acceptance_before`,
    `drafter/acceptance_after`, `drafter/published` (0 or 1), `drafter/version`, `speculation/acceptance_length` (the
    engine's), `drafter/top1_pos_<k>` and those of `DRIFTS`; any may be missing, and a panel without data is left out.
    ValueError means that no iteration has an acceptance.

    Args:
        history: Metrics by name, one mapping an iteration, also where the drafter did nothing.
        path: File to save; the ending chooses the format.
    """
    if not any("drafter/acceptance_after" in row or "speculation/acceptance_length" in row for row in history):
        missing = "`drafter/acceptance_after` or `speculation/acceptance_length`"
        raise ValueError(f"`history` has no acceptance to draw: no iteration has {missing}.")
    positions = _positions(history)
    drift = next((name for name in DRIFTS if _series(history, name)), None)
    figure, panels = frame(1 + bool(positions) + (drift is not None))
    _draw_acceptance(panels[0], history)
    if positions:
        _draw_agreement(panels[1], history, positions)
    if drift is not None:
        _draw_drift(panels[-1], history, drift)
    for panel in panels:
        for iteration in _versions(history):
            panel.axvline(iteration, color="0.9", linewidth=0.8, zorder=0)
    save(figure, path)


def _draw_acceptance(axes: Axes, history: History) -> None:
    before, after = (_series(history, f"drafter/acceptance_{when}") for when in ("before", "after"))
    published = _series(history, "drafter/published")
    good = {iteration: value for iteration, value in after.items() if published.get(iteration)}
    bad = {iteration: value for iteration, value in after.items() if not published.get(iteration)}
    for end, color in ((good, BLUE), (bad, GREY)):
        trained = [iteration for iteration in end if iteration in before]
        axes.vlines(trained, [before[i] for i in trained], [end[i] for i in trained], color=color, linewidth=1.2)
    if engine := _series(history, "speculation/acceptance_length"):
        axes.plot(list(engine), list(engine.values()), color=ORANGE, linewidth=1.6, label="measured by the engine")
    open_circle = {"color": BLUE, "markerfacecolor": "white"}
    for series, marker, style, label in (
        (before, "o", open_circle, "held out, before"),
        (good, "o", {"color": BLUE}, "published"),
        (bad, "x", {"color": GREY}, "not published"),
    ):
        if series:
            axes.plot(list(series), list(series.values()), marker, markersize=4, label=label, **style)  # type: ignore[arg-type]
    axes.set_ylabel("tokens per verification")
    axes.legend(frameon=False, ncols=4, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1.07), borderaxespad=0)
    versions = list(_versions(history).items())
    for iteration, version in versions[:: 1 + len(versions) // MAX_MARKS]:
        axes.text(
            iteration,
            1.01,
            f"v{version}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=7,
            color=GREY,
        )


def _draw_agreement(axes: Axes, history: History, positions: Sequence[int]) -> None:
    for position in positions:
        series = _series(history, f"drafter/top1_pos_{position}")
        strength = 1 - 0.75 * positions.index(position) / len(positions)
        label = f"{'draft ' if position == positions[0] else ''}{position}"
        axes.plot(list(series), list(series.values()), ".-", color=BLUE, alpha=strength, linewidth=1.4, label=label)
    axes.set_ylabel("top-1 agreement")
    axes.legend(frameon=False, ncols=len(positions), fontsize=9, loc="lower right")


def _draw_drift(axes: Axes, history: History, name: str) -> None:
    series = _series(history, name)
    axes.plot(list(series), list(series.values()), color=GREEN, linewidth=1.6)
    axes.set_ylabel(DRIFTS[name])
    axes.set_ylim(bottom=0)


def _versions(history: History) -> dict[int, int]:
    """Return the drafter's version that each publishing iteration began; count it if not logged."""
    versions: dict[int, int] = {}
    for iteration, is_published in _series(history, "drafter/published").items():
        if is_published:
            versions[iteration] = int(history[iteration - 1].get("drafter/version", len(versions) + 1))
    return versions


def _positions(history: History) -> list[int]:
    prefix = "drafter/top1_pos_"
    return sorted({int(name.removeprefix(prefix)) for row in history for name in row if name.startswith(prefix)})


def _series(history: History, name: str) -> dict[int, float]:
    """Return the values of a metric by iteration, counted from 1, where it was logged."""
    return {iteration: row[name] for iteration, row in enumerate(history, 1) if name in row}
