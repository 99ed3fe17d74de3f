import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.gallery.early_warning import RewardLengthWarning

HEALTHY = {"rewards": (0.0, 1.0), "length": 100, "cut": False, "observed": 0}


def given_warnings(path: Path, override: Callable[[int], dict[str, Any]], **settings: Any) -> list[str]:
    """Fit eight iterations that are healthy except for `override(iteration)`; return the warnings of the callback."""

    def make_rollouts(iteration: int) -> list[Any]:
        state = {**HEALTHY, **override(iteration)}
        pairs = [(group, reward) for group in range(4) for reward in state["rewards"]]
        rollouts = [make_rollout(reward, state["length"], group, cut=state["cut"]) for group, reward in pairs]
        for each in rollouts:
            each.response = replace(each.response, observed=((1, state["observed"]),))  # by an environment
        return rollouts

    trainer = make_trainer(path, [RewardLengthWarning(**settings)], max_epochs=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts))
    return [str(entry.message) for entry in caught if str(entry.message).startswith("Iteration ")]


def test_healthy_run_is_left_in_peace_whatever_its_validation(tmp_path: Path) -> None:
    unhealthy = {"rewards": (0.0, 0.0), "length": 1000, "cut": True}
    assert given_warnings(tmp_path, lambda i: {"length": 100 + 5 * i} if i else unhealthy) == []


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"rewards": (0.0, 0.2)}, "reward collapsed: 0.100 against 0.500"),
        ({"length": 300}, "lengths exploded: 300 tokens on average against 100"),
        ({"observed": 75}, "lengths collapsed: 25 tokens on average against 100"),
        ({"length": 30}, "lengths collapsed: 30 tokens on average against 100"),
        ({"cut": True}, "many responses truncated: 100%"),
        ({"rewards": (0.5, 0.5)}, "little to learn from: 100%"),
    ],
)
def test_each_cause_warns_once_in_the_iteration_it_begins(tmp_path: Path, change: dict[str, Any], cause: str) -> None:
    messages = given_warnings(tmp_path, lambda iteration: change if iteration >= 5 else {})
    assert len(messages) == 1
    assert messages[0].startswith(f"Iteration 5: {cause}")


def test_limits_are_settings(tmp_path: Path) -> None:
    def change(iteration: int) -> dict[str, Any]:
        return {"rewards": (0.0, 0.9), "length": 130} if iteration >= 5 else {}

    assert given_warnings(tmp_path, change) == []
    messages = given_warnings(tmp_path, change, reward_drop=0.04, length_factor=1.2)
    assert [message.split(":")[1].strip() for message in messages] == ["reward collapsed", "lengths exploded"]
    for setting, state in (("max_truncated", {"cut": True}), ("max_zero_std", {"rewards": (0.5, 0.5)})):
        assert given_warnings(tmp_path, lambda _, state=state: state, **{setting: 1.0}) == []


def test_means_go_back_as_far_as_the_window(tmp_path: Path) -> None:
    lengths = [0, 100, 100, 100, 100, 190, 190, 190, 310]  # the last is twice as long as all, not as the last three
    warned = [given_warnings(tmp_path, lambda i: {"length": lengths[i]}, window=window) for window in (3, 7)]
    assert [len(messages) for messages in warned] == [0, 1]


def test_single_responses_per_prompt_are_no_groups(tmp_path: Path) -> None:
    assert given_warnings(tmp_path, lambda iteration: {"rewards": (1.0,)}) == []


def test_resumed_run_remembers_means_and_warnings(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    callback = RewardLengthWarning()
    trainer = make_trainer(tmp_path, [callback, checkpoint], enable_checkpointing=True, max_epochs=4)
    with pytest.warns(UserWarning, match="Iteration 1: many responses truncated"):
        trainer.fit(LoggingModule(), datamodule=RolloutLoop(lambda i: [make_rollout(0.5, 100, cut=True)]))
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["RewardLengthWarning"]
    restored = RewardLengthWarning()
    restored.load_state_dict(state)
    assert list(restored.lengths) == [100.0] * 4
    assert restored.warned == callback.warned == {"many responses truncated"}


def test_the_next_run_is_compared_with_itself_alone(tmp_path: Path) -> None:
    callback = RewardLengthWarning()
    for reward in (1.0, 0.1):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Iteration ")
            rollouts = [make_rollout(reward - 0.1 * i) for i in range(2)]
            trainer = make_trainer(tmp_path, [callback], max_epochs=4)
            trainer.fit(LoggingModule(), datamodule=RolloutLoop(lambda _, rollouts=rollouts: rollouts))
    trainer.fit_loop.max_epochs = 5
    trainer.fit(LoggingModule(), datamodule=RolloutLoop(lambda _: rollouts))
    assert list(callback.rewards) == [pytest.approx(0.05)] * 5


@pytest.mark.parametrize(
    ("arguments", "match"), [({"length_factor": 1.0}, "`length_factor`.*got 1.0"), ({"window": 2}, "`window`.*got 2")]
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RewardLengthWarning(**arguments)
