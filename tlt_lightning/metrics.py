"""Numbers about rollouts and updates: per iteration for the logger, and accuracy over held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from tlt_lightning.data.batch import Rollout
from tlt_lightning.data.dynamic_sampling import has_spread, split_groups

_COUNTED = ("_errors", "_timeouts", "groups_drawn", "groups_without_signal_kept")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of `k` samples is correct, estimated without bias from `num_samples` (Chen et al. 2021).

    1 - C(n - c, k) / C(n, k), with n samples of which c are correct.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class PassAtK(Metric):
    """Accuracy and pass@k over prompts that were each answered several times.

    Example:
        >>> metric = PassAtK()
        >>> metric.update([(0, True), (0, False), (1, True), (1, True)])
        >>> {name: value.item() for name, value in metric.compute().items()}
        {'accuracy': 0.75, 'pass@2': 1.0}
    """

    full_state_update = False
    num_samples: list[Tensor]
    num_correct: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_samples", default=[], dist_reduce_fx="cat")
        self.add_state("num_correct", default=[], dist_reduce_fx="cat")

    @override
    def update(self, samples: Sequence[tuple[int, bool]]) -> None:
        """Add whole groups: `samples` are (group, whether it is correct)."""
        groups: dict[int, list[bool]] = {}
        for group, correct in samples:
            groups.setdefault(group, []).append(correct)
        self.num_samples.append(torch.tensor([len(group) for group in groups.values()], device=self.device))
        self.num_correct.append(torch.tensor([sum(group) for group in groups.values()], device=self.device))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return `accuracy`, and `pass@k` for k = 2, 4, 8, ... up to the smallest group."""
        counts = torch.stack([_cat(self.num_samples), _cat(self.num_correct)], dim=1).tolist()
        k, results = 2, {"accuracy": sum(c / n for n, c in counts) / len(counts)}
        while k <= min(n for n, _ in counts):
            results[f"pass@{k}"] = sum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
            k *= 2
        return {name: torch.tensor(value, device=self.device) for name, value in results.items()}


def _cat(state: list[Tensor] | Tensor) -> Tensor:
    return torch.cat(state) if isinstance(state, list) else state  # reduced states come concatenated


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths, truncation, rewards and the share of groups without a learning signal, under the project's names."""
    lengths = torch.tensor([float(len(rollout.response.token_ids)) for rollout in rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    metrics: dict[str, float] = {
        "rollout/length_mean": lengths.mean().item(),
        "rollout/length_p50": lengths.quantile(0.5).item(),
        "rollout/length_p99": lengths.quantile(0.99).item(),
        "rollout/length_max": lengths.max().item(),
        "rollout/truncated": sum(rollout.is_truncated for rollout in rollouts) / len(rollouts),
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/zero_std_groups": zero_std_share(rollouts),
    }
    for name in rollouts[0].rewards:
        metrics[f"reward/{name}"] = sum(rollout.rewards[name] for rollout in rollouts) / len(rollouts)
    return metrics


def zero_std_share(rollouts: Sequence[Rollout]) -> float:
    """Share of groups whose responses all earned the same, so that group-normalised advantages are zero."""
    groups = split_groups(rollouts)
    return sum(not has_spread(group) for group in groups) / len(groups)


def tail_share(trace: Sequence[tuple[float, int]], num_requests: int, fraction: float = 0.1) -> float:
    """Share of a rollout's time in which at most `fraction` of its requests were still unfinished: the long tail.

    Args:
        trace: (seconds since the start, unfinished requests) after each engine step.
        num_requests: Requests of the rollout.
        fraction: What counts as few.
    """
    if not trace or trace[-1][0] <= 0:
        return 0.0
    limit = max(1.0, fraction * num_requests)
    start = next((seconds for seconds, unfinished in trace if unfinished <= limit), trace[-1][0])
    return 1.0 - start / trace[-1][0]


class UpdateMetrics:
    """This rank's metrics of an iteration's update: means over each optimizer step, then over the steps.

    They are kept until the iteration's end, when all are logged. Logged as they come they would take over a hundredth
    of a small policy's update, and with `sync_dist` a collective each, which a progress bar begins on rank zero alone.
    """

    def __init__(self) -> None:
        self._micro_batches: list[dict[str, Tensor]] = []  # since the last optimizer step
        self._steps: dict[str, list[Tensor]] = {}

    def clear(self) -> None:
        """Begin an iteration; an earlier fit may have been interrupted within a step."""
        self._micro_batches.clear()
        self._steps.clear()

    def add_micro_batch(self, metrics: dict[str, Tensor]) -> None:
        """Take in a micro-batch of the step under way."""
        self._micro_batches.append(metrics)

    def end_step(self) -> dict[str, Tensor]:
        """Means over the step's micro-batches, which are noted."""
        parts, self._micro_batches = self._micro_batches, []
        metrics = {name: torch.stack([part[name] for part in parts]).mean() for name in parts[0]}
        self.note(metrics)
        return metrics

    def note(self, metrics: dict[str, Tensor]) -> None:
        """Take in what a whole step has."""
        for name, value in metrics.items():
            self._steps.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        """Means over the iteration's steps."""
        return {name: float(torch.stack(values).mean()) for name, values in self._steps.items()}


def combine_over_ranks(trainer: L.Trainer, metrics: dict[str, float]) -> dict[str, float]:
    """Combine every rank's metrics in one collective, in `on_train_epoch_end` of all ranks; see `combine_ranks`."""
    if trainer.world_size == 1:
        return metrics
    # Lightning synchronises what others logged with `sync_dist` when it is first read. A progress bar may have done so
    # on rank zero, which now waits for the other ranks: they must read it before they meet in a collective of ours.
    _ = trainer.callback_metrics
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, metrics)
    return combine_ranks(gathered)


def combine_ranks(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the ranks that have a metric; the largest of `_max`, the sum of counts (failed rewards, groups).

    Ranks may have different ones: which draft lengths an engine used, for example, is its own affair.
    """
    combined = {}
    for name in sorted(set().union(*ranks)):
        values = [metrics[name] for metrics in ranks if name in metrics]
        if name.endswith("_max"):
            combined[name] = max(values)
        else:
            combined[name] = sum(values) if name.endswith(_COUNTED) else sum(values) / len(values)
    return combined
