"""Mistakes of plugins that only a run can see are refused at their first use, by the plugin's name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer
from tlt_lightning import ObjectiveOutput, Response, TransformersEngine
from tlt_lightning.objectives import GRPO
from tlt_lightning.objectives.surrogates import Surrogate

Fit = Callable[..., L.Trainer]


@pytest.fixture
def fit(policy_path: str, prompts_path: str, tmp_path: Path) -> Fit:
    """Fit one iteration with callbacks and arguments of the data, the module and the Trainer."""

    def run(*callbacks: L.Callback, module: Any = None, trainer: Any = None, **data: Any) -> L.Trainer:
        made = make_trainer(tmp_path, *callbacks, **{"max_epochs": 1, **(trainer or {})})
        made.fit(make_module(policy_path, **(module or {})), make_data(prompts_path, **data))
        return made

    return run


class Mine(TransformersEngine):
    """Spoils its answers by `spoil`, which None drops."""

    spoil: Any = None

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[Response]:
        for response in super().generate(*args, **kwargs):
            if (spoilt := self.spoil(response)) is not None:
                yield spoilt


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: replace(r, logps=r.logps[:-1]), r"answered request \d+ with (\d+) `token_ids` and \d `logps`: give"),
        (lambda r: replace(r, token_ids=torch.tensor(r.token_ids)), r"`token_ids` tensor\(\[.*: give a list"),
        (lambda r: replace(r, logps=None), r"`logps` None: give a list"),
        (lambda r: replace(r, token_ids="text"), "`token_ids` 'text': give a list"),
        (lambda r: replace(r, finish_reason="eos"), "`finish_reason` 'eos': give one of 'stop', 'length'"),
        (lambda r: replace(r, policy_versions=()), r"`policy_versions` \(\): give the versions"),
        (lambda r: replace(r, request_id=99), "answered request 99, which was not asked or has been answered"),
        (lambda r: replace(r, request_id=0), "answered request 0, which was not asked or has been answered"),
        (lambda r: {"token_ids": r.token_ids}, r"has to yield a `Response` to each request, got \{"),
    ],
)
def test_an_answer_that_breaks_the_contract_of_engines_is_refused(fit: Fit, spoil: Any, message: str) -> None:
    """Among them are tensors, whose end of sequence no reward would be spared, and a log-prob too few."""
    engine = Mine()
    engine.spoil = spoil
    with pytest.raises((TypeError, ValueError), match=rf"`Mine\.generate` .*{message}"):
        fit(engine=engine)


def test_an_engine_that_yields_nothing_is_refused(fit: Fit) -> None:
    class Forgetful(TransformersEngine):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            list(super().generate(*args, **kwargs))

    with pytest.raises(TypeError, match=r"`Forgetful\.generate` has to yield responses.*got None"):
        fit(engine=Forgetful())


def test_responses_of_an_engine_that_notes_no_version_have_that_of_the_weights(fit: Fit) -> None:
    """Else nothing would compare its log-probs with the policy's: they would be of no weights that there are."""

    class Unversioned(TransformersEngine):
        def update_weights(self, named_tensors: Any, version: int) -> None: ...

    recorder = Recorder()
    fit(recorder, engine=Unversioned())
    assert {rollout.response.policy_versions for rollout in recorder.rollouts[0]} == {(0,)}


class Weighs(GRPO):
    """Makes another loss of GRPO's by `change`."""

    change: Any = None

    def loss(self, batch: Any, logps: Any, entropy: Any, values: Any) -> Any:
        return self.change(super().loss(batch, logps, entropy, values), entropy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, entropy: ObjectiveOutput(out.loss - 0.1 * entropy.mean(), out.metrics), "learns from `entropy`"),
        (lambda out, entropy: ObjectiveOutput(out.loss.detach(), out.metrics), "returned a loss without gradient"),
        (lambda out, entropy: ObjectiveOutput(out.loss.item(), out.metrics), "has to return an `ObjectiveOutput`"),
        (lambda out, entropy: ObjectiveOutput(out.loss, None), "`metrics` are a dictionary"),  # type: ignore[arg-type]
    ],
)
def test_a_loss_that_would_not_be_learned_from_is_refused(fit: Fit, change: Any, message: str) -> None:
    """An entropy bonus without `needs_entropy_grad` did nothing."""
    objective = Weighs()
    objective.change = change
    with pytest.raises(TypeError, match=rf"`Weighs\.loss` .*{message}|`Weighs\.loss` {message}"):
        fit(module={"objective": objective})


