"""Report a finished run: its picture, key numbers as JSON, and places of its files."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from tlt_lightning.callbacks.plots import COLORS, frame, save
from tlt_lightning.callbacks.progress_bar import say
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.seeds import given_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

RECORDED = {
    "reward_mean": "reward/mean",
    "held_out_accuracy": "val/accuracy",
    "length_p50": "rollout/length_p50",
    "length_p99": "rollout/length_p99",
    "length_max": "rollout/length_max",
}
"""Values kept of each iteration, and the metric that each comes from."""

LABEL_POINTS = 12.0

History = Mapping[int, Mapping[str, float | None]]
"""The recorded values by iteration; None where the metric was not logged."""


class RunReport(RolloutCallback):
    """Writes `report.png` and `summary.json` when `Trainer.fit` ends, and says where files lie.

    An interrupted run gets both too; a resumed run reports from its beginning, as the history is in the checkpoint.
    `summary.json` has these keys, null where nothing was measured:

    - `seed`: Of `seed_everything`.
    - `iterations`, `seconds`: Finished iterations and wall-clock time since this callback was made (with the command
      line: before the engine is set up), those before a resume included.
    - `held_out_accuracy_before`: Before training, if `num_sanity_val_steps` covered all held-out prompts.
    - `held_out_accuracy_after`, `held_out_accuracy_after_iteration`: The latest validation and its iteration.
    - `reward_mean`, `length_p50`, `length_p99`, `length_max`: Of the last iteration; lengths in tokens.
    - `interrupted`: Whether an exception or Ctrl-C ended the run.

    Args:
        dirpath: Directory to write to; made if missing. Its name is the picture's title.

    Example:
        >>> trainer = L.Trainer(callbacks=[RunReport("outputs/quickstart")])  # doctest: +SKIP
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = Path(dirpath)
        self.history: dict[int, dict[str, float | None]] = {}
        self.accuracy_before: float | None = None
        self._earlier_seconds = 0.0
        self._started = time.perf_counter()

    @override
    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        accuracy = trainer.callback_metrics.get("val/accuracy")
        # A part of the held-out prompts is not comparable with all of them.
        if accuracy is not None and trainer.num_sanity_val_batches == trainer.num_val_batches:
            self.accuracy_before = float(accuracy)

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        self.history[iteration] = {name: metrics.get(metric) for name, metric in RECORDED.items()}

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._write(trainer, interrupted=False)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not (trainer.is_global_zero and self.history and trainer.state.fn == "fit"):
            return
        try:
            self._write(trainer, interrupted=True)
        except Exception:
            # Raising here would hide what ended the run and keep the engine from being closed.
            log.exception("The report of the interrupted run could not be written to %s.", self.dirpath)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "history": {iteration: dict(values) for iteration, values in self.history.items()},
            "accuracy_before": self.accuracy_before,
            "seconds": self._seconds,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {int(iteration): dict(values) for iteration, values in state_dict["history"].items()}
        self.accuracy_before = state_dict["accuracy_before"]
        self._earlier_seconds = state_dict["seconds"]

    @property
    def _seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started

    def _write(self, trainer: L.Trainer, *, interrupted: bool) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        measured = summarize(self.history, self.accuracy_before)
        summary = {"seed": given_seed(), **measured, "seconds": round(self._seconds, 3), "interrupted": interrupted}
        summary_path = self.dirpath / "summary.json"
        summary_path.write_text(json.dumps(summary, indent=2) + "\n")
        lines = [f"run {'interrupted' if interrupted else 'finished'} after {summary['iterations']} iterations"]
        lines += [f"  checkpoint  {path}" for path in _checkpoints(trainer)]
        lines += [f"  metrics     {path}" for path in _metric_dirs(trainer)]
        lines += [f"  summary     {summary_path}"]
        if self.history:
            picture_path = self.dirpath / "report.png"
            draw(self.history, self.accuracy_before, picture_path, title=self.dirpath.name)
            lines += [f"  picture     {picture_path}"]
        say("\n".join(lines))


