"""Train a drafter as much as it pays: weigh seconds of training against seconds of decoding."""

from collections.abc import Mapping
from math import expm1, inf, log
from typing import Annotated, Any

from typing_extensions import override

from tlt_lightning.arguments import Bound, Positive, Share, checked
from tlt_lightning.long_tail.budget import MeasuredIteration, TrainingBudget
from tlt_lightning.long_tail.forecast import GainForecast
from tlt_lightning.long_tail.publication import Publication

_NUM_SHARES = 8  # each half the one before
_NEWEST = 0.5  # weight of the newest iteration in running means
_FIRST_REST = 4  # iterations until what was learned is doubted; twice as many each time nothing came of it
_LUCK = 0.04  # of the margin: what a bound of a normal error, 90% certain, shows on average where nothing is gained
_COLD_TRIAL = 4  # trials of a head that drafts nothing yet
_FALL = 0.95  # of the acceptance that the engine had: less is drift
# Not fitted as a run goes: on these runs, whose texts change meanwhile, that finds 0.7 to 1.2 (0.6 to 0.8 given their
# tokens), and in simulated ones the true exponent would save 1% at 0.75 and nothing below.
_EXPONENT = 0.5  # of tokens per step in a token's decode time; 0.34 to 0.75 were measured (docs/results.md)


class AdaptiveBudget(TrainingBudget):
    """Trains more while it pays, as with a cold head or a policy that moves, and next to nothing else.

    A better head pays in all rollouts to come: with `b` instead of `a` tokens per engine step, decoding with the head
    takes the root of a/b of the time, for it is asked for longer drafts, which cost. `GainForecast` says what training
    would gain, and the plan of the least time is followed, as far as the balance of an account allows. Paid in
    is what was saved for certain, as it is saved; paid out is what training, measuring and publishing took outside idle
    windows. So training that never helps costs a trial and a small share of the run, whatever the forecast promises.

    Args:
        most: Largest share of an iteration's tokens.
        trial: Seconds of training without savings yet, in decode seconds of an iteration: no training can save more in
            one. It is also the most that savings fill the account to. A cold head has four times as much: its first
            steps, at a rate that still rises, do not show in drafts.
        overhead: Share of the run's seconds that is paid into the account, for probes.
        horizon: Iterations that a gain counts for, at most, or if the run's end is not known.

    Example:
        >>> budget = AdaptiveBudget()
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
        self._forecast = GainForecast()
        self._means: dict[str, float] = {}
        self._balance = 0.0  # seconds
        self._certain = 0.0  # of published gains, what is certain, as `GainForecast` has them; fades over the horizon
        self._usage = 1.0  # share of decode seconds with the head: hoped for, until it is seen
        self._heard = 0.0  # best acceptance of the engine
        self._rest, self._patience = 0, _FIRST_REST
        self._since_trial = 0  # iterations
        self._saving = 0.0

    @override
    def decide(self, iteration: int, remaining: int | None) -> float | None:
        if not self._means:
            return self.most if remaining != 0 else None  # as far as `limit` goes
        horizon = self.horizon if remaining is None else min(remaining, self.horizon)
        if self._rest >= self._patience:
            self._forecast.begin_anew()
            self._rest, self._patience = 0, 2 * self._patience
        shares = [self.most / 2**number for number in range(_NUM_SHARES)]
        affordable = [share for share in shares if self._cost(share) <= self._balance]
        seconds = self._means["decode_seconds"] * self._usage
        costs = [self._cost(share) for share in affordable]
        share, self._saving = self._forecast.plan(affordable, costs, seconds, horizon)
        self._rest += share is None
        return share

    def _cost(self, share: float) -> float:
        outside = max(0.0, share - self._means["idle_share"])
        return self._means["fixed"] + self._means.get("price", 0.0) * outside

    @override
    def limit(self, elapsed: float) -> float:
        # Until the first iteration is over, its decode seconds are within those that have elapsed.
        return self._balance if self._means else self.trial * elapsed

    @override
    def note_publication(self, publication: Publication) -> None:
        before = publication.before.acceptance_length
        ahead = _EXPONENT * log(publication.after.acceptance_length / before)
        error = _EXPONENT * (publication.gain - publication.bound) / before
        self._certain = max(0.0, self._certain - (_LUCK * error if error < inf else 0.0))
        believed = self._forecast.observe(ahead, 0.1 if error == inf else error)
        if publication.is_published or publication.has_diverged:
            self._forecast.settle()
        if publication.is_published:
            self._certain += min(believed, _EXPONENT * log(1 + publication.bound / before))
            self._rest, self._patience = 0, _FIRST_REST

    @override
    def note_iteration(self, iteration: MeasuredIteration) -> None:
        is_first, trained = not self._means, iteration.share + iteration.idle_share
        self._mean("decode_seconds", iteration.decode_seconds)
        if trained or is_first:
            self._mean("idle_share", iteration.idle_share)
            self._mean("fixed", iteration.cost - iteration.training_seconds)
        if iteration.share:
            self._mean("price", iteration.training_seconds / iteration.share)
        saved = 0.0
        if iteration.learned_share is not None:
            saved = iteration.decode_seconds * iteration.learned_share * expm1(self._certain)
            self._usage += 0.2 * (iteration.learned_share - self._usage)
        self._certain *= 1 - 1 / self.horizon
        full = self.trial * self._means["decode_seconds"]
        start = self._balance
        if is_first:
            start = full * (_COLD_TRIAL if iteration.learned_share is None else 1)
        self._balance = min(max(full, start), start + self.overhead * iteration.seconds + saved - iteration.cost)
        self._forecast.advance(trained)
        self._since_trial += 1
        if iteration.acceptance < _FALL * self._heard:
            self._heard = 0.0
            if self._since_trial > self.horizon or not trained:  # what is learned by training needs no doubt
                self._forecast.begin_anew()
                self._rest, self._patience = 0, _FIRST_REST
            if self._since_trial > self.horizon:
                self._balance, self._since_trial = full, 0
        self._heard = max(self._heard, iteration.acceptance)

    def _mean(self, name: str, value: float) -> None:
        self._means[name] = self._means.get(name, value) * (1 - _NEWEST) + value * _NEWEST

    @override
    def metrics(self) -> dict[str, float]:
        return {"drafter/predicted_saving_s": self._saving, "drafter/balance_s": self._balance}

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in _STATE}
        return {**state, "means": dict(self._means), "forecast": self._forecast.state_dict()}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if not state_dict:  # the run had a `FixedBudget` until now, which learns nothing
            return
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self._means = dict(state_dict["means"])
        self._forecast.load_state_dict(state_dict["forecast"])


_STATE = ("_balance", "_certain", "_usage", "_heard", "_rest", "_patience", "_since_trial", "_saving")
