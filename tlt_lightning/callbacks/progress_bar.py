"""Show a bar while the engine writes, a line an iteration, and completions.

Three displays share one throttle: a tqdm bar, a task inside Lightning's Rich display, and sparse lines where the
output is not a terminal. All else is printed through `say`, which leaves bars intact.
"""

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from tqdm import tqdm
from typing_extensions import override

from tlt_lightning.arguments import CountOrZero, Positive, checked
from tlt_lightning.callbacks.rollout_text import (
    best_and_worst,
    completions_table,
    progress_text,
    rollout_label,
    summary_line,
)
from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.rollout import Rollout


def say(text: str) -> None:
    """Print `text` to standard output without breaking a bar that is being drawn there."""
    tqdm.write(f"{text}\n", file=sys.stdout, end="")  # in one piece: Rich's bar in a notebook flushes what is left


class _StandardError:
    """Writes to standard error as it is by then: Rich puts its own there, and draws bars below what that gets."""

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr, end="")


class RolloutProgressBar(RolloutCallback):
    """Shows the rollout while it runs, then a line an iteration and, if asked, completions.

    Stands beside Lightning's training bar. Where standard output is no terminal, that bar is off unless it is a
    notebook's, and a rollout writes at most one line every ten seconds. Only rank zero writes; the bar counts that
    rank's requests.

    Args:
        show_completions: Completions printed after each rollout, half the best, half the worst by reward; 0 is none.
        refresh_seconds: Seconds between two updates of the bar.

    Example:
        >>> trainer = L.Trainer(callbacks=[RolloutProgressBar(show_completions=4)])  # doctest: +SKIP
    """

    @checked()
    def __init__(self, show_completions: CountOrZero = 0, refresh_seconds: Positive = 0.2) -> None:
        self.show_completions = show_completions
        self.refresh_seconds = refresh_seconds
        self._display: _Lines | _RichTask | _TqdmBar | None = None
        self._total = 0
        self._next_update = float("inf")

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if bar is not None and not (sys.stdout.isatty() or hasattr(sys, "ps1")):  # nor a notebook
            bar.disable()  # its last picture would stand below the run's last lines
        for handler in (*logging.root.handlers, *logging.getLogger("lightning").handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr and sys.stdout.isatty():
                handler.setStream(_StandardError())

    @override
    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        bar = trainer.progress_bar_callback
        if trainer.training and isinstance(bar, RichProgressBar) and bar.progress is not None:
            label = rollout_label(trainer).replace("rollout", "iteration")  # Lightning's counts epochs from 0
            bar.progress.update(bar.train_progress_bar.id, description=label)
            bar.progress.live.transient = True  # no last picture here either
        self._close()
        self._next_update = 0.0 if trainer.is_global_zero else float("inf")

    @override
    def on_rollout_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, progress: RolloutProgress) -> None:
        now = time.perf_counter()
        if now < self._next_update:
            return
        if progress.total != self._total:  # another round of dynamic sampling
            self._hide()
        if self._display is None:  # only now is the number of requests known
            self._total = progress.total
            self._display = _display(trainer, rollout_label(trainer), progress.total, self.refresh_seconds)
        self._next_update = now + self._display.seconds
        self._display.update(progress)

    @override
    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        self._close()
        if self.show_completions and trainer.is_global_zero and not trainer.sanity_checking:
            say(completions_table(best_and_worst(rollouts, self.show_completions), rollout_label(trainer)))

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        if trainer.is_global_zero:
            say(summary_line(iteration, trainer.max_epochs, metrics))

    @override
    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        values = [f"{n} {float(v):.3f}" for n, v in trainer.callback_metrics.items() if n.startswith("val/")]
        seen, known = (int(sum(counts)) for counts in (trainer.num_sanity_val_batches, trainer.num_val_batches))
        if values and trainer.is_global_zero:
            when = "before training" if trainer.ckpt_path is None else "before going on"
            say(f"{when}  {'  '.join(values)}{f'  ({seen} of {known} held-out prompts)' * (seen < known)}")

    def _close(self, *_: Any, **__: Any) -> None:
        self._next_update = float("inf")
        self._hide()

    on_exception = teardown = _close

    def _hide(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


def _display(trainer: L.Trainer, label: str, total: int, seconds: float) -> "_Lines | _RichTask | _TqdmBar":
    if not sys.stdout.isatty():
        return _Lines(label)
    bar = trainer.progress_bar_callback
    # Rich owns the screen while it draws: a tqdm bar under it would never be shown.
    if isinstance(bar, RichProgressBar) and bar.is_enabled and bar.progress is not None:
        return _RichTask(bar.progress, label, total, seconds)
    return _TqdmBar(label, total, seconds)


class _TqdmBar:
    def __init__(self, label: str, total: int, seconds: float) -> None:
        self.seconds = seconds
        bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self._bar = tqdm(
            desc=label, total=total, leave=False, dynamic_ncols=True, file=sys.stdout, bar_format=bar_format
        )

    def update(self, progress: RolloutProgress) -> None:
        self._bar.n = progress.finished
        self._bar.set_postfix_str(progress_text(progress), refresh=True)

    def close(self) -> None:
        self._bar.close()


class _RichTask:
    def __init__(self, rich_progress: Any, label: str, total: int, seconds: float) -> None:
        self.seconds = seconds
        self._progress = rich_progress
        self._label = label
        self._task = rich_progress.add_task(label, total=total)

    def update(self, progress: RolloutProgress) -> None:
        description = f"{self._label}: {progress_text(progress)}"
        self._progress.update(self._task, completed=progress.finished, description=description, refresh=True)

    def close(self) -> None:
        # Hidden, not removed: Lightning finds its own tasks by their position.
        self._progress.update(self._task, visible=False, refresh=True)


class _Lines:
    """Writes lines for logs: none for a short rollout, one now and then for a long one."""

    seconds = 10.0

    def __init__(self, label: str) -> None:
        self._label = label

    def update(self, progress: RolloutProgress) -> None:
        if progress.elapsed >= self.seconds:
            say(f"{self._label}: {progress.finished}/{progress.total} finished, {progress_text(progress)}")

    def close(self) -> None:
        """Leave the lines where they are."""
