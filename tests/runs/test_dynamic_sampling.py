"""Runs that replace groups without a learning signal."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.support.rl_runs import Recorder, evenness, make_data, make_module, make_trainer
from tlt_lightning import RewardTerm
from tlt_lightning.data.iteration_settings import DynamicSampling
from tlt_lightning.objectives import group_statistics
from tlt_lightning.rollout import RolloutBatch


@pytest.fixture(autouse=True)
def seed() -> None:
    L.seed_everything(11)


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_without_a_signal(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    def only_some(prompt: str, response: str, row: dict[str, Any]) -> float:
        return evenness(prompt, response, row) if int(prompt.split()[0]) % 2 else 0.0

    def run(dynamic_sampling: DynamicSampling | None) -> tuple[Recorder, dict[str, Any]]:
        L.seed_everything(11)
        recorder = Recorder()
        trainer = make_trainer(tmp_path, recorder, max_epochs=3)
        rewards = [RewardTerm(function=only_some)]
        data = make_data(prompts_path, rewards=rewards, dynamic_sampling=dynamic_sampling)
        trainer.fit(make_module(policy_path), data)
        return recorder, trainer.callback_metrics

    def has_signal(batch: RolloutBatch) -> bool:
        _, deviation, _ = group_statistics(batch.rewards, batch.groups)
        return bool((deviation > 0).all())

    plain, _ = run(None)
    filtered, metrics = run(DynamicSampling(max_rounds=6))
    assert all(len(batch) == 16 for batch in (*plain.batches, *filtered.batches))
    assert not all(map(has_signal, plain.batches))
    assert all(map(has_signal, filtered.batches))
    assert all(len(batch.groups.unique()) == 4 for batch in filtered.batches)
    assert metrics["rollout/groups_drawn"] > 4
    assert metrics["rollout/groups_without_signal_kept"] == 0
    assert filtered.calls.count("start") == filtered.calls.count("end") == 3  # once an iteration, however many rounds
    assert len(filtered.rollouts[-1]) == metrics["rollout/groups_drawn"] * 4
    assert len({rollout.group for rollout in filtered.rollouts[-1]}) == metrics["rollout/groups_drawn"]


def test_iteration_is_filled_up_when_no_group_has_a_signal(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    data = make_data(
        prompts_path,
        rewards=[RewardTerm(function=lambda prompt, response, row: 1.0, name="one")],
        dynamic_sampling=DynamicSampling(max_rounds=2),
    )
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(make_module(policy_path), data)
    assert trainer.callback_metrics["rollout/groups_without_signal_kept"] == 4
    assert trainer.callback_metrics["rollout/groups_drawn"] == 8
