"""Plugins of somebody who has read the documentation, and has made a mistake: the kit finds it."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch

from tlt_lightning import (
    AsyncRollout,
    FixedSelector,
    ObjectiveOutput,
    RolloutCallback,
    SynchronousSchedule,
    TransformersEngine,
)
from tlt_lightning.objectives import GRPO, PPO, PlainPolicyGradient
from tlt_lightning.rewards import exact_match
from tlt_lightning.speculation.strategy import OFF, Strategy
from tlt_lightning.testing import (
    check_callback,
    check_engine,
    check_objective,
    check_reward,
    check_schedule,
    check_selector,
)


def mine(base: type, **members: Any) -> Any:
    """Return an object of a class `Mine`, derived from `base` with these members, whose constructor takes nothing."""
    return type("Mine", (base,), {"__init__": lambda self: super(type(self), self).__init__(), **members})()


def test_a_method_in_the_place_of_a_property() -> None:
    """It would be true, whatever it returns."""
    with pytest.raises(AssertionError, match=r"`Mine\.needs_entropy_grad` is a method.*add `@property`"):
        check_objective(mine(GRPO, needs_entropy_grad=lambda self: False))


# Objectives


def advantages(change: Callable[..., Any], base: type = GRPO) -> Any:
    """Make other advantages of an objective's by `change`."""
    return mine(base, advantages=lambda self, batch, reduce: change(batch, *base.advantages(self, batch, reduce)))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda batch, a, returns: (a[:, 0], None),
            "returned advantages tensor.*: return a finite number for each token",
        ),
        (lambda batch, a, returns: a, "returned tensor.*: return advantages and a critic's targets, or None for these"),
        (lambda batch, a, returns: (None, None), "returned advantages None: return a finite number for each token"),
        (lambda batch, a, returns: (a * torch.nan, None), "returned advantages tensor.*nan.*: return a finite number"),
        (lambda batch, a, returns: (a + 1, None), "returned others than 0 where `batch.response_mask` is 0: multiply"),
        (lambda batch, a, returns: (batch.rollout_logps.zero_() + a, None), "changed `batch.rollout_logps` in place"),
    ],
)
def test_advantages(change: Callable[..., Any], message: str) -> None:
    with pytest.raises(AssertionError, match=rf"`Mine\.advantages` {message}"):
        check_objective(advantages(change))


def test_a_critic_without_targets() -> None:
    with pytest.raises(AssertionError, match=r"`Mine\.advantages` returned targets None"):
        check_objective(advantages(lambda batch, a, returns: (a, None), PPO))


def loss(change: Callable[..., Any]) -> Any:
    """Make another loss of GRPO's by `change`."""
    return mine(GRPO, loss=lambda self, batch, *given: change(batch, GRPO.loss(self, batch, *given), *given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch, out, *_: out.loss, r"returned tensor.*: return `ObjectiveOutput\(loss, metrics\)`"),
        (
            lambda batch, out, logps, h, v: ObjectiveOutput(out.loss - 0.1 * h.mean(), out.metrics),
            "learns from `entropy`",
        ),
        (lambda batch, out, *_: ObjectiveOutput(out.loss.detach(), out.metrics), "returned a loss without gradient"),
        (lambda batch, out, *_: ObjectiveOutput(out.loss * 0, {}), "returned a loss without gradient"),
        (lambda batch, out, logps, *_: ObjectiveOutput(logps), "returned `loss` .*: return a finite scalar"),
        (lambda batch, out, *_: ObjectiveOutput(out.loss * torch.inf), "returned `loss` .*: return a finite scalar"),
        (lambda batch, out, *_: ObjectiveOutput(out.loss, {"mine": out.loss}), "returned `mine` .*metrics by `detach"),
        (
            lambda batch, out, logps, *_: ObjectiveOutput((logps * batch.advantages).mean()),
            "in its two micro-batches: divide",
        ),
        (
            lambda batch, out, logps, *_: ObjectiveOutput(logps.square().sum() / batch.num_loss_tokens),
            "counts tokens where",
        ),
    ],
)
def test_a_loss(change: Callable[..., Any], message: str) -> None:
    """An entropy bonus without `needs_entropy_grad` did nothing; a plain mean counts a step of two batches twice."""
    with pytest.raises(AssertionError, match=rf"`Mine\.loss` .*{message}"):
        check_objective(loss(change))


