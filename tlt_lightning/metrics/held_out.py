"""Measure a policy on held-out prompts or texts."""

from collections.abc import Callable, Sequence
from itertools import chain
from math import comb
from typing import Any

import torch
from torch import Tensor

from tlt_lightning.rollout import Rollout, split_groups


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of `k` samples is correct, estimated without bias.

    Chen et al. 2021: 1 - C(n - c, k) / C(n, k), with n samples of which c are correct.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class HeldOutMetrics:
    """Measures answers to held-out prompts by accuracy, pass@k, reward and length, and held-out texts by their loss.

    Without rewards, of answers only the length.
    """

    def __init__(self, *, has_rewards: bool = True) -> None:
        self.has_rewards = has_rewards
        self._clear()

    def _clear(self) -> None:
        self._groups: list[tuple[int, int, float, int]] = []  # answers, correct ones, sums of rewards and of lengths
        self._loss, self._num_tokens = 0.0, 0

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add whole groups."""
        for group in split_groups(rollouts):
            num_correct, rewards = sum(each.is_correct for each in group), sum(each.reward for each in group)
            self._groups.append((len(group), num_correct, rewards, sum(each.response.num_written for each in group)))

    def add_losses(self, losses: Tensor) -> None:
        """Add the negative log-probs of tokens, (N,)."""
        self._loss += float(losses.float().sum())
        self._num_tokens += losses.numel()

    def read(self, stage: str, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return the metrics of all ranks under `stage`/, and start over; `gather` returns what each rank has.

        There is a `pass@k` for k = 2, 4, 8, ... up to the smallest group.
        """
        gathered, losses, num_tokens = zip(*gather((self._groups, self._loss, self._num_tokens)), strict=True)
        self._clear()
        metrics: dict[str, float] = {}
        if groups := list(chain.from_iterable(gathered)):
            sizes, num_correct, rewards, lengths = zip(*groups, strict=True)
            if self.has_rewards:
                counts = list(zip(sizes, num_correct, strict=True))
                metrics["accuracy"], k = sum(c / n for n, c in counts) / len(counts), 2
                while k <= min(sizes):
                    metrics[f"pass@{k}"] = sum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
                    k *= 2
                metrics["reward"] = sum(rewards) / sum(sizes)
            metrics["length"] = sum(lengths) / sum(sizes)
        if any(num_tokens):
            loss = torch.tensor(sum(losses) / sum(num_tokens))
            metrics |= {"loss": loss.item(), "perplexity": loss.exp().item()}
        return {f"{stage}/{name}": value for name, value in metrics.items()}
