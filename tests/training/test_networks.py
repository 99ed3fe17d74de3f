"""What is scored before the update, and what is not loaded."""

from pathlib import Path

import pytest
import torch

from tests.support.rl_runs import make_module, make_trainer
from tests.test_policy import make_batch
from tlt_lightning import CriticConfig
from tlt_lightning.objectives import GRPO, Distillation, KLPenalty
from tlt_lightning.training.networks import NetworkSettings


def test_nothing_is_scored_where_nothing_is_asked_for(policy_path: str) -> None:
    module = make_module(policy_path)
    module.trainer = make_trainer(Path())
    module.configure_model()
    batch = make_batch([3, 3], [4, 2])
    assert module.score(batch, 45, single_update=True) is batch
    assert module.score(batch, 45, single_update=False).old_logps is not None
    batch.asynchronous = True  # the ratio is to the policy that wrote it
    assert module.score(batch, 45, single_update=False) is batch


def test_a_network_that_the_objective_does_not_use_is_warned_of(
    policy_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for arguments in ({"critic": CriticConfig()}, {"reference": policy_path}, {}):
        caplog.clear()
        module = make_module(policy_path, **arguments)
        module.configure_model()
        said = [f"`model.{name}` is given, and `model.objective` GRPO uses none" for name in arguments]
        assert [record.message[: len(text)] for record, text in zip(caplog.records, said, strict=True)] == said


@pytest.mark.parametrize("is_half", [False, True])
def test_a_teacher_is_held_as_passes_are_and_the_reference_of_a_penalty_is_as_exact_as_the_policy(
    is_half: bool, policy_path: str
) -> None:
    settings = NetworkSettings(policy_path, policy_path, None, None, False, "sdpa")
    for objective, dtype in (
        (GRPO(loss_kl=KLPenalty(coef=0.1)), torch.float32),  # the KL begins with 0
        (Distillation(), torch.bfloat16 if is_half else torch.float32),
    ):
        reference = settings.load(objective, None, is_half=is_half).reference
        assert {parameter.dtype for parameter in reference.model.parameters()} == {dtype}