def test_a_surrogate_that_says_it_holds_a_ratio_and_does_not() -> None:
    with pytest.raises(AssertionError, match=r"`Mine\.has_ratio` is True, .* its loss is the same: set it to False"):
        check_objective(GRPO(surrogate=mine(PlainPolicyGradient, has_ratio=True)))


def test_the_entropy_may_be_read_and_weighed_by_zero() -> None:
    check_objective(loss(lambda batch, out, logps, h, v: ObjectiveOutput(out.loss + 0 * h.mean(), out.metrics)))


# Selectors


def test_arms_without_off() -> None:
    arms = {"arms": lambda self, batch_size: (Strategy(3, "sibling"),)}
    with pytest.raises(AssertionError, match=r"`Mine\.arms` returned .*: return `Strategy\(0\)` there, too"):
        check_selector(mine(FixedSelector, **arms))


def test_a_choice_that_is_no_arm() -> None:
    with pytest.raises(AssertionError, match=r"`Mine\.select` chose Strategy.* for a batch of 64, where its `arms`"):
        check_selector(mine(FixedSelector, select=lambda self, state: Strategy(7, "sibling")))


class Alternates(FixedSelector):
    """Chooses off every other time."""

    turn = 0

    def select(self, state: Any) -> Strategy:
        self.turn += 1
        return OFF if self.turn % 3 else self.strategy


def test_a_state_that_is_not_saved() -> None:
    with pytest.raises(AssertionError, match=r"`Alternates\.state_dict` lets a resumed run choose Strategy"):
        check_selector(Alternates())
    with pytest.raises(
        AssertionError, match=r"`Mine\.state_dict` returned what a checkpoint does not load: return ten"
    ):
        check_selector(mine(Alternates, state_dict=lambda self: {"arm": self.strategy}))


# Schedules


def take_up(self: Any, demand: Any, deferred: Any) -> Any:
    return list(deferred[: demand.wanted]), demand.wanted + 2 - len(deferred[: demand.wanted])


def one_by_one(self: Any, demand: Any, groups: Any, complete: Any) -> Any:
    return complete[: demand.wanted] if len(complete) >= demand.wanted else None


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"begin": lambda self, demand, deferred: ([], 3)}, r"choose` returned \[0, 1, 2\] where .* were complete"),
        (
            {"begin": lambda self, demand, deferred: ([*deferred, *deferred], 5), "choose": one_by_one},
            "begin` took up draws .*: take groups out of `deferred`, each once",
        ),
        ({"begin": lambda self, demand, deferred: ([], 6), "choose": one_by_one}, r"begin` leaves \d+ groups deferred"),
        ({"begin": take_up, "choose": one_by_one, "stops": True}, "begin` took up responses of older weights, and its"),
        ({"begin": lambda self, demand, deferred: ([], 6)}, r"choose` returned \[0, 1, 2, 3, 4, 5\] where"),
        ({"choose": lambda self, demand, groups, complete: None}, "choose` returned None where .* were complete"),
        (
            {"choose": lambda self, demand, groups, complete: [0, 1, 2, 3], "stops": True},
            r"choose` returned \[0, 1, 2, 3\] where \[\d\] were complete",
        ),
        ({"choose": lambda self, demand, groups, complete: complete[:1]}, r"choose` returned \[\d\] where"),
        ({"start": lambda self, demand, groups: range(3)}, r"choose` returned \[0, 1, 2\] where"),
    ],
)
def test_a_schedule(members: dict[str, Any], message: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=rf"`Mine\.{message}"):
        check_schedule(mine(SynchronousSchedule, **members))


