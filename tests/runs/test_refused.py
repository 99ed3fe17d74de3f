"""Settings of module and data that do not fit are refused, or warned of, before anything is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.architectures import save_longrope
from tests.support.rl_runs import NeverLoaded, Recorder, make_data, make_module, make_trainer
from tlt_lightning import CriticConfig, LoRA, RLModule, Sampling, TailBatching
from tlt_lightning.checks import check_lengths
from tlt_lightning.data.iteration_settings import IterationSettings
from tlt_lightning.objectives import GRPO, DrGRPO
from tlt_lightning.rewards import exact_match


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 1}, "group_size"),
        ({"sampling": Sampling(temperature=0)}, "temperature"),
        ({"train": None}, r"data\.train"),
        (
            {"rewards": [exact_match], "val": [{"prompt": "0 1 =", "answer": "1"}, {"prompt": "2 ="}]},
            r"Row 1 of `rows` \(from 0\) cannot be scored by reward `exact_match`: .* is None here",
        ),
        ({"max_prompt_tokens": 2}, "No prompt"),
        ({"max_prompt_tokens": 250, "micro_batch_tokens": 300}, "context of 256"),
        ({"val_sampling": Sampling(temperature=0)}, r"16 plus `data\.val_sampling\.max_tokens` 1024 .* context of 256"),
        ({"rewards": []}, "`rewards` is empty, and `objective` GRPO goes by them"),
        ({"num_minibatches": 3}, "16 responses .* not divisible by `data.num_minibatches` 3"),
        ({"micro_batch_tokens": 23}, "`data.micro_batch_tokens` 23 is less .* set it to at least 24"),
    ],
)
def test_unfit_data_settings_are_refused(
    arguments: dict, message: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        make_trainer(tmp_path).fit(make_module(policy_path), make_data(prompts_path, **arguments))


@pytest.mark.parametrize(("num_prompts", "nearest"), [(4, 3), (32, 33), (1, 3)])
def test_prompts_that_ranks_cannot_share_are_refused_with_the_nearest_number(num_prompts: int, nearest: int) -> None:
    settings: Any = SimpleNamespace(prompts_per_iteration=num_prompts, group_size=2, num_minibatches=1)
    with pytest.raises(MisconfigurationException, match=rf" {num_prompts} is not divisible by 3 .*; give {nearest},"):
        IterationSettings.check(settings, GRPO(), Mock(world_size=3))


def test_an_objective_that_assumes_another_length_limit_is_refused(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    with pytest.raises(MisconfigurationException, match=r"`objective.aggregation.max_tokens` 1024 .* is 8; make them"):
        make_trainer(tmp_path).fit(make_module(policy_path, objective=DrGRPO()), make_data(prompts_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": torch.nn.Linear(1, 1)}, r"`policy` must be a string, got a Linear\."),
        ({"objective": GRPO}, "`objective` must be a PolicyObjective or None, got the class GRPO itself"),
        ({"lora": {"rank": 4}}, r"`lora` must be a LoRA or None, got \{'rank': 4\}\."),
        ({"critic": True}, r"`critic` must be a CriticConfig or None, got True\."),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            "`optimizer` must be a function or a class .* got a",
        ),
        ({"optimizer": "AdamW"}, "`optimizer` must be a function or a class or None, got 'AdamW'"),
    ],
)
def test_arguments_of_another_type_are_refused_in_words(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RLModule(**{"policy": "some/model", "objective": GRPO(), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "TailBatching"}, r"`schedule` must be a RolloutSchedule or None, got 'TailBatching'"),
        ({"schedule": TailBatching}, "`schedule` must be a RolloutSchedule or None, got the class TailBatching itself"),
        ({"dynamic_sampling": True}, r"`dynamic_sampling` must be a DynamicSampling or None, got True\."),
        ({"val_sampling": {"temperature": 0}}, r"`val_sampling` must be a Sampling or None, got \{"),
    ],
)
def test_data_arguments_of_another_type_are_refused_in_words(arguments: dict, message: str, prompts_path: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_data(prompts_path, **arguments)


def test_a_model_may_be_a_path() -> None:
    assert RLModule(Path("some/model"), GRPO()).policy_path == "some/model"  # type: ignore[arg-type]
    assert CriticConfig(path=Path("some/model")).path == "some/model"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, lr=-1.0), "Invalid learning rate: -1.0"),
        (lambda p, q: None, "missing 1 required"),
    ],
)
def test_settings_that_the_optimizer_refuses_are_named_before_the_engine_is_loaded(
    build: Any, reason: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        make_trainer(tmp_path).fit(make_module(policy_path, optimizer=build), make_data(prompts_path, NeverLoaded()))


def test_a_clipping_that_would_turn_gradients_round_is_refused(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    for value in (-1.0, float("nan")):
        trainer = make_trainer(tmp_path, gradient_clip_val=value)
        with pytest.raises(MisconfigurationException, match=rf"`Trainer\(gradient_clip_val={value}\)` is the largest"):
            trainer.fit(make_module(policy_path), make_data(prompts_path))


def test_a_validation_after_every_zero_iterations_is_refused(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, check_val_every_n_epoch=0, limit_val_batches=1)
    with pytest.raises(MisconfigurationException, match=r"check_val_every_n_epoch=0\)` .* leave `data.val` out"):
        trainer.fit(make_module(policy_path), make_data(prompts_path))


class Others(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return [0]


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("fit", {"train_dataloaders": [0]}, r"`RolloutDataModule` .* given none: call `trainer\.fit\(module, data\)`"),
        ("fit", {"datamodule": Others()}, "`RolloutDataModule` .* was given a Others"),
        ("validate", {"dataloaders": [0]}, r"call `trainer\.validate\(module, data\)`"),
        ("validate", {}, "was given none"),
        ("predict", {"dataloaders": [0]}, "was given none"),
    ],
)
def test_a_run_without_its_data_module_is_refused(
    function: str, given: dict[str, Any], message: str, policy_path: str, tmp_path: Path
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        getattr(make_trainer(tmp_path), function)(make_module(policy_path), **given)


@pytest.mark.slow
def test_a_validation_may_come_within_iterations_or_behind_several(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    for interval, validations in ((1, 4), (3, 1), ("00:01:00:00", 0)):
        recorder = Recorder()
        every = {"check_val_every_n_epoch": None, "val_check_interval": interval, "limit_val_batches": 1}
        make_trainer(tmp_path, recorder, **every).fit(make_module(policy_path), make_data(prompts_path))
        assert [len(rollouts) for rollouts in recorder.rollouts].count(1) == validations


def test_a_fit_is_checked_once(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    build = Mock(side_effect=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path, optimizer=build), make_data(prompts_path))
    assert build.call_count == 2  # for the check, and for the run


def test_a_run_does_not_take_the_data_of_an_earlier_one(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    module, data, trainer = (
        make_module(policy_path),
        make_data(prompts_path),
        make_trainer(tmp_path, limit_val_batches=1),
    )
    trainer.validate(module, data, verbose=False)
    data.engine.setup = Mock()  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match=r"was given none: call `trainer\.validate\(module, data\)`"):
        trainer.validate(module)
    data.engine.setup.assert_not_called()


def test_accumulation_by_the_trainer_is_refused_whenever_it_begins(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    class Change(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.accumulate_grad_batches = 1 + 2 * trainer.current_epoch

    with pytest.raises(MisconfigurationException, match=r"accumulate_grad_batches=3\)` would merge"):
        make_trainer(tmp_path, Change()).fit(make_module(policy_path), make_data(prompts_path))


def test_filters_of_the_distribution_are_warned_of(
    policy_path: str, prompts_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_data(prompts_path, sampling=Sampling(max_tokens=4, top_k=5))
    make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path), data)
    assert "`top_k` 5) cuts the distribution" in caplog.text


def test_beyond_its_original_length_a_longrope_policy_is_refused(tmp_path: Path) -> None:
    path, shorter = save_longrope(tmp_path), Sampling(max_tokens=5)
    check_lengths(path, 16, Sampling(max_tokens=16), shorter)
    with pytest.raises(
        ValueError, match=r"is 33, but `policy` .* context of 32 tokens; .*Of `longrope` it is the original"
    ):
        check_lengths(path, 16, Sampling(max_tokens=17), shorter)


def test_adapters_that_do_not_fit_the_policy_are_refused_before_anything_loads(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    module = make_module(policy_path, lora=LoRA(target_modules=["q_proj", "embed_tokens"]))
    with pytest.raises(ValueError, match=r"adapts model\.embed_tokens\.weight, .* \(`tie_word_embeddings`\)"):
        make_trainer(tmp_path).fit(module, make_data(prompts_path, NeverLoaded()))
