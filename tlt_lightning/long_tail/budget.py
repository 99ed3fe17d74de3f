"""Decide how many of an iteration's tokens a drafter is trained on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Annotated, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from tlt_lightning.arguments import Bound, Count, NotNegative, Positive, Share, checked
from tlt_lightning.long_tail.publishing import PublishDecision

_UNPAID = 2  # decisions in a row after which a head is trained on an eighth
_EIGHTH = 1 / 8
_COLD_TRIAL = 4  # trials of a head that drafts nothing yet


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredIteration:
    """Says what an iteration took and trained, over all ranks; seconds are means over them.

    Args:
        seconds: The whole iteration.
        decode_seconds: Rollout, until the last rank was done.
        cost: Seconds that the drafter took outside idle windows.
        training_seconds: Those of them that went into training steps.
        share: Tokens trained on outside idle windows, as a share of the iteration's.
        idle_share: The same inside idle windows.
        learned_share: Share of the decode seconds in which the head drafted; None while it is cold.
    """

    seconds: float
    decode_seconds: float
    cost: float
    training_seconds: float
    share: float
    idle_share: float = 0.0
    learned_share: float | None = None


class TrainingBudget(ABC):
    """Decides on the tokens of training in each iteration; ranks that see the same numbers decide the same."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is ever trained outside idle windows."""
        return False

    @abstractmethod
    def decide(self, iteration: int, remaining: int | None) -> float | None:
        """Return the share of an iteration's tokens to train on; called once in each.

        Idle windows come first: what was trained in them is taken off. 0 trains in idle windows alone, None not at all.

        Args:
            iteration: Number of the iteration, from 0.
            remaining: Iterations after this one; None if the run has no known end.
        """

    def limit(self, elapsed: float) -> float:
        """Return the most seconds of training outside idle windows, `elapsed` seconds into the iteration."""
        return inf

    def note_costs(self, step: float, decision: float) -> None:  # noqa: B027 - a fixed one learns nothing
        """Learn the seconds of a training step and of a decision about publishing, before any is spent."""

    def note_decision(self, decision: PublishDecision, remaining: int | None) -> None:  # noqa: B027 - likewise
        """Learn from a decision about publishing, before `decide` of the same iteration; `remaining` as there."""

    def note_iteration(self, iteration: MeasuredIteration) -> None:  # noqa: B027 - likewise
        """Learn from an iteration that is over."""

    def metrics(self) -> dict[str, float]:
        """Return numbers behind the last decision, under the loggers' names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as primitives."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # noqa: B027 - likewise
        """Go on from what `state_dict` saved."""


@checked()
@dataclass(eq=False)
class FixedBudget(TrainingBudget):
    """Trains on the same share of every n-th iteration's tokens, whatever that costs or gains.

    Runs with it are reproducible bit by bit, which those with `AdaptiveBudget` are not: its choices depend on clocks.

    Args:
        share: Share of the iteration's tokens; above 1 sees them several times. 0 trains in idle windows alone,
            and never with a single rank.
        every_n_iterations: Train in every n-th iteration only.
    """

    share: NotNegative = 0.1
    every_n_iterations: Count = 1

    @property
    @override
    def is_empty(self) -> bool:
        return self.share == 0

    @override
    def decide(self, iteration: int, remaining: int | None) -> float | None:
        return self.share if (iteration + 1) % self.every_n_iterations == 0 else None


@checked()
@dataclass(eq=False)
class AdaptiveBudget(TrainingBudget):
    """Trains on all tokens until two decisions in a row have not paid, then on an eighth of them.

    A published head saves decode seconds in all rollouts to come. With `b` instead of `a` tokens per engine step they
    fall by the root of a/b, not by a/b, for a better head is asked for longer drafts, which cost. The gain fades as the
    policy moves on, so it counts for half of the iterations to come::

        saved = seconds of decoding with the head * (1 - sqrt(before / (before + gain's lower bound))) * iterations / 2

    A decision pays if it saves more than what was spent since the one before. Everything is paid from an account: it
    begins with a trial, and what is saved is paid in, up to a trial, and a small share of the run. So training that
    never helps costs a trial and that share. An eighth is trained on as often as the account can pay for it.

    Args:
        most: Largest share of an iteration's tokens.
        trial: Seconds of training without savings yet, in decode seconds of an iteration: no training can save more in
            one. A cold head has four times as much: its first steps, at a rate that still rises, do not show in drafts.
        overhead: Share of the run's seconds that is paid into the account.
        horizon: Iterations that a gain is counted for, at most, or if the run's end is not known.

    Example:
        >>> budget = AdaptiveBudget()
        >>> budget.decide(0, remaining=99)
        1.0
    """

    most: Positive = 1.0
    trial: Positive = 0.5
    overhead: Share = 0.005
    horizon: Annotated[int, Bound(2)] = 50

    def __post_init__(self) -> None:
        self._costs = {"step": 0.0, "decision": 0.0}  # seconds, foretold
        self._means: dict[str, float] = {}  # over the iterations, the newest counts for half
        self._num_unpaid = 0  # decisions in a row
        self._spent = 0.0  # seconds since the last decision; tokens of idle windows at their price outside
        self._saved = 0.0  # seconds, by the last decision
        self._balance = 0.0  # seconds
        self._rests = False

    @override
    def decide(self, iteration: int, remaining: int | None) -> float | None:
        share = self.most if self._num_unpaid < _UNPAID else _EIGHTH * self.most
        # Where all of `share` is too dear, as much of it is trained on as `limit` allows: at least an eighth.
        cost = self._cost(_EIGHTH * share) if self._means else 0.0
        rested, self._rests = self._rests, cost > self._balance
        if self._rests and not rested:
            trial = self.trial * self._means["decode_seconds"]
            rank_zero_info(
                "The draft head is not trained for now: a stretch of training and the decision about it take %.1f s, "
                "more than training has earned. %s",
                cost,
                f"It is tried again when {self.overhead:.1%} of the run's seconds have paid for that."
                if cost <= trial
                else f"It may take {trial:.1f} s, {self.trial:g} of a rollout's: this head cannot pay on this machine.",
            )
        return share if remaining != 0 and not self._rests else None

    def _cost(self, share: float) -> float:
        outside = max(0.0, share - self._means["idle_share"])
        training = max(self._costs["step"], self._means.get("price", 0.0) * outside) if outside else 0.0
        return max(self._costs["decision"], self._means["fixed"]) + training

    @override
    def limit(self, elapsed: float) -> float:
        # Until the first iteration is over, its decode seconds are within those that have elapsed.
        balance = self._balance if self._means else self.trial * elapsed
        return balance - max(self._costs["decision"], self._means.get("fixed", 0.0))

    @override
    def note_costs(self, step: float, decision: float) -> None:
        self._costs = {"step": step, "decision": decision}

    @override
    def note_decision(self, decision: PublishDecision, remaining: int | None) -> None:
        self._saved = 0.0
        if decision.is_published:
            before = decision.before.acceptance_length
            share = 1 - sqrt(before / (before + decision.bound))
            iterations = self.horizon if remaining is None else min(remaining + 1, self.horizon)
            self._saved = self._means.get("learned_seconds", 0.0) * share * iterations / 2
        self._num_unpaid = 0 if self._saved > self._spent else self._num_unpaid + 1
        self._spent = 0.0
        self._pay_in(self._saved)

    def _pay_in(self, seconds: float) -> None:
        """Fill the account, up to a trial: what is saved later cannot be spent now."""
        trial = self.trial * self._means.get("decode_seconds", 0.0)
        self._balance = max(self._balance, min(self._balance + seconds, trial))

    @override
    def note_iteration(self, iteration: MeasuredIteration) -> None:
        is_first, is_cold = not self._means, iteration.learned_share is None
        self._mean("decode_seconds", iteration.decode_seconds)
        # A cold head may turn out to draft in all of them.
        learned_share = 1.0 if iteration.learned_share is None else iteration.learned_share
        self._mean("learned_seconds", iteration.decode_seconds * learned_share)
        if iteration.share or iteration.idle_share or is_first:
            self._mean("idle_share", iteration.idle_share)
            self._mean("fixed", iteration.cost - iteration.training_seconds)
        if iteration.share:
            self._mean("price", iteration.training_seconds / iteration.share)
        if is_first:
            self._balance = self.trial * iteration.decode_seconds * (_COLD_TRIAL if is_cold else 1)
        self._pay_in(self.overhead * iteration.seconds)
        self._balance -= iteration.cost
        self._spent += iteration.cost + self._means.get("price", 0.0) * iteration.idle_share

    def _mean(self, name: str, value: float) -> None:
        self._means[name] = (self._means.get(name, value) + value) / 2

    @override
    def metrics(self) -> dict[str, float]:
        return {"drafter/predicted_saving_s": self._saved, "drafter/balance_s": self._balance}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self._means), **{name: getattr(self, name) for name in _STATE}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if not state_dict:  # the run had a `FixedBudget` until now, which learns nothing
            return
        self._means = dict(state_dict["means"])
        for name in _STATE:
            setattr(self, name, state_dict[name])


_STATE = ("_num_unpaid", "_spent", "_saved", "_balance")