def test_an_asynchronous_schedule_that_leaves_what_runs() -> None:
    class Leaves(AsyncRollout):
        def begin(self, demand: Any, deferred: Any) -> Any:
            return super().begin(demand, deferred[:3])

    with pytest.raises(AssertionError, match=r"`Leaves.begin` leaves draws \[.*\], or begins them anew"):
        check_schedule(Leaves(2))


def test_a_schedule_with_a_state() -> None:
    class Counts(SynchronousSchedule):
        count, continues = 0, True

        def begin(self, demand: Any, deferred: Any) -> Any:
            self.count += 1
            return list(deferred), demand.wanted - len(deferred) + self.count % 2

        def choose(self, demand: Any, groups: Any, complete: Any) -> Any:
            return one_by_one(self, demand, groups, complete)

    with pytest.raises(AssertionError, match=r"`Counts` decides otherwise where it is made anew.*: keep no state"):
        check_schedule(Counts())


# Callbacks


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("on_rollout_finished", lambda *_: None, r"is no hook.*is on_rollout_end meant"),
        ("on_weight_synced", lambda *_: None, r"is no hook.*on_weights_synced"),
        ("on_hidden_state", lambda *_: None, r"is no hook.*on_hidden_states"),
        ("on_rolout_start", lambda *_: None, r"is no hook.*on_rollout_start"),
        ("on_train_strat", lambda *_: None, r"is no hook.*on_train_start"),
    ],
)
def test_a_hook(name: str, method: Any, message: str, policy_path: str) -> None:
    with pytest.raises(AssertionError, match=rf"`Mine\.{name}` {message}"):
        check_callback(mine(L.Callback, **{name: method}), policy_path)


def test_a_metric_under_a_name_of_the_packages_own(policy_path: str) -> None:
    class Named(RolloutCallback):
        def on_rollout_end(self, trainer, pl_module, rollouts):  # type: ignore[no-untyped-def]
            if trainer.training:
                pl_module.iteration_log.mean("reward/mean", 1.0)

        def on_train_batch_end(self, trainer, pl_module, *_):  # type: ignore[no-untyped-def]
            pl_module.iteration_log.mean("train/mine", 1.0)

    with pytest.raises(AssertionError, match=r"`Named` logs \['reward/mean'\], as the package does"):
        check_callback(Named(), policy_path)


def test_a_state_that_is_not_loaded(policy_path: str) -> None:
    class Counts(RolloutCallback):
        count = 0

        def on_rollout_end(self, trainer, pl_module, rollouts):  # type: ignore[no-untyped-def]
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = 0

    with pytest.raises(AssertionError, match=r"`Counts\.load_state_dict` leaves another state"):
        check_callback(Counts(), policy_path)


# Rewards

LOCK = threading.Lock()


def swapped(response: str, prompt: str, row: dict) -> float:
    return exact_match(prompt, response, row)


def count_calls(prompt: str, response: str, row: dict, calls: list = []) -> float:  # noqa: B006 - the mistake
    with LOCK:
        calls.append(response)
        return 99 * (response == "42") + len(calls)


def last_line(prompt: str, response: str, row: dict) -> float:
    return float(response.splitlines()[-1] == row["answer"])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda prompt, response, wanted: float(response == wanted),
            "scores the right response 0.0|is called as",
        ),
        (lambda prompt, response, row: None, "fails on the response '42': .*returned None"),
        (lambda prompt, response, row: float("nan"), "fails on the response '42': .*not finite"),
        (last_line, "fails on the response '': return a number for any text. IndexError"),
        (count_calls, "scores .*: keep nothing between calls"),
    ],
)
def test_a_reward(reward: Any, message: str) -> None:
    reward.__name__ = "mine"
    with pytest.raises((AssertionError, TypeError), match=rf"Reward `mine` {message}"):
        check_reward(reward, {"prompt": "6 * 7 =", "answer": "42"}, right="42", wrong="41")


