"""See the long tail: how long the responses of an iteration are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import numpy as np

from tlt_lightning import Rollout, RolloutCallback


class LengthHistogram(RolloutCallback):
    """Draws a histogram of response lengths with median, 99th percentile and cap.

    Responses cut off at the length limit are stacked on the others in their own colour; the cap is where they end and
    is not drawn if there are none. Only rank zero draws, from its own rollouts of training.

    Args:
        dirpath: Directory of the pictures `lengths_00001.png`, ...; made if missing.
        every_n_iterations: Draw in every n-th iteration.

    Example:
        callbacks+:
          - class_path: tlt_lightning.gallery.length_histogram.LengthHistogram
            init_args: {dirpath: outputs/lengths, every_n_iterations: 10}
    """

    def __init__(self, dirpath: str, every_n_iterations: int = 10) -> None:
        if every_n_iterations < 1:
            raise ValueError(f"`every_n_iterations` must be at least 1, got {every_n_iterations}.")
        self.dirpath = Path(dirpath)
        self.every_n_iterations = every_n_iterations

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        """Draw this iteration's picture if it is its turn."""
        iteration = trainer.current_epoch + 1
        if not (trainer.training and trainer.is_global_zero) or iteration % self.every_n_iterations:
            return
        self.dirpath.mkdir(parents=True, exist_ok=True)
        draw(rollouts, self.dirpath / f"lengths_{iteration:05}.png", f"Response lengths, iteration {iteration}")


def draw(rollouts: Sequence[Rollout], path: Path, title: str) -> None:
    """Draw the histogram of `rollouts` into the file `path`."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state, and imported only when drawing
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    lengths = np.array([rollout.response.num_written for rollout in rollouts])
    is_truncated = np.array([rollout.is_truncated for rollout in rollouts])
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    panel = figure.subplots()
    # Equal widths on the log axis; a bin narrower than a token would leave gaps between the short lengths.
    edges = np.geomspace(max(lengths.min(), 1) * 0.95, lengths.max() * 1.05, 41)
    edges = np.unique(np.ceil(edges) - 0.5).tolist()
    parts, labels = [lengths[~is_truncated], lengths[is_truncated]], ["finished", "cut off at the limit"]
    panel.hist(parts, bins=edges, stacked=True, color=["#0072b2", "#d55e00"], label=labels, edgecolor="w")
    panel.set_xscale("log")
    marks = {"p50": np.quantile(lengths, 0.5), "p99": np.quantile(lengths, 0.99)}
    if is_truncated.any():
        marks["cap"] = lengths[is_truncated].max()
    for level, (name, length) in enumerate(marks.items()):
        panel.axvline(length, color="0.25", linewidth=1, linestyle="--")
        place = (length, 1.0 + 0.06 * level)  # one above the other: p99 often is the cap
        panel.annotate(f"{name} {length:,.0f}", place, (0, 3), xycoords=("data", "axes fraction"),
                       textcoords="offset points", ha="center", fontsize=9, color="0.25")  # fmt: skip
    panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panel.set_xlabel("response length in tokens (log scale)")
    panel.set_ylabel("responses")
    panel.set_title(f"{title} ({len(lengths):,} responses)", loc="left", fontsize=11, pad=16 + 14 * (len(marks) - 1))
    panel.spines[["top", "right"]].set_visible(False)
    if is_truncated.any():
        panel.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
