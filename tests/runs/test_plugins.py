"""What would teach the policy nonsense ends a run: plugins whose authors have not asked the kit."""

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
        (lambda r: replace(r, logps=r.logps[:-1]), r"answered request \d+ with (\d+) tokens and \d log-probs"),
        (lambda r: replace(r, request_id=99), "answered request 99 "),
        (lambda r: replace(r, request_id=0), r"answered request 0 .*; open are \[1, 2"),
    ],
)
def test_a_response_that_would_teach_nonsense_ends_the_run(fit: Fit, spoil: Any, message: str) -> None:
    engine = Mine()
    engine.spoil = spoil
    with pytest.raises(ValueError, match=message):
        fit(engine=engine)


def test_responses_of_an_engine_that_notes_no_version_have_that_of_the_weights(fit: Fit) -> None:
    """Else nothing would compare its log-probs with the policy's: they would be of no weights that there are."""

    class Unversioned(TransformersEngine):
        def update_weights(self, named_tensors: Any, version: int) -> None: ...

    recorder = Recorder()
    fit(recorder, engine=Unversioned())
    assert {rollout.response.policy_versions for rollout in recorder.rollouts[0]} == {(0,)}


class Shapes(GRPO):
    """Makes other advantages of GRPO's by `change`."""

    change: Any = None

    def advantages(self, batch: Any, reduce: Any) -> Any:
        return self.change(batch, *super().advantages(batch, reduce))


def test_advantages_carry_no_gradient(fit: Fit) -> None:
    """A second micro-batch would go through their graph again, which is gone."""
    objective, baseline = Shapes(), torch.ones((), requires_grad=True)
    objective.change = lambda batch, advantages, returns: (advantages * baseline, returns)
    fit(module={"objective": objective}, num_minibatches=1)
    assert baseline.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch, advantages, returns: (advantages[:, :1], None), r"`batch.advantages`, of shape \(16, 1\)"),
        (lambda batch, advantages, returns: (advantages.log(), None), "`batch.advantages`, .* finite number"),
        (lambda batch, advantages, returns: (advantages, advantages[0]), r"`batch.returns`, of shape \(8,\)"),
    ],
)
def test_advantages_that_would_teach_nonsense_end_the_run(fit: Fit, change: Any, message: str) -> None:
    """One number for all tokens would be spread over them."""
    objective = Shapes()
    objective.change = change
    with pytest.raises(ValueError, match=message):
        fit(module={"objective": objective})


def test_one_loss_for_all_tokens_ends_the_run(fit: Fit) -> None:
    class Own(Surrogate):
        def __call__(self, logps: Any, old_logps: Any, advantages: Any, mask: Any) -> Any:
            losses = -logps * advantages
            return losses.mean(), losses

    with pytest.raises(ValueError, match=r"`Own` returned a loss of shape \(\), which would be spread"):
        fit(module={"objective": GRPO(surrogate=Own())})


def test_a_loss_without_gradient_ends_the_run(fit: Fit) -> None:
    class Detached(GRPO):
        def loss(self, *given: Any) -> ObjectiveOutput:
            return ObjectiveOutput(super().loss(*given).loss.detach())

    with pytest.raises(RuntimeError, match="does not require grad"):  # torch says so
        fit(module={"objective": Detached()})


def test_rewards_that_a_callback_made_nan_end_the_run(fit: Fit) -> None:
    class Spoils(L.Callback):
        def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Any) -> None:
            rollouts[0].reward = float("nan")

    with pytest.raises(ValueError, match=r"`batch.advantages`, .* A callback may have changed rewards"):
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
