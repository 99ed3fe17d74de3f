"""Hooks in runs of RLModule: in which order they come, and with which metrics an iteration's end is told."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer
from tlt_lightning import RLModule, RolloutCallback
from tlt_lightning.objectives import GRPO


class Watcher(RolloutCallback):
    """Notes what it is told at the end of each iteration, what a plain callback finds, and longest responses."""

    def __init__(self, stop_after: int | None = None, fail_in: int | None = None) -> None:
        self.stop_after, self.fail_in = stop_after, fail_in
        self.told: list[tuple[int, dict[str, float]]] = []
        self.found: list[dict[str, float]] = []
        self.longest: list[int] = []

    def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Any) -> None:
        if trainer.training:
            self.longest.append(max(len(rollout.response.token_ids) for rollout in rollouts))
            pl_module.iteration_log.max("mine/longest", self.longest[-1])

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch + 1 == self.fail_in:
            raise ZeroDivisionError

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_iteration_end(self, trainer: Any, pl_module: Any, iteration: int, metrics: dict[str, float]) -> None:
        self.told.append((iteration, metrics))
        trainer.should_stop = iteration == self.stop_after

    def state_dict(self) -> dict[str, Any]:
        return {"told": [iteration for iteration, _ in self.told]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["told"]


@pytest.fixture(autouse=True)
def seed() -> None:
    L.seed_everything(11)


def run(watcher: Watcher, paths: tuple[str, str, Path], *callbacks: L.Callback, ckpt: str | None = None, **other: Any):  # type: ignore[no-untyped-def]
    policy_path, prompts_path, root = paths
    validating = {"max_epochs": 3, "limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
    trainer = make_trainer(root, watcher, *callbacks, **{**validating, **other})
    trainer.fit(make_module(policy_path), make_data(prompts_path), ckpt_path=ckpt)
    return trainer


def test_hooks_come_in_order(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    recorder = Recorder()
    make_trainer(tmp_path, recorder).fit(make_module(policy_path), make_data(prompts_path))
    one = ["start", "progress", "end", "scored"]
    assert recorder.calls == ["synced 0", *one, "synced 2", *one]
    assert all(batch.advantages is not None for batch in recorder.batches)
    assert all(rollout.rewards["evenness"] == rollout.reward for rollout in recorder.rollouts[0])


def test_a_plain_callback_with_a_hook_works(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    class Plain(L.Callback):
        seen = 0

        def on_rollout_end(self, trainer, pl_module, rollouts):  # type: ignore[no-untyped-def]
            Plain.seen += len(rollouts)

    make_trainer(tmp_path, Plain()).fit(make_module(policy_path), make_data(prompts_path))
    assert Plain.seen == 32


def test_each_iteration_is_told_once_with_its_own_metrics(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher()
    run(watcher, paths)
    assert [iteration for iteration, _ in watcher.told] == [1, 2, 3]
    told = [metrics for _, metrics in watcher.told]
    assert all({"reward/mean", "train/loss", "time/iteration", "rollout/length_p99"} <= set(each) for each in told)
    assert [each["mine/longest"] for each in told] == watcher.longest
    assert ["val/accuracy" in each for each in told] == [False, True, False]
    assert len({each["train/grad_norm"] for each in told}) == 3


def test_a_plain_callback_finds_the_metrics_of_the_iteration_that_ends(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher()
    run(watcher, paths)
    for found, (_, told) in zip(watcher.found, watcher.told, strict=True):
        assert {name: found[name] for name in told} == pytest.approx(told)


def test_a_run_that_is_told_to_stop_ends_with_the_iteration_it_was_told_in(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher(stop_after=2)
    trainer = run(watcher, paths, max_epochs=5)
    assert [iteration for iteration, _ in watcher.told] == [1, 2]
    assert trainer.current_epoch == 2


def test_early_stopping_sees_a_metric_of_the_iteration(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher()
    stopping = EarlyStopping("mine/longest", stopping_threshold=0.0, mode="max", check_on_train_epoch_end=True)
    run(watcher, paths, stopping)
    assert [iteration for iteration, _ in watcher.told] == [1]


def test_an_iteration_that_fails_is_not_told(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher(fail_in=2)
    with pytest.raises(ZeroDivisionError):
        run(watcher, paths)
    assert [iteration for iteration, _ in watcher.told] == [1]


@pytest.mark.slow
def test_a_checkpoint_is_written_after_the_iteration_was_told_and_a_resumed_run_tells_the_next(
    paths: tuple[str, str, Path],
) -> None:
    checkpoints = ModelCheckpoint(paths[2], "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(Watcher(), paths, checkpoints, enable_checkpointing=True)
    path = str(paths[2] / "epoch=1.ckpt")
    assert torch.load(path, weights_only=True)["callbacks"]["Watcher"] == {"told": [1, 2]}
    resumed = Watcher()
    run(resumed, paths, ckpt=path)
    assert resumed.loaded == [1, 2]
    assert [iteration for iteration, _ in resumed.told] == [3]


def test_a_logger_has_one_row_an_iteration_and_one_a_validation(paths: tuple[str, str, Path]) -> None:
    run(Watcher(), paths, logger=CSVLogger(paths[2], name="csv", flush_logs_every_n_steps=1))
    lines = (paths[2] / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["step"], bool(row["val/accuracy"]), bool(row["mine/longest"])) for row in rows] == [
        ("0", False, True),
        ("1", True, False),
        ("1", False, True),
        ("2", False, True),
    ]


def test_the_step_in_a_checkpoints_name_is_the_optimizers(paths: tuple[str, str, Path]) -> None:
    checkpoints = ModelCheckpoint(paths[2], "{epoch}-{step}", save_top_k=-1, save_on_train_epoch_end=True)
    run(Watcher(), paths, checkpoints, enable_checkpointing=True, limit_val_batches=0)
    names = {path.name for path in paths[2].glob("*.ckpt")}
    assert names == {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt"}


class MaskTruncated(RolloutCallback):
    """Takes responses that were cut off out of the loss, as docs/objectives.md says."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.learned_from: list[float] = []

    def on_rollout_scored(self, trainer: Any, pl_module: Any, batch: Any) -> None:
        batch.response_mask[batch.truncated] = 0
        self.finished.append(int((~batch.truncated).sum()))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.learned_from.append(batch[0].num_loss_sequences)


def test_a_callback_takes_truncated_responses_out_of_the_loss(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    callback, data = MaskTruncated(), make_data(prompts_path, num_minibatches=1)
    make_trainer(tmp_path, callback, max_epochs=1).fit(make_module(policy_path), data)
    (num_finished,) = callback.finished
    assert callback.learned_from == [num_finished]
    assert 0 < num_finished < 16


class Adds(RLModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("mine/step", 1.0)

    def on_train_start(self) -> None:
        with torch.no_grad():
            [RLModule.on_train_start(self) for _ in range(1)]

    def configure_optimizers(self) -> Any:  # may take the place of the module's own
        assert self.policy is not None
        return torch.optim.SGD(self.policy.parameters(), lr=0.1)


def test_a_module_that_adds_to_what_a_run_needs_runs(paths: tuple[str, str, Path]) -> None:
    policy_path, prompts_path, root = paths
    trainer = make_trainer(root, max_epochs=1)
    trainer.fit(Adds(policy_path, GRPO()), make_data(prompts_path))
    assert {"mine/step", "train/loss"} <= trainer.callback_metrics.keys()
