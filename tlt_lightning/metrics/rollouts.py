"""Measure the rollouts of an iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from tlt_lightning.metrics.iteration_log import IterationLog
from tlt_lightning.rollout import Rollout, has_spread, split_groups


def log_rollouts(log: IterationLog, rollouts: Sequence[Rollout]) -> None:
    """Log lengths, kept drafts, truncation, rewards and the share of groups without a learning signal."""
    lengths = torch.tensor([float(len(rollout.response.token_ids)) for rollout in rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    log.sum("rollout/tokens", lengths.sum())
    kept, proposed = Counter[str](), Counter[str]()
    for rollout in rollouts:
        kept += Counter(rollout.response.num_kept)
        for _, drafter, num_drafted, _ in rollout.response.drafts:
            proposed[drafter] += num_drafted
    for name, counts in (("kept", kept), ("proposed", proposed)):
        for who, count in counts.items():
            log.sum(f"speculation/{name}_{who}", count)
    log.mean("rollout/length_mean", lengths.mean())
    for percent in (50, 90, 99):
        log.mean(f"rollout/length_p{percent}", lengths.quantile(percent / 100))
    log.max("rollout/length_max", lengths.max())
    log.mean("rollout/truncated", sum(rollout.is_truncated for rollout in rollouts) / len(rollouts))
    log.mean("reward/mean", rewards.mean())
    log.mean("reward/std", rewards.std(correction=0))
    log.mean("reward/zero_std_groups", zero_std_share(rollouts))
    for name in rollouts[0].rewards:
        log.mean(f"reward/{name}", sum(rollout.rewards[name] for rollout in rollouts) / len(rollouts))


def zero_std_share(rollouts: Sequence[Rollout]) -> float:
    """Return the share of groups whose rewards are all equal: their normalised advantages are 0."""
    groups = split_groups(rollouts)
    return sum(not has_spread(group) for group in groups) / len(groups)


def tail_share(trace: Sequence[tuple[float, int]], num_requests: int) -> float:
    """Return the share of a rollout's time in which at most a tenth of its requests, or one, ran.

    Args:
        trace: (seconds since the start, unfinished requests) after each engine step.
        num_requests: Requests of the rollout.
    """
    if not trace or trace[-1][0] <= 0:
        return 0.0
    limit = max(1.0, 0.1 * num_requests)
    start = next((seconds for seconds, unfinished in trace if unfinished <= limit), trace[-1][0])
    return 1.0 - start / trace[-1][0]
