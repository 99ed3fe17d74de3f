"""Scoring that is left between two passes and taken up again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.rl_runs import make_module, make_trainer
from tests.test_policy import make_batch
from tlt_lightning import CriticConfig
from tlt_lightning.hidden_states import HiddenStateRequest
from tlt_lightning.objectives import PPO

LENGTHS = [4, 40, 6, 5, 30, 20, 2]


def test_scoring_that_was_left_ends_with_the_same_bits(policy_path: str) -> None:
    module = make_module(policy_path, objective=PPO(), critic=CriticConfig())
    module.trainer = make_trainer(Path())
    module.configure_model()
    module.hidden_state_request = HiddenStateRequest((1, 2), max_tokens=1000)
    batch, found = make_batch([3] * len(LENGTHS), LENGTHS), []
    for may_go_on in ([], [True, False], [True, True, False]):
        scoring = module.begin_scoring(batch, 45)
        num_tokens = scoring.run(iter(may_go_on).__next__) if may_go_on else 0
        assert num_tokens < int(batch.lengths.sum())
        assert (num_tokens > 0) == bool(may_go_on)
        rewarded = replace(batch, rewards=torch.ones(len(LENGTHS)))
        assert scoring.fits(rewarded, module.hidden_state_request)
        scored = scoring.finish(rewarded)
        assert scored.rewards.all()
        assert module._tap is not None
        states = torch.cat([text.states for text in module._tap.texts])
        assert len(states) == int(batch.lengths.sum())
        found.append((scored.old_logps, scored.values, states))
    for results in zip(*found, strict=True):
        assert all(torch.equal(results[0], each) for each in results[1:])


def test_scoring_fits_its_own_sequences_and_states_alone(policy_path: str) -> None:
    module = make_module(policy_path)
    module.trainer = make_trainer(Path())
    module.configure_model()
    batch, request = make_batch([3, 3], [4, 2]), HiddenStateRequest((1,), max_tokens=10)
    scoring = module.begin_scoring(batch, 45)
    assert scoring.fits(batch, None)
    assert not scoring.fits(batch, request)
    assert not scoring.fits(replace(batch, input_ids=batch.input_ids + 1), None)
    assert not scoring.fits(batch.select([0]), None)
    assert not scoring.fits(replace(batch, response_lengths=torch.tensor([4, 3])), None)
    module.hidden_state_request = request
    assert module.begin_scoring(batch, 45).fits(batch, request)


def test_nothing_is_scored_where_nothing_is_asked_for(policy_path: str) -> None:
    module = make_module(policy_path)
    module.trainer = make_trainer(Path())
    module.configure_model()
    batch = make_batch([3, 3], [4, 2])
    scoring = module.begin_scoring(batch, 45, single_update=True)
    assert scoring.run() == 0
    assert scoring.finish(batch).old_logps is None


def test_a_network_that_the_objective_does_not_use_is_warned_of(
    policy_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for arguments in ({"critic": CriticConfig()}, {"reference": policy_path}, {}):
        caplog.clear()
        module = make_module(policy_path, **arguments)
        module.configure_model()
        said = [f"`model.{name}` is given, and `model.objective` GRPO uses none" for name in arguments]
        assert [record.message[: len(text)] for record, text in zip(caplog.records, said, strict=True)] == said
