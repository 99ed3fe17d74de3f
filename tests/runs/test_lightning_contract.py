"""Whatever a user of Lightning tries first works as in Lightning, or is refused before anything loads."""

import json
import warnings
from argparse import ArgumentError
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.rl_runs import NeverLoaded, Recorder, make_data, make_engine, make_module, make_trainer, weights
from tlt_lightning import LoRA, RLModule, RolloutDataModule
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.callbacks.run_report import RunReport
from tlt_lightning.checks import check_trainer
from tlt_lightning.objectives import GRPO, DrGRPO, SequenceMeanTokenSumNorm
from tlt_lightning.training.critic import CriticConfig

Paths = tuple[str, str, Path]


@pytest.fixture
def paths(policy_path: str, prompts_path: str, tmp_path: Path) -> Paths:
    L.seed_everything(11)
    return policy_path, prompts_path, tmp_path


# What works


def prompts_of(rollouts: list[Any]) -> list[int]:
    """Prompts of the groups of four that a rollout wrote, in order."""
    return [rollout.prompt.index for rollout in rollouts[::4]]


@pytest.mark.slow
@pytest.mark.parametrize(("given", "steps"), [(True, 1), (3, 2)])
def test_a_dev_run_is_one_small_iteration_through_everything(given: Any, steps: int, paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    recorder, checkpoints = Recorder(), IterationCheckpoint(str(root))
    trainer = make_trainer(
        root,
        *(recorder, checkpoints, RunReport(str(root))),
        fast_dev_run=given,
        enable_checkpointing=True,
        max_epochs=7,
    )
    data = make_data(prompts_path, inner_epochs=steps)
    trainer.fit(make_module(policy_path), data)
    train, held_out = recorder.rollouts
    assert (len(train), len(held_out)) == (4 * given, given)
    assert (trainer.current_epoch, trainer.global_step) == (1, steps)
    assert trainer.callback_metrics.keys() >= {"reward/mean", "val/reward"}
    assert not [path for path in root.rglob("*") if path.suffix in (".ckpt", ".html", ".json")]
    make_trainer(root, recorder, max_epochs=1).fit(make_module(policy_path), data)
    assert len(recorder.rollouts[-1]) == 16  # the same data module, in earnest


@pytest.mark.slow
@pytest.mark.parametrize(("given", "kept"), [(2, {0, 1}), (0.5, {0, 1, 2, 3})])
def test_overfitting_takes_the_same_prompts_every_iteration(given: float, kept: set[int], paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    recorder = Recorder()
    data = make_data(prompts_path, val=None)
    make_trainer(root, recorder, overfit_batches=given).fit(make_module(policy_path), data)
    first, second = recorder.rollouts
    assert set(prompts_of(first)) == set(prompts_of(second)) == kept


def test_a_healthy_run_warns_of_nothing(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    with warnings.catch_warnings(record=True) as caught:
        for iterations, last in ((1, None), (2, root / "last.ckpt")):
            saver = ModelCheckpoint(root, "last", enable_version_counter=False)
            trainer = make_trainer(root, saver, max_epochs=iterations, enable_checkpointing=True)
            trainer.fit(make_module(policy_path), make_data(prompts_path), ckpt_path=last)
        trainer.predict(make_module(policy_path), make_data(prompts_path))
    assert {str(warning.message) for warning in caught} == set()


def test_limits_of_held_out_batches_count_prompts(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    recorder, module, data = Recorder(), make_module(policy_path), make_data(prompts_path, val_group_size=4)
    limits = {"limit_val_batches": 0.5, "limit_test_batches": 3, "limit_predict_batches": 1, "num_sanity_val_steps": 2}
    trainer = make_trainer(root, recorder, max_epochs=1, **limits)
    trainer.fit(module, data)
    assert [len(rollouts) for rollouts in recorder.rollouts] == [2 * 4, 4 * 4, 4 * 4]  # before, training, after
    (tested,) = trainer.test(module, data, verbose=False)
    (rows,) = trainer.predict(module, data)
    assert [prompts_of(rollouts) for rollouts in recorder.rollouts[3:]] == [[0, 1, 2], [0]]
    assert len(rows) == 4
    assert tested.keys() == {"test/accuracy", "test/pass@2", "test/pass@4", "test/reward", "test/length"}


def test_the_test_loop_is_the_validation_under_another_name(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data = make_module(policy_path), make_data(prompts_path, val_group_size=2)
    trainer = make_trainer(root, limit_val_batches=1.0)
    (held_out,) = trainer.validate(module, data, verbose=False)
    (tested,) = trainer.test(module, data, verbose=False)
    assert tested == {name.replace("val/", "test/"): value for name, value in held_out.items()}
    assert set(tested) == {"test/accuracy", "test/pass@2", "test/reward", "test/length"}
    assert 0 < tested["test/reward"] < 1  # a mean of eighths, not a share of correct ones
    assert 1 <= tested["test/length"] <= 8


def test_checkpoints_are_named_by_metrics_of_the_iteration(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    name = "{epoch}-reward={reward/mean:.4f}"
    checkpoints = ModelCheckpoint(root, name, "reward/mean", mode="max", auto_insert_metric_name=False)
    stopping = EarlyStopping("reward/mean", mode="max", stopping_threshold=-1.0, check_on_train_epoch_end=True)
    trainer = make_trainer(root, checkpoints, stopping, enable_checkpointing=True)
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    reward = float(trainer.callback_metrics["reward/mean"])
    assert reward > 0
    assert [path.name for path in root.glob("**/*.ckpt")] == [f"0-reward={reward:.4f}.ckpt"]


# What is refused


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"max_steps": 5, "max_epochs": None}, r"`Trainer\(max_steps=5\)` .* `max_epochs`"),
        ({"precision": "bf16-true"}, "precision='bf16-true'.*bf16-mixed"),
        ({"precision": "16-true"}, "precision='16-true'.*bf16-mixed"),
        ({"strategy": "fsdp", "accelerator": "cpu"}, "strategy|FSDP"),
        ({"limit_train_batches": 1}, r"limit_train_batches=1\).*`data.prompts_per_iteration`.*`fast_dev_run`"),
        ({"limit_train_batches": 0.5}, r"limit_train_batches=0.5\)"),
        ({"overfit_batches": 0.01}, r"overfit_batches=0.01\)` leaves none of 9 prompts"),
        (
            {"accumulate_grad_batches": 3},
            r"`Trainer\(accumulate_grad_batches=3\)` would merge .*`data\.num_minibatches`",
        ),
        ({"callback": GradientAccumulationScheduler({0: 1, 4: 2})}, "changes `accumulate_grad_batches`"),
        ({"callback": StochasticWeightAveraging(1e-3)}, "use `EMAWeightAveraging`"),
        ({"callback": ModelCheckpoint(every_n_train_steps=2)}, r"every_n_train_steps=2.*`every_n_epochs`"),
        ({"callback": ModelCheckpoint(train_time_interval=timedelta(1))}, r"train_time_interval.*`every_n_epochs`"),
    ],
)
def test_unsupported_trainer_settings_are_refused_before_anything_loads(
    trainer: dict[str, Any], message: str, paths: Paths
) -> None:
    policy_path, prompts_path, root = paths
    callbacks = [trainer.pop("callback")] if "callback" in trainer else []
    trainer = {"enable_checkpointing": True, **trainer}
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        make_trainer(root, *callbacks, **trainer).fit(make_module(policy_path), make_data(prompts_path, NeverLoaded()))


@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_the_tuner_is_refused_before_anything_loads(search: str, paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    tuner = Tuner(make_trainer(root))
    with pytest.raises(MisconfigurationException, match=r"`\w+Finder` tries .*`Tuner`.* compare short runs"):
        getattr(tuner, search)(make_module(policy_path), datamodule=make_data(prompts_path, NeverLoaded()))


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_spawned_processes_are_refused(strategy: str) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False)
    with pytest.raises(MisconfigurationException, match=r"spawned or forked.*also in a notebook.*`ddp` in a script"):
        check_trainer(trainer)


@pytest.mark.parametrize("argument", ["policy", "reference", "critic.path"])
def test_a_model_that_is_nowhere_is_refused_before_anything_loads(argument: str, paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    nowhere = str(root / "nowhere")
    given = {"critic": CriticConfig(path=nowhere)} if argument == "critic.path" else {argument: nowhere}
    module = RLModule(**{"policy": policy_path, "objective": GRPO(), **given})
    with pytest.raises(
        ValueError, match=rf"^`model\.{argument}` '.*nowhere' is no folder .* and the hub gave no such model"
    ):
        make_trainer(root).fit(module, make_data(prompts_path, NeverLoaded()))


def test_the_folder_of_an_adapter_alone_is_no_policy_and_says_how_to_merge_it(paths: Paths) -> None:
    _, prompts_path, root = paths
    (root / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"`model\.policy` .* `merge_and_unload\(\)`: its own folder would hold the adapter"
    ):
        make_trainer(root).fit(RLModule(str(root), GRPO()), make_data(prompts_path, NeverLoaded()))


class OwnCheckpoints(TorchCheckpointIO):
    """Writes what rank zero has."""


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({}, r"TransformersEngine generates with the live policy.*use `VLLMEngine`"),
        ({"callbacks": [EMAWeightAveraging()]}, r"`WeightAveraging` keeps a copy of the whole policy"),
        ({"plugins": [OwnCheckpoints()]}, r"plugin OwnCheckpoints writes checkpoints of rank zero alone"),
        ({"strategy": ModelParallelStrategy()}, r"is ModelParallelStrategy, which is not supported.*or `fsdp2`"),
    ],
)
def test_what_a_sharded_policy_cannot_do_is_refused(trainer: dict[str, Any], message: str, paths: Paths) -> None:
    _, prompts_path, _ = paths
    sharded = L.Trainer(**{"accelerator": "cpu", "devices": 2, "strategy": "fsdp2", "logger": False, **trainer})
    sharded.datamodule = make_data(prompts_path, None if not trainer else make_engine("vllm"))  # type: ignore[attr-defined]
    with pytest.raises(MisconfigurationException, match=message):
        check_trainer(sharded)


def test_states_of_8_bits_are_refused_in_shards(paths: Paths) -> None:
    policy_path, prompts_path, _ = paths

    def adamw_8bit(groups: Any) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        return AdamW8bit(groups)

    sharded = L.Trainer(accelerator="cpu", devices=2, strategy="fsdp2", logger=False)
    sharded.datamodule = make_data(prompts_path, make_engine("vllm"))  # type: ignore[attr-defined]
    sharded.strategy._lightning_module = make_module(policy_path)
    check_trainer(sharded)
    sharded.strategy._lightning_module = make_module(policy_path, optimizer=adamw_8bit)
    with pytest.raises(
        MisconfigurationException, match=r"`model\.optimizer` keeps states of 8 bits .* `strategy: ddp`"
    ):
        check_trainer(sharded)


# Configuration


def test_a_run_from_python_saves_its_configuration_as_a_recipe_would_write_it(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    rows = [json.loads(line) for line in Path(prompts_path).read_text().splitlines()]
    module, data = make_module(policy_path, lora=LoRA(rank=4)), make_data(prompts_path, train=rows)
    make_trainer(root, LearningRateMonitor("step"), max_epochs=1, logger=CSVLogger(root)).fit(module, data)
    assert "lr-AdamW" in next(root.glob("**/metrics.csv")).read_text()  # by Lightning's default after 50 steps alone
    saved = yaml.safe_load(next(root.glob("**/hparams.yaml")).read_text())
    assert saved["policy"] == policy_path
    assert saved["objective"]["init_args"]["surrogate"]["init_args"]["clip_high"] == 0.28
    assert saved["optimizer"]["class_path"] == "torch.optim.adamw.AdamW"
    assert saved["optimizer"]["init_args"]["lr"] == 3e-3  # of a lambda
    assert saved["lora"]["rank"] == 4
    assert saved["engine"] == {
        "class_path": "tlt_lightning.engine.transformers.TransformersEngine",
        "init_args": {"batch_size": 64},
    }
    assert saved["train"]["rows"] == "list of 9"
    assert saved["val"]["path"] == prompts_path
    assert saved["rewards"][0]["function"] == "tests.support.rl_runs.evenness"
    assert saved["sampling"]["max_tokens"] == 8


@pytest.mark.slow
def test_module_and_data_are_loaded_from_its_checkpoint_alone(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module = make_module(
        policy_path, objective=DrGRPO(aggregation=SequenceMeanTokenSumNorm(max_tokens=8)), lora=LoRA(rank=4)
    )
    checkpoints = ModelCheckpoint(root, "end")
    data = make_data(prompts_path)
    make_trainer(root, checkpoints, max_epochs=1, enable_checkpointing=True).fit(module, data)
    assert RolloutDataModule.load_from_checkpoint(root / "end.ckpt").hparams == data.hparams
    assert "RolloutDataModule object" in str(data)
    loaded = RLModule.load_from_checkpoint(root / "end.ckpt")
    assert (loaded.objective, loaded.lora) == (module.objective, module.lora)
    assert loaded.optimizer([torch.zeros(1, requires_grad=True)]).param_groups[0]["lr"] == 3e-3
    trained = weights(module)
    for name, tensor in weights(loaded).items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=0)
    assert RLModule.load_from_checkpoint(root / "end.ckpt", objective=GRPO()).objective == GRPO()


def test_a_schedule_that_cannot_be_described_is_asked_for(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    constant = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # noqa: E731
    module, checkpoints = make_module(policy_path, lr_scheduler=constant), ModelCheckpoint(root, "end")
    make_trainer(root, checkpoints, max_epochs=1, enable_checkpointing=True).fit(module, make_data(prompts_path))
    with pytest.raises(ArgumentError, match=r"lr_scheduler[^`]*Given value: .*<lambda>"):
        RLModule.load_from_checkpoint(root / "end.ckpt")
    assert RLModule.load_from_checkpoint(root / "end.ckpt", lr_scheduler=constant).lr_scheduler is constant
