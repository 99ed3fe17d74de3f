"""Draw one rollout: its long tail, and how speculation followed it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.plots import BLUE, GREEN, GREY, ORANGE, frame, save
from benchmarks.rollout.steps import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAFTERS = {"learned": BLUE, "mixed": "#cc79a7", "sibling": ORANGE, "ngram": GREEN, "off": GREY}
MEAN_OVER = 50  # steps, for tokens per step: one step of a few requests says little


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the last replayed rollouts of the adaptive and the plain arm, if there are both."""
    plain, steered = ([Row(*row) for row in results["pictured"].get(name, [])] for name in ("plain", "adaptive"))
    if not plain or not steered:
        return
    times = [row.elapsed for row in steered]

    def requests(panel: Axes) -> None:
        panel.fill_between(times, [row.running for row in steered], step="post", color=GREY, alpha=0.5, label="running")
        compared = [row.elapsed for row in plain]
        panel.plot(compared, [row.running for row in plain], color="black", linewidth=0.8, label="without speculation")
        if any(row.waiting for row in steered):
            panel.plot(times, [row.waiting for row in steered], color=ORANGE, label="waiting")
        panel.set(ylabel="requests", ylim=(0, None))

    def drafts(panel: Axes) -> None:
        for drafter, color in DRAFTERS.items():
            mine = [row for row in steered if row.strategy.startswith(drafter)]
            if mine:
                ks = [int(row.strategy.partition("_")[2] or 0) for row in mine]
                panel.scatter([row.elapsed for row in mine], ks, s=6, color=color, label=drafter)
        panel.set(ylabel="drafts per request (K)", ylim=(-0.3, None))

    def tokens(panel: Axes) -> None:
        ends = range(MEAN_OVER, len(steered))
        rates = []
        for end in ends:
            window = steered[end - MEAN_OVER : end]
            rates.append((steered[end].tokens - window[0].tokens) / max(1, sum(row.running for row in window)))
        panel.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        panel.plot([times[end] for end in ends], rates, color="black", linewidth=0.8)
        panel.set(ylabel=f"tokens per request and step\n(mean of {MEAN_OVER} steps)", ylim=(0, None))

    figure, panels = frame(3)
    for panel, fill in zip(panels, (requests, drafts, tokens), strict=True):
        fill(panel)
        panel.legend(fontsize=8, frameon=False) if panel.get_legend_handles_labels()[0] else None
    panels[-1].set_xlabel("seconds")
    save(figure, path)
