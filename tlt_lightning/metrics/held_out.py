"""Measure accuracy over held-out prompts."""

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor, distributed, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from tlt_lightning.rollout import Rollout


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of `k` samples is correct, estimated without bias.

    Chen et al. 2021: 1 - C(n - c, k) / C(n, k), with n samples of which c are correct.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def has_other_ranks() -> bool:
    """Return True if there are ranks to gather from: vLLM's group of one, on a GPU, cannot gather tensors of a CPU."""
    return distributed.is_initialized() and distributed.get_world_size() > 1


class PassAtK(Metric):
    """Computes accuracy and pass@k over prompts that were each answered several times.

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
        super().__init__(distributed_available_fn=has_other_ranks)
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
        counts = torch.stack([dim_zero_cat(self.num_samples), dim_zero_cat(self.num_correct)], dim=1).tolist()
        k, results = 2, {"accuracy": sum(c / n for n, c in counts) / len(counts)}
        while k <= min(n for n, _ in counts):
            results[f"pass@{k}"] = sum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
            k *= 2
        return {name: torch.tensor(value, device=self.device) for name, value in results.items()}


class HeldOutMetrics(nn.Module):
    """Computes mean length over held-out prompts, and if there are rewards, these, accuracy and pass@k; or a loss.

    The loss is that of held-out texts.
    """

    def __init__(self, *, has_rewards: bool = True) -> None:
        super().__init__()
        self.has_rewards = has_rewards
        self.accuracy = PassAtK()
        # a loss that is no number is shown, where torchmetrics would leave it out of the mean
        means = (MeanMetric("disable", distributed_available_fn=has_other_ranks) for _ in range(3))
        self.reward, self.length, self.loss = means

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add whole groups."""
        if not rollouts:
            return
        self.accuracy.update([(rollout.group, rollout.is_correct) for rollout in rollouts])
        self.reward.update(torch.tensor([rollout.reward for rollout in rollouts]))
        self.length.update(torch.tensor([float(rollout.response.num_written) for rollout in rollouts]))

    def add_losses(self, losses: Tensor) -> None:
        """Add the negative log-probs of tokens, (N,)."""
        self.loss.update(losses.float())

    def read(self, stage: str) -> dict[str, float]:
        """Return the metrics under `stage`/ over all ranks, and start over."""
        metrics: dict[str, Tensor] = {}
        if self.length.update_called:
            rewarded = {**self.accuracy.compute(), "reward": self.reward.compute()} if self.has_rewards else {}
            metrics = {**rewarded, "length": self.length.compute()}
        if self.loss.update_called:
            metrics |= {"loss": self.loss.compute(), "perplexity": self.loss.compute().exp()}
        for metric in (self.accuracy, self.reward, self.length, self.loss):
            metric.reset()
        return {f"{stage}/{name}": float(value) for name, value in metrics.items()}
