"""Measure accuracy over held-out prompts."""

from collections.abc import Callable, Sequence
from itertools import chain
from math import comb
from statistics import fmean
from typing import Any

from torch import Tensor, tensor

from tlt_lightning.rollout import Rollout, split_groups


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of `k` samples is correct, estimated without bias.

    Chen et al. 2021: 1 - C(n - c, k) / C(n, k), with n samples of which c are correct.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def accuracies(groups: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return accuracy, and pass@k for k = 2, 4, 8, ... up to the smallest group.

    Args:
        groups: Samples and correct ones of each prompt.

    Example:
        >>> accuracies([(2, 1), (2, 2)])
        {'accuracy': 0.75, 'pass@2': 1.0}
    """
    k, results = 2, {"accuracy": fmean(correct / samples for samples, correct in groups)}
    while k <= min(samples for samples, _ in groups):
        results[f"pass@{k}"] = fmean(pass_at_k(*group, k) for group in groups)
        k *= 2
    return results


class HeldOutMetrics:
    """Computes mean length over held-out prompts, and if there are rewards, these, accuracy and pass@k; or a loss.

    The loss is that of held-out texts.
    """

    def __init__(self, *, has_rewards: bool = True) -> None:
        self.has_rewards = has_rewards
        self._start_over()

    def _start_over(self) -> None:
        self._groups: list[tuple[int, int]] = []  # samples and correct ones of each prompt
        self._rollouts: list[tuple[float, float]] = []  # reward and length of each
        self._losses: list[tuple[Tensor, int]] = []  # sums over tokens, and their numbers

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add whole groups."""
        self._groups += [(len(group), sum(each.is_correct for each in group)) for group in split_groups(rollouts)]
        self._rollouts += [(rollout.reward, float(rollout.response.num_written)) for rollout in rollouts]

    def add_losses(self, losses: Tensor) -> None:
        """Add the negative log-probs of tokens, (N,)."""
        self._losses.append((losses.double().sum(), len(losses)))

    def read(self, stage: str, gather: Callable[[Any], Sequence[Any]] = lambda own: [own]) -> dict[str, float]:
        """Return the metrics under `stage`/ over all ranks, and start over; `gather`, a collective, returns theirs."""
        losses = [(float(total), count) for total, count in self._losses]
        ranks = zip(*gather((self._groups, self._rollouts, losses)), strict=True)
        groups, rollouts, losses = (list(chain.from_iterable(each)) for each in ranks)
        self._start_over()
        metrics: dict[str, float] = {}
        if rollouts:
            rewards, lengths = zip(*rollouts, strict=True)
            metrics = {**accuracies(groups), "reward": fmean(rewards)} if self.has_rewards else {}
            metrics["length"] = fmean(lengths)
        if losses:
            total, count = map(sum, zip(*losses, strict=True))
            metrics |= {"loss": total / count, "perplexity": float(tensor(total / count).exp())}
        return {f"{stage}/{name}": value for name, value in metrics.items()}