def test_the_entropy_may_be_read_and_weighed_by_zero(fit: Fit) -> None:
    objective = Weighs()
    objective.change = lambda out, entropy: ObjectiveOutput(out.loss + 0 * entropy.mean(), {"train/h": entropy.mean()})
    assert fit(module={"objective": objective}).callback_metrics["train/h"] > 0


class Shapes(GRPO):
    """Makes other advantages of GRPO's by `change`."""

    change: Any = None

    def advantages(self, batch: Any, reduce: Any) -> Any:
        return self.change(batch, *super().advantages(batch, reduce))


def test_advantages_that_change_the_batch_are_refused(fit: Fit) -> None:
    """Others read it: here, the correction for the mismatch of engine and trainer."""
    objective = Shapes()
    objective.change = lambda batch, advantages, returns: (batch.rollout_logps.zero_() + advantages, returns)
    with pytest.raises(ValueError, match=r"`Shapes\.advantages` changed `batch\.rollout_logps` in place"):
        fit(module={"objective": objective})


def test_advantages_carry_no_gradient(fit: Fit) -> None:
    """A second micro-batch would go through their graph again, which is gone."""
    objective, baseline = Shapes(), torch.ones((), requires_grad=True)
    objective.change = lambda batch, advantages, returns: (advantages * baseline, returns)
    fit(module={"objective": objective}, num_minibatches=1)
    assert baseline.grad is None


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda losses: losses, r"has to return a pair, losses and which of them are clipped"),
        (lambda losses: (losses.mean(), losses), r"has to return a loss for each token, .* got \(\)"),
        (lambda losses: (losses, None), r"has to return whether it is clipped for each token, .* got None"),
    ],
)
def test_a_surrogate_returns_what_each_token_costs(fit: Fit, found: Any, message: str) -> None:
    """One number for all would be spread over the tokens."""

    class Own(Surrogate):
        def __call__(self, logps: Any, old_logps: Any, advantages: Any, mask: Any) -> Any:
            return found(-logps * advantages)

    with pytest.raises((TypeError, ValueError), match=rf"`Own` {message}"):
        fit(module={"objective": GRPO(surrogate=Own())})


def test_nan_advantages_of_rewards_that_a_callback_changed_are_said_to_be_those(fit: Fit) -> None:
    class Spoils(L.Callback):
        def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Any) -> None:
            rollouts[0].reward = float("nan")

    with pytest.raises(ValueError, match=r"NaN or infinite values, because `batch\.rewards` does: a callback"):
        fit(Spoils())


def test_rollouts_cannot_be_left_out_by_a_hook(fit: Fit) -> None:
    """They were, of the metrics alone."""

    class Drops(L.Callback):
        def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Any) -> None:
            del rollouts[::2]

    with pytest.raises(TypeError, match="'tuple' object does not support item deletion"):
        fit(Drops())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": lambda p: None}, r"`optimizer\(parameters\)` must be an Optimizer, got None"),
        ({"optimizer": lambda p: ([adam(p)], [])}, r"`optimizer\(parameters\)` must be an Optimizer, got \("),
        ({"optimizer": lambda p: adam([torch.ones(1)])}, "holds none of the parameters it is given"),
        ({"lr_scheduler": lambda o: None}, r"`lr_scheduler\(optimizer\)` must be a LRScheduler, got None"),
        ({"lr_scheduler": lambda o: {"interval": "step"}}, r"`lr_scheduler\(optimizer\)` .* got \{"),
    ],
)
def test_what_is_no_optimizer_of_the_policy_or_no_scheduler_is_refused(fit: Fit, given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fit(module=given)
