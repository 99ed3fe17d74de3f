"""Show a bar while the engine writes, a line an iteration, and completions.

Three displays share one throttle: a tqdm bar, a task inside Lightning's Rich display, and sparse lines where the
output is not a terminal. All else is printed through `say`, which leaves bars intact.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from tqdm import tqdm
from typing_extensions import override

from tlt_lightning.arguments import check_at_least, check_positive
from tlt_lightning.data.batch import Rollout
from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.rewards.term import RESERVED_NAMES

LINE_SECONDS = 10.0
MAX_SHOWN_CHARS = 400
FAILURES = ("_errors", "_timeouts")
"""Ends of the metrics that count a reward's failures."""


def say(text: str) -> None:
    """Print `text` to standard output without breaking a bar that is being drawn there."""
    tqdm.write(text, file=sys.stdout)


class RolloutProgressBar(RolloutCallback):
    """Shows the rollout while it runs, then a line an iteration and, if asked, completions.

    Stands beside Lightning's training bar. Where standard output is no terminal, a rollout writes at most one line
    every ten seconds. Only rank zero writes; the bar counts that rank's requests.

    Args:
        show_completions: Completions printed after each rollout, half the best, half the worst by reward; 0 is none.
        refresh_seconds: Seconds between two updates of the bar.

    Example:
        >>> trainer = L.Trainer(callbacks=[RolloutProgressBar(show_completions=4)])  # doctest: +SKIP
    """

    def __init__(self, show_completions: int = 0, refresh_seconds: float = 0.2) -> None:
        check_at_least("show_completions", show_completions, 0)
        check_positive("refresh_seconds", refresh_seconds)
        self.show_completions = show_completions
        self.refresh_seconds = refresh_seconds
        self._display: _Display | None = None
        self._total = 0
        self._next_update = float("inf")

    @override
    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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
        if values and trainer.is_global_zero:
            say(f"before training  {'  '.join(values)}")

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._next_update = float("inf")
        self._hide()

    def _hide(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


# Text, pure


def rollout_label(trainer: L.Trainer) -> str:
    """Name the rollout that runs now: its iteration, or another use."""
    if trainer.sanity_checking:
        label = "validation before training"
    elif trainer.validating:
        label = "validation"
    elif trainer.predicting:
        label = "prediction"
    else:
        label = f"rollout {_of_total(trainer.current_epoch + 1, trainer.max_epochs)}"
    return label if trainer.world_size == 1 else f"{label} (rank {trainer.global_rank} of {trainer.world_size})"


def progress_text(progress: RolloutProgress) -> str:
    """Describe a running rollout: load, speed, longest response, and the speculation in force."""
    rate = progress.tokens / progress.elapsed if progress.elapsed > 0 else 0.0
    text = f"running {progress.running}, waiting {progress.waiting}, {rate:,.0f} tok/s, longest {progress.longest:,}"
    if not progress.strategy.is_off:
        text += f", K {progress.strategy.num_draft_tokens}"
    if not progress.strategy.is_off or progress.acceptance_length > 1:
        text += f", accept {progress.acceptance_length:.2f}"
    return text


def summary_line(iteration: int, num_iterations: int | None, metrics: Mapping[str, float]) -> str:
    """Sum up an iteration in one line, without what was not logged.

    Args:
        iteration: Finished iterations.
        num_iterations: Of the whole run; None or -1 if it has no end.
        metrics: By the project's metric names.
    """
    parts = [f"iteration {_of_total(iteration, num_iterations)}"]
    if "reward/mean" in metrics:
        spread = f" ± {metrics['reward/std']:.3f}" if "reward/std" in metrics else ""
        parts.append(f"reward {metrics['reward/mean']:.3f}{spread}{_rewards_by_name(metrics)}")
    if "val/accuracy" in metrics:
        parts.append(f"val accuracy {metrics['val/accuracy']:.3f}")
    if "rollout/length_p50" in metrics and "rollout/length_max" in metrics:
        parts.append(f"length p50 {metrics['rollout/length_p50']:,.0f} max {metrics['rollout/length_max']:,.0f}")
    if "rollout/truncated" in metrics:
        parts.append(f"truncated {metrics['rollout/truncated']:.1%}")
    if "rollout/tokens_per_s" in metrics:
        parts.append(f"{metrics['rollout/tokens_per_s']:,.0f} tok/s")
    if "speculation/acceptance_length" in metrics and metrics.get("speculation/off_share", 0.0) < 1:
        parts.append(f"accept {metrics['speculation/acceptance_length']:.2f}")
    if "train/mfu" in metrics:
        parts.append(f"mfu {metrics['train/mfu']:.0%}")
    if "time/iteration" in metrics:
        parts.append(_seconds_by_stage(metrics))
    return "  ".join(parts)


def _rewards_by_name(metrics: Mapping[str, float]) -> str:
    """Name each reward's mean, unweighted, if there are several."""
    taken = tuple(f"reward/{name}" for name in RESERVED_NAMES)
    names = [n for n in metrics if n.startswith("reward/") and n not in taken and not n.endswith(FAILURES)]
    means = " ".join(f"{name.removeprefix('reward/')} {metrics[name]:.3f}" for name in names)
    return f" ({means})" if len(names) > 1 else ""


def _seconds_by_stage(metrics: Mapping[str, float]) -> str:
    """Name an iteration's seconds, its stages above a twentieth, and all others together."""
    total = metrics["time/iteration"]
    stages = {name.removeprefix("time/"): seconds for name, seconds in metrics.items() if name.startswith("time/")}
    named = [stage for stage in stages if stage not in ("iteration", "other") and stages[stage] >= 0.05 * total]
    named.sort(key=lambda stage: stages[stage], reverse=True)
    shown = {stage: stages[stage] for stage in named} | {"other": total - sum(stages[stage] for stage in named)}
    return f"{total:.1f} s ({' '.join(f'{stage} {seconds:.1f}' for stage, seconds in shown.items())})"


def best_and_worst(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """Pick up to `count` rollouts, half with the highest rewards and half with the lowest."""
    ranked = sorted(rollouts, key=lambda rollout: rollout.reward, reverse=True)
    if len(ranked) <= count:
        return ranked
    num_worst = count // 2
    return ranked[: count - num_worst] + ranked[len(ranked) - num_worst :]


def completions_table(rollouts: Sequence[Rollout], title: str) -> str:
    """Draw a table of reward, length, prompt and completion, long texts cut in the middle."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"completions, {title}", title_justify="left", show_lines=True, expand=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("prompt", ratio=1)
    table.add_column("completion", ratio=3)
    for rollout in rollouts:
        tokens = f"{len(rollout.response.token_ids):,}" + ("\ncut off" if rollout.is_truncated else "")
        # `Text`, because a completion may well contain what Rich takes for markup.
        texts = [Text(shorten(rollout.prompt.text, MAX_SHOWN_CHARS // 3)), Text(shorten(rollout.text, MAX_SHOWN_CHARS))]
        table.add_row(f"{rollout.reward:.3f}", tokens, *texts)
    page = io.StringIO()
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    Console(file=page, width=width, force_terminal=sys.stdout.isatty()).print(table)
    return page.getvalue().rstrip("\n")


def shorten(text: str, max_chars: int) -> str:
    """Put `text` on one line and cut its middle out if it is longer than `max_chars`."""
    text = " ".join(text.split())
    if len(text) <= max_chars:
        return text
    head = (max_chars - 5) // 2
    return f"{text[:head]} ... {text[len(text) - (max_chars - 5 - head) :]}"


def _of_total(iteration: int, total: int | None) -> str:
    return f"{iteration}/{total}" if total is not None and total > 0 else str(iteration)


# Displays


class _Display(Protocol):
    seconds: float

    def update(self, progress: RolloutProgress) -> None: ...

    def close(self) -> None: ...


def _display(trainer: L.Trainer, label: str, total: int, seconds: float) -> _Display:
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

    seconds = LINE_SECONDS

    def __init__(self, label: str) -> None:
        self._label = label

    def update(self, progress: RolloutProgress) -> None:
        if progress.elapsed >= LINE_SECONDS:
            say(f"{self._label}: {progress.finished}/{progress.total} finished, {progress_text(progress)}")

    def close(self) -> None:
        """Leave the lines where they are."""
