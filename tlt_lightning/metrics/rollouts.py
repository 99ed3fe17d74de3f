"""Measure the rollouts of an iteration."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tlt_lightning.environments.conversation import Conversation
from tlt_lightning.metrics.iteration_log import IterationLog
from tlt_lightning.rollout import Rollout, has_spread, split_groups


class _Measured(NamedTuple):
    """Holds numbers of a rank's rollouts, one for each of them or for each of their groups."""

    lengths: list[float]
    truncated: list[bool]
    rewards: list[float]
    terms: list[dict[str, float]]
    has_spread: list[bool]


Gather = Callable[[_Measured], Sequence[_Measured]]
"""Returns what all ranks have; a collective."""


def log_rollouts(
    log: IterationLog, rollouts: Sequence[Rollout], gather: Gather = lambda own: [own], *, has_rewards: bool = True
) -> None:
    """Log lengths, kept drafts and truncation; if there are rewards, these and the share of groups that teach nothing.

    Means, deviation and quantiles are those of all ranks' rollouts together, as one rank would have them.
    """
    log.sum("rollout/tokens", sum(rollout.response.num_written for rollout in rollouts))
    kept, proposed = Counter[str](), Counter[str]()
    for rollout in rollouts:
        kept.update(rollout.response.num_kept)  # `+=` would drop a drafter of which nothing was kept
        for _, drafter, num_drafted, _ in rollout.response.drafts:
            proposed[drafter] += num_drafted
    for name, counts in (("kept", kept), ("proposed", proposed)):
        for who, count in counts.items():
            log.sum(f"speculation/{name}_{who}", count)
    ranks = gather(
        _Measured(
            lengths=[float(rollout.response.num_written) for rollout in rollouts],
            truncated=[rollout.is_truncated for rollout in rollouts],
            rewards=[rollout.reward for rollout in rollouts],
            terms=[rollout.rewards for rollout in rollouts],
            has_spread=[has_spread(group) for group in split_groups(rollouts)],
        )
    )
    lengths, truncated, rewards, terms, spreads = (list(chain.from_iterable(each)) for each in zip(*ranks, strict=True))
    log.mean("rollout/length_mean", fmean(lengths))
    for percent in (50, 90, 99):
        log.mean(f"rollout/length_p{percent}", float(np.quantile(lengths, percent / 100)))
    log.mean("rollout/length_max", max(lengths))
    log.mean("rollout/truncated", fmean(truncated))
    if not has_rewards:
        return
    log.mean("reward/mean", fmean(rewards))
    log.mean("reward/std", float(np.std(rewards)))
    log.mean("reward/zero_std_groups", 1 - fmean(spreads))
    for name in dict.fromkeys(chain.from_iterable(terms)):  # of a reward, the responses to which it applies
        log.mean(f"reward/{name}", fmean(each[name] for each in terms if name in each))


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


def log_conversation(log: IterationLog, talk: Conversation) -> None:
    """Log a conversation with an environment."""
    log.mean("environment/turns", talk.num_turns)
    log.sum("environment/cut_turns", talk.num_cut_turns)
    log.mean("environment/tool_seconds", talk.seconds)
    log.sum("environment/calls", talk.num_calls)
    log.sum("environment/failed_calls", talk.num_failed_calls)
    log.sum("environment/failures", float(talk.error is not None))