def summarize(history: History, accuracy_before: float | None) -> dict[str, Any]:
    """Return the measured keys of `summary.json` (see `RunReport`)."""
    last = history[max(history)] if history else {}
    validated = [iteration for iteration in sorted(history) if history[iteration]["held_out_accuracy"] is not None]
    return {
        "iterations": max(history, default=0),
        "held_out_accuracy_before": accuracy_before,
        "held_out_accuracy_after": history[validated[-1]]["held_out_accuracy"] if validated else None,
        "held_out_accuracy_after_iteration": validated[-1] if validated else None,
        **{name: last.get(name) for name in ("reward_mean", "length_p50", "length_p99", "length_max")},
    }


def draw(history: History, accuracy_before: float | None, path: Path, title: str) -> None:
    """Draw reward, held-out accuracy (if measured) and response lengths over the iterations."""
    before = {} if accuracy_before is None else {0: accuracy_before}
    accuracy = before | _series(history, "held_out_accuracy")
    figure, panels = frame(3 if accuracy else 2)
    figure.suptitle(title, fontweight="bold")
    curves: list[dict[str, dict[int, float]]] = [{"": _series(history, "reward_mean")}]
    _draw_panel(panels[0], "Reward of the rollouts", "mean reward", curves[0])
    if accuracy:
        curves.append({"": accuracy})
        note = " (iteration 0: before training)" if before else ""
        _draw_panel(panels[1], f"Accuracy on held-out prompts{note}", "accuracy", curves[1])
    curves.append({label: _series(history, f"length_{label}") for label in ("max", "p99", "p50")})
    _draw_panel(panels[-1], "Length of the responses", "tokens (log scale)", curves[-1])
    _use_log_scale(panels[-1])
    panels[-1].set_xlim(-0.02 * max(history), 1.02 * max(history))
    figure.draw_without_rendering()  # settles the layout, which the labels' places depend on
    for panel, panel_curves in zip(panels, curves, strict=True):
        _label_ends(panel, panel_curves)
    save(figure, path)


def _draw_panel(panel: Axes, title: str, unit: str, curves: Mapping[str, Mapping[int, float]]) -> None:
    for curve, color in zip(curves.values(), COLORS, strict=False):
        marker = "o" if len(curve) <= 40 else ""
        panel.plot(list(curve), list(curve.values()), color=color, linewidth=1.6, marker=marker, markersize=3)
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_ylabel(unit, fontsize=9)
    panel.grid(axis="y", color="0.9", linewidth=0.8)


def _label_ends(panel: Axes, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Write each curve's name and last value at its end, pushed apart where curves end together."""
    points_per_pixel = 72 / panel.figure.dpi
    upper = float("inf")
    for (label, curve), color in zip(curves.items(), COLORS, strict=False):  # from top to bottom
        if not curve:
            continue
        end = max(curve)
        height = panel.transData.transform((end, curve[end]))[1] * points_per_pixel
        upper = min(height, upper - LABEL_POINTS)
        text = f"{label} {curve[end]:,.0f}" if label else f"{curve[end]:.3f}"
        place = (6, upper - height)
        panel.annotate(text, (end, curve[end]), place, textcoords="offset points", va="center", color=color, fontsize=9)


def _use_log_scale(panel: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=8))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _series(history: History, name: str) -> dict[int, float]:
    values = ((iteration, history[iteration][name]) for iteration in sorted(history))
    return {iteration: value for iteration, value in values if value is not None}


def _checkpoints(trainer: L.Trainer) -> list[str]:
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    paths = [callback.last_model_path or callback.best_model_path for callback in callbacks]
    return [path for path in paths if path and Path(path).exists()]


def _metric_dirs(trainer: L.Trainer) -> list[str]:
    dirs = [logger.log_dir or logger.save_dir for logger in trainer.loggers]
    return [str(Path(directory)) for directory in dict.fromkeys(dirs) if directory]
