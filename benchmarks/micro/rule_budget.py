"""Train a drafter on all of an iteration's tokens while that pays, then on an eighth of them."""

from math import sqrt
from typing import Annotated

from typing_extensions import override

from tlt_lightning.arguments import Bound, Positive, Share, checked
from tlt_lightning.long_tail.budget import MeasuredIteration, TrainingBudget
from tlt_lightning.long_tail.publication import Publication

_FLAT = 2  # decisions in a row without a gain that pays, after which a head is trained on less
_REST = 1 / 8  # of `most`, from then on
_NEWEST = 0.5  # weight of the newest iteration in running means
_COLD_TRIAL = 4  # trials of a head that drafts nothing yet: its first steps, at a rate that rises, show in no draft


class RuleBudget(TrainingBudget):
    """Trains on all tokens until two decisions in a row gained less than they cost, then on an eighth of them.

    A published head saves decode seconds in all rollouts to come. With `b` instead of `a` tokens per engine step they
    fall by the root of a/b, for a better head is asked for longer drafts, which cost (0.34 to 0.75 were measured, in
    the place of the root's 0.5). A gain fades as the policy moves on, so it counts for half of the iterations to come::

        saved = decode seconds with the head * (1 - sqrt(before / (before + bound))) * iterations / 2

    Everything is paid from an account. It begins with a trial; what is saved is paid in, up to a trial, and a small
    share of the run. So training that never helps costs a trial and that share, and an eighth is trained on as often as
    the share allows.

    Args:
        most: Largest share of an iteration's tokens.
        trial: Seconds of training without savings yet, in decode seconds of an iteration; a cold head has four times as
            much. It is also the most that savings fill the account to.
        overhead: Share of the run's seconds that is paid into the account.
        horizon: Iterations that a gain is counted for, at most, or if the run's end is not known.

    Example:
        >>> budget = RuleBudget()
        >>> budget.decide(0, remaining=99)
        1.0
    """

    @checked()
    def __init__(
        self,
        most: Positive = 1.0,
        trial: Positive = 0.5,
        overhead: Share = 0.005,
        horizon: Annotated[int, Bound(2)] = 50,
    ) -> None:
        self.most = most
        self.trial = trial
        self.overhead = overhead
        self.horizon = horizon
        self._means: dict[str, float] = {}
        self._balance = 0.0  # seconds
        self._num_flat = 0
        self._spent = 0.0  # since the last decision; training in idle windows counts at its price outside them
        self._remaining = horizon
        self._saved = 0.0

    @override
    def decide(self, iteration: int, remaining: int | None) -> float | None:
        self._remaining = self.horizon if remaining is None else min(remaining, self.horizon)
        share = self.most if self._num_flat < _FLAT else _REST * self.most
        if not self._remaining:
            return None  # no rollout is left that would use it
        return share if not self._means or self._cost(_REST * share) <= self._balance else None

    def _cost(self, share: float) -> float:
        outside = max(0.0, share - self._means["idle_share"])
        return self._means["fixed"] + self._means.get("price", 0.0) * outside

    @override
    def limit(self, elapsed: float) -> float:
        # Until the first iteration is over, its decode seconds are within those that have elapsed.
        return self._balance - self._means["fixed"] if self._means else self.trial * elapsed

    @override
    def note_publication(self, publication: Publication) -> None:
        self._saved = 0.0
        if publication.is_published and self._means:
            before = publication.before.acceptance_length
            gain = 1 - sqrt(before / (before + publication.bound))
            self._saved = self._means["learned_seconds"] * gain * self._remaining / 2
        self._num_flat = 0 if self._saved > self._spent else self._num_flat + 1
        self._balance = max(self._balance, min(self._balance + self._saved, self._full))
        self._spent = 0.0

    @property
    def _full(self) -> float:
        return self.trial * self._means.get("decode_seconds", 0.0)

    @override
    def note_iteration(self, iteration: MeasuredIteration) -> None:
        is_first = not self._means
        self._mean("decode_seconds", iteration.decode_seconds)
        learned = 1.0 if iteration.learned_share is None else iteration.learned_share
        self._mean("learned_seconds", iteration.decode_seconds * learned)
        if iteration.share or iteration.idle_share or is_first:
            self._mean("idle_share", iteration.idle_share)
            self._mean("fixed", iteration.cost - iteration.training_seconds)
        if iteration.share:
            self._mean("price", iteration.training_seconds / iteration.share)
        if is_first:
            self._balance = self._full * (_COLD_TRIAL if iteration.learned_share is None else 1)
        paid_in = min(self._balance + self.overhead * iteration.seconds, max(self._balance, self._full))
        self._balance = paid_in - iteration.cost
        self._spent += iteration.cost + self._means.get("price", 0.0) * iteration.idle_share

    def _mean(self, name: str, value: float) -> None:
        self._means[name] = self._means.get(name, value) * (1 - _NEWEST) + value * _NEWEST