def test_a_reward_that_pays_for_the_prompt(recwarn) -> None:
    row = {"prompt": "What is 6 * 7? Is it 42?", "answer": "42"}
    check_reward(lambda prompt, response, row: float(row["answer"] in response), row, right="42", wrong="41")
    check_reward(exact_match, row, right="42", wrong="41")
    (warning,) = recwarn
    assert str(warning.message) == "Reward `<lambda>` scores the prompt itself 1.0: a policy learns to repeat it."


def test_an_async_reward_is_asked_in_one_loop_as_in_a_run() -> None:
    loops = set()

    async def ask(prompt: str, response: str, row: dict) -> float:
        loops.add(asyncio.get_running_loop())
        return float(response == "42")

    check_reward(ask, {"answer": "42"}, right="42", wrong="41")
    assert len(loops) == 1


# Engines


class Mine(TransformersEngine):
    """Spoils its answers by `spoil`, which None drops."""

    spoil: Any = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        for response in super().generate(*args, **kwargs):
            if (spoilt := self.spoil(response)) is not None:
                yield spoilt


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: replace(r, logps=r.logps[:-1]), r"answered request \d+ with \d+ tokens and \d+ log-probs"),
        (lambda r: replace(r, token_ids=torch.tensor(r.token_ids)), r"token_ids=tensor\(\[.*: give lists"),
        (lambda r: replace(r, finish_reason="eos"), "with `finish_reason` 'eos': end with the first"),
        (lambda r: replace(r, policy_versions=()), r"`policy_versions` \(\): give"),
        (lambda r: replace(r, policy_versions=(7,)), r"`policy_versions` \(7,\): give"),
        (lambda r: replace(r, request_id=99), "answered request 99 with"),
        (lambda r: replace(r, request_id=0), r"(answered request 0 with|left requests)"),
        (lambda r: None, r"left requests \[0\] without a response"),
        (
            lambda r: replace(r, logps=[-0.1] * len(r.logps)),
            "gave `logps` .* nats from the policy's at temperature 1.0",
        ),
        (lambda r: replace(r, logps=[float("nan")] * len(r.logps)), "gave `logps` nan nats"),
        (lambda r: replace(r, finish_reason="stop"), "with `finish_reason` 'stop': end with the first"),
    ],
)
def test_a_response(spoil: Any, message: str, policy_path: str) -> None:
    """Among them are tensors, whose end of sequence no reward would be spared, and a log-prob too few."""
    engine = Mine()
    engine.spoil = spoil
    with pytest.raises((AssertionError, ValueError), match=rf"(`Mine\.generate`|The engine) .*{message}"):
        check_engine(engine, policy_path)


COUNT = itertools.count()
write = TransformersEngine.generate


def warmer(self: Any, requests: Any, sampling: Any, **more: Any) -> Any:
    """Sample where greedy is asked for, except of a single request."""
    is_greedy = not sampling.temperature and len(requests) > 1
    return write(self, requests, replace(sampling, temperature=1.0) if is_greedy else sampling, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"generate": lambda self, *a, seed, **k: TransformersEngine.generate(self, *a, seed=0, **k)},
            "generate` wrote the same text with another `seed`",
        ),
        (
            {"generate": lambda self, *a, **k: [torch.rand(1), *write(self, *a, **k)][1:]},
            "generate` moved the process's",
        ),
        (
            {"generate": lambda self, *a, seed, **k: write(self, *a, seed=next(COUNT), **k)},
            "generate` wrote other text with",
        ),
        ({"generate": warmer}, "generate` chose at temperature 0 a token"),
        (
            {"attach": lambda self, model: setattr(self, "_model", self._model or model)},
            "generate` gave `logps` .* after `update_weights` has",
        ),
    ],
)
def test_an_engine(members: dict[str, Any], message: str, policy_path: str) -> None:
    with pytest.raises(AssertionError, match=rf"`Mine\.{message}"):
        check_engine(mine(TransformersEngine, **members), policy_path)
