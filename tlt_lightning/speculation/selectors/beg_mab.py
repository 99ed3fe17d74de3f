"""Choose arms by a bucketed epsilon-greedy bandit.

Algorithm 1 of TLT (arXiv 2511.16665, section 5.2), but:

- A chain of K drafts has one strategy per verification budget, so one budget a bucket would be a fixed table. Each
  bucket lists several budgets, and off is an arm of all.
- The reward is emitted tokens per second *and request*. The paper's tokens per second grow with the batch, so within a
  bucket an arm last tried on a larger batch would look better than it is.
- A pull lasts until `pull_size` requests have been stepped: one step of one request emits one of K + 1 values, whose
  median is not close to their mean.
- Rewards expire. An arm that lost when the drafter was bad would otherwise keep its old median until random draws have
  filled half of its window, which takes longer than a rollout.
- The greedy choice is optimistic about arms with few pulls. One unlucky pull would otherwise shelve the best arm until
  a random draw; an arm that is far behind is still left alone.

A pull's reward scatters by some 10%, so arms closer than that are told apart only after more pulls than a short rollout
has. Over 21 seeds of each scenario of `benchmarks/results/selector_regret.md`, a first rollout loses at most 3.1%
against the best fixed draft length known in hindsight, and at most 1.8% in the mean of a scenario's seeds;
`CostModelSelector`, which shares what it sees among batch sizes and draft lengths, loses less.
"""

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Any

from typing_extensions import override

from tlt_lightning.arguments import Count, Share, checked
from tlt_lightning.speculation.strategy import OFF, Drafter, SelectorState, Strategy, StrategySelector, make_arms

FIRST_OFF_PULLS = 3
"""Pulls of off in a new bucket, where the others get one: were its only pull paused, every arm would look better."""

MAX_AGE = 200
"""Pulls of a bucket after which a reward is forgotten; an arm without rewards is tried again."""

OPTIMISM = 0.3
"""Added to an arm's value, as a share of it and over the root of its pulls: two standard deviations of a reward."""


Pulls = deque[tuple[int, float]]
"""An arm's pulls, oldest first: the number of each in its bucket, and its reward."""


