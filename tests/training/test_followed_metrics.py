"""Callbacks of Lightning work, those that follow a metric where it is new, or are refused before the engine loads."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.rl_runs import NeverLoaded, Recorder, make_and_load, make_data, make_module, make_trainer, weights

Paths = tuple[str, str, Path]


def test_a_reward_is_read_where_its_iteration_ends_though_few_are_validated(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    best = ModelCheckpoint(
        root, "{epoch}", "reward/mean", mode="max", save_top_k=-1, save_on_train_epoch_end=False
    )  # False is mended
    stopping, recorder = EarlyStopping("reward/mean", mode="max", patience=9), Recorder()
    trainer = make_trainer(
        root,
        *(best, stopping, recorder),
        enable_checkpointing=True,
        max_epochs=3,
        check_val_every_n_epoch=2,
        limit_val_batches=1,
    )
    module, data = make_module(policy_path), make_data(prompts_path)
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    rewards = [float(batch.rewards.mean()) for batch in recorder.batches]
    scores = {Path(path).stem: float(score) for path, score in best.best_k_models.items()}
    assert scores == pytest.approx({f"epoch={number}": reward for number, reward in enumerate(rewards)})
    assert float(stopping.best_score) == pytest.approx(max(rewards))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_the_trainers_own_checkpoint_needs_no_validation(every: int, paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    saver = ModelCheckpoint(root, "{epoch}", every_n_epochs=every, save_top_k=-1)
    settings = {"max_epochs": 3, "check_val_every_n_epoch": 10, "limit_val_batches": 1}
    make_trainer(root, saver, enable_checkpointing=True, **settings).fit(
        make_module(policy_path), make_data(prompts_path)
    )
    assert {path.stem for path in root.glob("*.ckpt")} == {f"epoch={number}" for number in range(every - 1, 3, every)}


@pytest.mark.parametrize(
    ("callback", "settings", "message"),
    [
        (EarlyStopping("val/accuracy", mode="max"), {}, r"monitor='val/accuracy'.*has none: set `data.val`"),
        (EarlyStopping("reward/mean"), {}, r"`EarlyStopping\(monitor='reward/mean'\)` has `mode` 'min'.*`mode='max'`"),
        (ModelCheckpoint(monitor="val/accuracy"), {"check_val_every_n_epoch": 1}, "take a lower `val/accuracy`"),
    ],
)
def test_what_would_look_in_vain_is_refused(
    callback: Any, settings: dict[str, Any], message: str, paths: Paths
) -> None:
    policy_path, prompts_path, root = paths
    settings = settings and {"limit_val_batches": 1, **settings}
    trainer = make_trainer(root, callback, enable_checkpointing=True, **settings)
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(make_module(policy_path), make_data(prompts_path, NeverLoaded()))


def test_validation_that_data_has_no_prompts_for_is_not_followed(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    trainer = make_trainer(root, EarlyStopping("val/accuracy", mode="max"), limit_val_batches=1)
    with pytest.raises(MisconfigurationException, match=r"has none: set `data\.val`"):
        trainer.fit(make_module(policy_path), make_data(prompts_path, NeverLoaded(), val=None))


def test_a_low_reward_may_end_a_run(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    collapsed = EarlyStopping("reward/mean", mode="min", patience=9, stopping_threshold=-1.0)
    make_trainer(root, collapsed, max_epochs=1).fit(make_module(policy_path), make_data(prompts_path))


def test_a_checkpoint_by_a_metric_that_is_not_there_ends_the_run_at_once(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    trainer = make_trainer(root, ModelCheckpoint(root, monitor="reward_mean", mode="max"), enable_checkpointing=True)
    with pytest.raises(MisconfigurationException, match=r"'reward_mean'.*would save nothing.*reward/mean"):
        trainer.fit(make_module(policy_path), make_data(prompts_path))
    assert trainer.current_epoch == 0


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (BackboneFinetuning(), r"`BackboneFinetuning` freezes layers before the policy is loaded.*`setup`"),
        (ModelPruning("l1_unstructured"), "`ModelPruning` renames the weights"),
    ],
)
def test_a_callback_that_would_fail_behind_the_engine_is_refused(callback: Any, message: str, paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(root, callback).fit(make_module(policy_path), make_data(prompts_path, NeverLoaded()))


def test_a_callback_may_freeze_layers_once_it_has_loaded_the_policy(paths: Paths) -> None:
    policy_path, prompts_path, root = paths

    class Freeze(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.configure_model()
            pl_module.policy.get_input_embeddings().requires_grad_(False)

    module, name = make_module(policy_path), "model.embed_tokens.weight"
    before = make_and_load(policy_path)
    make_trainer(root, Freeze(), max_epochs=1).fit(module, make_data(prompts_path))
    moved = {each for each, tensor in weights(module).items() if not tensor.equal(before[each])}
    assert name not in moved
    assert moved
