"""Put a rollout, an iteration and completions into words. Pure."""

import io
import shutil
import sys
from collections.abc import Mapping, Sequence

import lightning as L

from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.rewards.term import RESERVED_NAMES
from tlt_lightning.rollout import Rollout

MAX_SHOWN_CHARS = 400
"""Characters that are shown of a completion, three times as many as of its prompt."""
FAILURES = ("_errors", "_timeouts")
"""Ends of the metrics that count a reward's failures."""


_USES = {
    "sanity_checking": "validation before training",
    "validating": "validation",
    "testing": "test",
    "predicting": "prediction",
}
_IN_LINE = {
    "val/loss": "val loss {val/loss:.4f}",
    "val/accuracy": "val accuracy {val/accuracy:.3f}",
    "rollout/length_max": "length p50 {rollout/length_p50:,.0f} max {rollout/length_max:,.0f}",
    "rollout/truncated": "truncated {rollout/truncated:.1%}",
    "rollout/tokens_per_s": "{rollout/tokens_per_s:,.0f} tok/s",
    "schedule/age": "age {schedule/age:.2f}",
    "speculation/acceptance_length": "accept {speculation/acceptance_length:.2f}",
    "train/mfu": "mfu {train/mfu:.0%}",
}
"""Words of an iteration's line, by the metric that must have been logged."""


def rollout_label(trainer: L.Trainer) -> str:
    """Name the rollout that runs now: its iteration, or another use."""
    rollout = f"rollout {_of_total(trainer.current_epoch + 1, trainer.max_epochs)}"
    label = next((label for use, label in _USES.items() if getattr(trainer, use)), rollout)
    return label if trainer.world_size == 1 else f"{label} (rank {trainer.global_rank} of {trainer.world_size})"


def progress_text(progress: RolloutProgress) -> str:
    """Describe a running rollout: load, speed, longest response, and the speculation in force."""
    rate = progress.tokens / progress.elapsed if progress.elapsed > 0 else 0.0
    waiting = f", waiting {progress.waiting}" * (progress.waiting > 0)
    text = f"running {progress.running}{waiting}, {rate:,.0f} tok/s, longest {progress.longest:,}"
    if not progress.strategy.is_off:
        text += f", K {progress.strategy.num_draft_tokens}"
    if not progress.strategy.is_off or progress.acceptance_length > 1:
        text += f", accept {progress.acceptance_length:.2f}"
    return text


def summary_line(iteration: int, num_iterations: int | None, metrics: Mapping[str, float]) -> str:
    """Sum up an iteration in one line, without what was not logged.

    Args:
        iteration: Finished iterations.
        num_iterations: Number that the whole run has; None or -1 if it has no end.
        metrics: The iteration's metrics, under their usual names.
    """
    parts = [f"iteration {_of_total(iteration, num_iterations)}"]
    if "reward/mean" in metrics:
        spread = f" ± {metrics['reward/std']:.3f}" if "reward/std" in metrics else ""
        parts.append(f"reward {metrics['reward/mean']:.3f}{spread}{_rewards_by_name(metrics)}")
    elif "train/loss" in metrics:
        parts.append(f"loss {metrics['train/loss']:.4f}")
    hidden = {"speculation/acceptance_length"} if metrics.get("speculation/off_share") == 1 else set()
    parts += [text.format_map(metrics) for name, text in _IN_LINE.items() if name in metrics and name not in hidden]
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