@checked()
@dataclass(eq=False)
class BEGMABSelector(StrategySelector):
    """Learns the fastest arm for each range of batch sizes, without a model of costs.

    Args:
        groups: For each bucket of batch sizes, the draft lengths to choose among besides off. Verification budgets
            shrink as batches grow, so the longest of each group must not exceed that of the group before.
        thresholds: Smallest batch size of each bucket, ascending; the first is 1 and the last bucket is open.
        drafters: Who may propose; every draft length is an arm with each of them.
        epsilon: Share of pulls spent on an arm drawn at random.
        window: Pulls remembered of each arm; the median over them is its value.
        pull_size: Requests to step before a pull ends; with batches of at least that many, one step.
        seed: Seeds the draws.

    Example:
        >>> selector = BEGMABSelector(groups=((5, 3), (1,)), thresholds=(1, 33))
        >>> [arm.num_draft_tokens for arm in selector.arms(100)]
        [0, 1]
    """

    groups: tuple[tuple[int, ...], ...] = ((5, 3, 1), (3, 1))
    thresholds: tuple[int, ...] = (1, 49)
    drafters: tuple[Drafter, ...] = ("learned",)
    epsilon: Share = 0.02
    window: Count = 12
    pull_size: Count = 12
    seed: int = 0

    def __post_init__(self) -> None:
        check_groups(self.groups, self.thresholds)
        self._arms = tuple(make_arms(group, self.drafters) for group in self.groups)
        self._rewards = [{arm: Pulls(maxlen=self.window) for arm in arms} for arms in self._arms]
        self._num_pulls = [0] * len(self.groups)
        self._random = random.Random(self.seed)
        self._bucket = -1
        self._pulled = OFF
        self._stepped = self.pull_size  # the first `select` starts a pull
        self._tokens = 0
        self._request_seconds = 0.0

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        return self._arms[self._bucket_for(batch_size)]

    def values(self, batch_size: int) -> dict[Strategy, float]:
        """Return median tokens per second and request of each arm tried in `batch_size`'s bucket."""
        rewards = self._rewards[self._bucket_for(batch_size)]
        return {arm: _value(pulls) for arm, pulls in rewards.items() if pulls}

    @override
    def select(self, state: SelectorState) -> Strategy:
        bucket = self._bucket_for(state.batch_size)
        if bucket != self._bucket or self._stepped >= self.pull_size or (state.is_silenced and self._pulled.is_learned):
            self._bucket = bucket
            self._pulled = self._choose(bucket, state.is_silenced)
            self._stepped, self._tokens, self._request_seconds = 0, 0, 0.0
        return self._pulled

    @override
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        bucket = self._bucket_for(state.batch_size)
        if bucket != self._bucket or strategy != self._pulled:
            return  # a step that was under way when the choice changed
        self._stepped += len(num_emitted)
        self._tokens += sum(num_emitted)
        self._request_seconds += seconds * len(num_emitted)
        if self._stepped >= self.pull_size:
            self._num_pulls[bucket] += 1
            self._rewards[bucket][strategy].append((self._num_pulls[bucket], self._tokens / self._request_seconds))

    @override
    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self._random.getstate()
        return {
            "rewards": [[[list(pull) for pull in pulls] for pulls in rewards.values()] for rewards in self._rewards],
            "num_pulls": list(self._num_pulls),
            "seed": self.seed,
            "random": [version, list(words), gauss],
            "pull": [self._bucket, self._stepped, self._tokens, self._request_seconds],
            "pulled": [self._pulled.num_draft_tokens, self._pulled.drafter],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for rewards, kept in zip(self._rewards, state_dict["rewards"], strict=True):
            for arm, pulls in zip(rewards, kept, strict=True):
                rewards[arm] = Pulls(((int(number), value) for number, value in pulls), self.window)
        self._num_pulls = list(state_dict["num_pulls"])
        if state_dict.get("seed", self.seed) == self.seed:
            version, words, gauss = state_dict["random"]
            self._random.setstate((version, tuple(words), gauss))
        self._bucket, self._stepped, self._tokens, self._request_seconds = state_dict["pull"]
        self._pulled = Strategy(*state_dict["pulled"])

    def _bucket_for(self, batch_size: int) -> int:
        return max(0, bisect_right(self.thresholds, batch_size) - 1)

    def _choose(self, bucket: int, is_silenced: bool) -> Strategy:
        rewards = {arm: pulls for arm, pulls in self._rewards[bucket].items() if not (is_silenced and arm.is_learned)}
        for pulls in rewards.values():
            while pulls and pulls[0][0] < self._num_pulls[bucket] - MAX_AGE:
                pulls.popleft()
        is_new = self._num_pulls[bucket] <= FIRST_OFF_PULLS + len(rewards)
        untried = [
            arm
            for arm, pulls in rewards.items()
            if len(pulls) < min(self.window, FIRST_OFF_PULLS if is_new and arm.is_off else 1)
        ]
        if untried:
            return min(untried, key=lambda arm: len(rewards[arm]))
        if self._random.random() < self.epsilon:
            return self._random.choice(list(rewards))
        return max(rewards, key=lambda arm: _value(rewards[arm]) * (1 + OPTIMISM / sqrt(len(rewards[arm]))))


def _value(pulls: Pulls) -> float:
    return median(reward for _, reward in pulls)


def check_groups(groups: Sequence[Sequence[int]], thresholds: Sequence[int]) -> None:
    """Raise ValueError unless thresholds ascend from 1, one a group, and the longest drafts never grow."""
    longest, ascends = [max(group, default=0) for group in groups], sorted({1, *thresholds}) == list(thresholds)
    if not ascends or len(groups) != len(thresholds) or longest != sorted(longest, reverse=True) or 0 in longest:
        raise ValueError(
            "`groups` has draft lengths for each of `thresholds`, which ascend from 1, and the longest does not grow "
            f"with the batch; got {list(groups)} and {list(thresholds)}."
        )
