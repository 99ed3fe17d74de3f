"""What a run is told, or refused, that resumes with other networks or settings."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import save_policy
from tests.support.rl_runs import evenness, make_data, make_module, make_trainer
from tlt_lightning import CriticConfig, LoRA, PartialRollout, RewardTerm, Sampling, TailBatching
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.objectives import GRPO, PPO
from tlt_lightning.policy import load_policy
from tlt_lightning.training.resume import check_networks, warn_of_choices

TERM = RewardTerm(function=evenness)


class Game:
    def reset(self) -> None: ...

    def step(self, text: str) -> str | None:
        return None


@pytest.mark.parametrize(
    ("data", "objective", "named"),
    [
        ({"sampling": Sampling(max_tokens=16)}, GRPO(), "data.sampling.max_tokens was 8 and is 16."),
        ({"rewards": [RewardTerm(function=evenness, weight=0.5)]}, GRPO(), "data.rewards.0.weight was 1.0 and is 0.5."),
        ({"rewards": [TERM, RewardTerm(function=evenness, name="again")]}, GRPO(), "data.rewards was [{'function'"),
        ({"schedule": TailBatching(0.5)}, GRPO(), "data.schedule.init_args.extra was 0.25 and is 0.5."),
        ({"schedule": None}, GRPO(), "data.schedule was {'class_path': 'tlt_lightning.schedules.tail_batching."),
        ({"schedule": PartialRollout(0.25)}, GRPO(), "partial_rollout.PartialRollout."),
        ({"val": [{"prompt": "1"}]}, GRPO(), "data.val.path was "),
        ({"turns": TurnLimits(most=3)}, GRPO(), "data.turns.most was 8 and is 3."),
        ({"environment": Game}, GRPO(), "data.environment was None and is tests.training.test_resume.Game."),
        ({}, GRPO(entropy_coef=0.1), "model.objective.init_args.entropy_coef was 0.0 and is 0.1."),
        (
            {"sampling": Sampling(max_tokens=16)},
            GRPO(entropy_coef=0.1),
            "entropy_coef was 0.0 and is 0.1; data.sampling.max_tok",
        ),
    ],
)
def test_a_changed_choice_is_named_with_what_it_was(
    data: dict[str, Any], objective: GRPO, named: str, prompts_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = make_data(prompts_path, schedule=TailBatching())
    saved = {"hyper_parameters": make_module("p").hparams, "datamodule_hyper_parameters": before.hparams}
    with caplog.at_level(logging.WARNING):
        warn_of_choices(saved, make_module("other", lora=None), make_data(prompts_path, schedule=TailBatching()))
        assert caplog.text == ""
        now = make_data(prompts_path, **{"schedule": TailBatching(), **data})
        warn_of_choices(saved, make_module("p", objective=objective), now)
    assert len(caplog.messages) == 1
    assert named in caplog.text


def test_another_critic_is_named_though_that_of_the_checkpoint_goes_on(
    prompts_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, now = (make_module("p", objective=PPO(), critic=CriticConfig(path=path)) for path in ("one", "other"))
    warn_of_choices({"hyper_parameters": before.hparams}, now, make_data(prompts_path))
    assert "model.critic.path was one and is other." in caplog.text


def test_checkpoints_that_describe_less_are_resumed_without_a_word(
    prompts_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    older = {"sampling": {"temperature": 1.0}}
    with caplog.at_level(logging.WARNING):
        for saved in ({}, {"datamodule_hyper_parameters": older}):
            warn_of_choices(saved, make_module("p"), make_data(prompts_path))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("overrides", "named"),
    [({"intermediate_size": 48}, "mlp.down_proj.weight"), ({"num_hidden_layers": 3}, "layers.2")],
)
def test_checkpoint_of_another_policy_is_refused(
    overrides: dict[str, int], named: str, policy_path: str, tmp_path: Path
) -> None:
    other = save_policy(tmp_path / "other", "qwen2", 0, **overrides)
    saved, now = (load_policy(str(path)).state_dict() for path in (policy_path, other))
    checkpoint = {"policy": {"path": policy_path, "lora": None}, "state_dict": saved}
    check_networks(checkpoint, None, saved)
    with pytest.raises(ValueError, match=f"`ckpt_path` holds other networks .*{named}.* of policy '{policy_path}'"):
        check_networks(checkpoint, None, now)


def test_checkpoint_of_other_adapters_is_refused_with_a_way_to_go_on() -> None:
    checkpoint = {"policy": {"path": "p", "lora": asdict(LoRA(rank=4))}, "state_dict": {}}
    check_networks(checkpoint, LoRA(rank=4), {})
    for lora in (LoRA(rank=8), None):
        with pytest.raises(ValueError, match=r"`lora` LoRA\(rank=4, .*this run has (LoRA\(rank=8|None).*`export`"):
            check_networks(checkpoint, lora, {})


def test_checkpoint_of_another_module_is_refused(policy_path: str) -> None:
    saved = load_policy(policy_path).state_dict()
    with pytest.raises(ValueError, match="of another LightningModule than an RLModule, for example of `drafter fit`"):
        check_networks({"state_dict": saved}, None, saved)


def test_weights_alone_are_validated_and_not_resumed(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    trainer, data = make_trainer(tmp_path, max_epochs=1, limit_val_batches=1), make_data(prompts_path)
    trainer.fit(make_module(policy_path), data)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.validate(make_module(policy_path), data, ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    with pytest.raises(ValueError, match=r"`ckpt_path` holds weights alone.*`export --ckpt_path` writes as `model"):
        make_trainer(tmp_path).fit(make_module(policy_path), data, ckpt_path=tmp_path / "weights.ckpt")
