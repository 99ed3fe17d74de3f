"""Runs that are saved before an update, stopped within an iteration, or resumed with other settings."""

import itertools
import logging
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.plugins.environments import SLURMEnvironment

from tests.conftest import Paths, save_policy
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer, weights
from tlt_lightning import LoRA, RLModule, RolloutCallback, Sampling, TailBatching
from tlt_lightning.objectives import GRPO
from tlt_lightning.objectives.kl import KLPenalty
from tlt_lightning.training import optimization

pytestmark = pytest.mark.slow

STEPS = 4  # optimizer steps an iteration: two passes over two steps


class SaveAt(RolloutCallback):
    """Saves a checkpoint in the second iteration when a hook is called for the n-th time."""

    def __init__(self, path: Path, hook: str, number: int) -> None:
        self.path, self.hook, self.left = path, hook, number

    def _count(self, trainer: L.Trainer, hook: str) -> None:
        if hook == self.hook and trainer.current_epoch == 1 and not trainer.sanity_checking:
            self.left -= 1
            if self.left == 0:
                trainer.save_checkpoint(self.path)

    def on_rollout_progress(self, trainer: Any, *_: Any) -> None:
        self._count(trainer, "progress" if trainer.training else "validation")

    def on_rollout_scored(self, trainer: Any, *_: Any) -> None:
        self._count(trainer, "scored")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._count(trainer, "batch")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._count(trainer, "validated")


class History(RolloutCallback):
    """Keeps the metrics of each iteration, but for times."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_iteration_end(self, trainer: Any, pl_module: Any, iteration: int, metrics: dict[str, float]) -> None:
        clocks = ("time/", "rollout/seconds", "rollout/tokens_per_s", "rollout/tail", "train/tokens_per_s")
        clocks = (*clocks, "speculation/tokens_per_s", "speculation/switches")  # a new engine's first step is off
        self.rows[iteration] = {name: value for name, value in metrics.items() if not name.startswith(clocks)}


def run(
    paths: Paths, *callbacks: L.Callback, ckpt: Path | None = None, module: dict[str, Any] | None = None, **other: Any
) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, float]], L.Trainer]:
    L.seed_everything(11)
    policy_path, prompts_path, root = paths
    data_settings = other.pop("data", {})
    history = History()
    settings = {"max_epochs": 3, "limit_val_batches": 1.0, "check_val_every_n_epoch": 2, **other}
    trainer = make_trainer(root, history, *callbacks, **settings)
    policy = make_module(policy_path, **(module or {}))
    trainer.fit(policy, make_data(prompts_path, **{"inner_epochs": 2, **data_settings}), ckpt_path=ckpt)
    return weights(policy), history.rows, trainer


BEFORE_THE_UPDATE = [("progress", 1), ("scored", 1)]
WITHIN_IT = [("batch", 1), ("batch", 4), ("validation", 1), ("validated", 1)]


@pytest.fixture(scope="module")
def uninterrupted(policy_path: str, prompts_path: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run that is saved at all moments: its folder, weights and metrics."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    moments = [*BEFORE_THE_UPDATE, *WITHIN_IT]
    saves = [SaveAt(folder / f"{hook}{number}.ckpt", hook, number) for hook, number in moments]
    whole, history, _ = run((policy_path, prompts_path, folder), *saves)
    return folder, whole, history


def test_a_fused_optimizer_goes_on_from_one_that_was_not(
    uninterrupted: Any, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimization, "fuse_on_gpu", optimization.fuse_adam)
    folder, whole, _ = uninterrupted
    moved, _, trainer = run(paths, ckpt=folder / "scored1.ckpt")
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["fused"] is True
    assert {int(state["step"]) for state in optimizer.state.values()} == {3 * STEPS}
    assert moved.keys() == whole.keys()


@pytest.mark.parametrize(("hook", "number"), BEFORE_THE_UPDATE)
def test_a_run_that_was_saved_before_an_update_repeats_the_iteration_exactly(
    hook: str, number: int, uninterrupted: Any, paths: Paths
) -> None:
    folder, whole, history = uninterrupted
    resumed, rest, trainer = run(paths, ckpt=folder / f"{hook}{number}.ckpt")
    assert trainer.global_step == 3 * STEPS
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    assert set(rest) == {2, 3}
    for iteration, metrics in rest.items():
        assert metrics == pytest.approx(history[iteration])


@pytest.mark.parametrize(("hook", "number"), WITHIN_IT)
def test_no_run_goes_on_from_amid_an_update(hook: str, number: int, uninterrupted: Any, paths: Paths) -> None:
    with pytest.raises(ValueError, match="`ckpt_path` was saved amid an iteration's update"):
        run(paths, ckpt=uninterrupted[0] / f"{hook}{number}.ckpt")


def test_a_run_told_to_stop_within_an_iteration_finishes_it(paths: Paths) -> None:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.should_stop = True  # as `Trainer(max_time)` does

    checkpoints = ModelCheckpoint(paths[2], "{epoch}", save_top_k=-1)
    whole, _, _ = run(paths)
    _, history, trainer = run(paths, Stop(), checkpoints, enable_checkpointing=True)
    assert trainer.global_step == 2 * STEPS
    assert set(history) == {1, 2}
    resumed, _, _ = run(paths, ckpt=paths[2] / "epoch=1.ckpt")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def checkpoint_of(paths: Paths, **settings: Any) -> Path:
    checkpoints = ModelCheckpoint(paths[2], "first", save_top_k=-1, save_on_train_epoch_end=True)
    run(paths, checkpoints, max_epochs=1, enable_checkpointing=True, **settings)
    return paths[2] / "first.ckpt"


@pytest.mark.parametrize("number", [5, 8])
def test_a_requeue_amid_an_update_waits_for_the_next_rollout_and_resumes_exactly(
    number: int, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "1")

    def build(signalled: bool) -> dict[str, Any]:
        def optimizer(groups: Any) -> torch.optim.Optimizer:
            adam, steps = torch.optim.AdamW(groups, lr=3e-3), itertools.count(1)
            if signalled:
                adam.register_step_post_hook(
                    lambda *_: os.kill(os.getpid(), signal.SIGUSR1) if next(steps) == number else None
                )
            return adam

        return {"optimizer": optimizer}

    plugin = SLURMEnvironment(auto_requeue=True)
    whole, _, _ = run(paths, module=build(True), plugins=[plugin])
    saved = paths[2] / "hpc_ckpt_1.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == 2 * STEPS
    monkeypatch.delenv("SLURM_JOB_ID")
    resumed, _, _ = run(paths, module=build(False), ckpt=saved)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_requeue_before_a_resumed_run_has_gone_on_resumes_exactly(
    uninterrupted: Any, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Preempted(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    folder, whole, _ = uninterrupted
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    run(paths, Preempted(), ckpt=folder / "scored1.ckpt", plugins=[SLURMEnvironment(auto_requeue=True)])
    monkeypatch.delenv("SLURM_JOB_ID")
    resumed, _, trainer = run(paths, ckpt=paths[2] / "hpc_ckpt_1.ckpt")
    assert trainer.global_step == 3 * STEPS
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_resumed_run_that_is_saved_before_it_has_gone_on_resumes_exactly(uninterrupted: Any, paths: Paths) -> None:
    class Interrupted(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(path)
            raise RuntimeError("too early")

    (folder, whole, history), path = uninterrupted, paths[2] / "again.ckpt"
    with pytest.raises(RuntimeError, match="too early"):
        run(paths, Interrupted(), ckpt=folder / "scored1.ckpt")
    resumed, rest, trainer = run(paths, ckpt=path)
    assert trainer.global_step == 3 * STEPS
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert rest == {iteration: pytest.approx(history[iteration]) for iteration in (2, 3)}


@pytest.mark.parametrize("scheduled", [False, True])
def test_another_learning_rate_on_resume_is_used_and_said(
    scheduled: bool, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    def settings(lr: float) -> dict[str, Any]:
        halving = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)  # noqa: E731
        return {
            "optimizer": lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=lr, betas=(0.9, 1 - lr)),
            "lr_scheduler": halving if scheduled else None,
        }

    path = checkpoint_of(paths, module=settings(3e-3))
    same, _, _ = run(paths, module=settings(3e-3), ckpt=path)
    assert "Resumed with" not in caplog.text
    with caplog.at_level(logging.WARNING):
        other, _, trainer = run(paths, module=settings(3e-4), ckpt=path)
    assert "another `lr` of the optimizer: 0.0003 instead of 0.003" in caplog.text
    group = trainer.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(3e-4 * (0.5 ** (3 * STEPS) if scheduled else 1))
    assert (group["weight_decay"], group["betas"]) == (3e-4, (0.9, 1 - 3e-4))
    assert not all(torch.equal(tensor, other[name]) for name, tensor in same.items())


LINEAR = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=6)
ONE_CYCLE = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-3, total_steps=12)  # it moves betas, too


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, LINEAR),
        (LINEAR, None),
        (LINEAR, partial(LINEAR, total_iters=12)),
        (LINEAR, ONE_CYCLE),
        (ONE_CYCLE, None),
        (LINEAR, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))),
        (lambda optimizer: LINEAR(optimizer), lambda optimizer: LINEAR(optimizer, total_iters=12)),
    ],
)
def test_another_scheduler_on_resume_goes_on_as_if_it_had_been_there(
    before: Any, after: Any, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    def settings(scheduler: Any, lr: float) -> dict[str, Any]:
        return {"optimizer": partial(torch.optim.AdamW, lr=lr), "lr_scheduler": scheduler}

    path = checkpoint_of(paths, module=settings(before, 3e-3))
    _, whole, uninterrupted = run(paths, module=settings(after, 1e-3))
    _, resumed, trainer = run(paths, module=settings(after, 1e-3), ckpt=path)
    rates = {iteration: metrics["train/lr"] for iteration, metrics in resumed.items()}
    assert rates == {iteration: pytest.approx(whole[iteration]["train/lr"]) for iteration in rates}
    assert len(rates) == 2
    betas, expected = (each.optimizers[0].param_groups[0]["betas"] for each in (trainer, uninterrupted))
    assert betas == pytest.approx(expected)
    assert "model.lr_scheduler" in caplog.text or "<lambda>" in str(before)  # two have one name


class OwnOptimizer(RLModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": self.lr_scheduler(optimizer), "interval": "step"}]


def test_an_optimizer_of_one_s_own_resumes_with_its_own_scheduler(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "make_module", OwnOptimizer)
    scheduler = {"lr_scheduler": lambda optimizer: LINEAR(optimizer)}
    path = checkpoint_of(paths, module=scheduler)
    whole, _, _ = run(paths, module=scheduler)
    for own in (scheduler, {"lr_scheduler": LINEAR}):  # another, for all that is known
        resumed, _, _ = run(paths, module=own, ckpt=path)
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


class OwnRate(RLModule):
    LR = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.LR)


def test_an_optimizer_of_one_s_own_resumes_with_its_own_rate(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(globals(), "make_module", OwnRate)
    path = checkpoint_of(paths)
    monkeypatch.setattr(OwnRate, "LR", 1e-5)
    _, _, trainer = run(paths, ckpt=path)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-5
    assert "another `lr` of the optimizer: 1e-05 instead of 0.001" in caplog.text


def test_a_setting_that_was_left_to_the_optimizer_is_used_on_resume(
    paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    adam = partial(torch.optim.AdamW, lr=1e-3)
    path = checkpoint_of(paths, module={"optimizer": adam})
    _, _, trainer = run(paths, ckpt=path, module={"optimizer": partial(adam, foreach=False)})
    assert trainer.optimizers[0].param_groups[0]["foreach"] is False
    assert "another `foreach` of the optimizer: False instead of None" in caplog.text


def test_a_plateau_that_a_function_builds_has_its_own_settings_on_resume_and_what_it_has_seen(paths: Paths) -> None:
    def settings(factor: float, patience: int) -> dict[str, Any]:
        rule: dict[str, Any] = {"mode": "max", "threshold_mode": "abs", "threshold": 10.0, "monitor": "reward/mean"}
        plateau = lambda optimizer: ReduceLROnPlateau(optimizer, factor=factor, patience=patience, **rule)  # noqa: E731
        return {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "lr_scheduler": plateau}

    checkpoints = ModelCheckpoint(paths[2], "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(paths, checkpoints, module=settings(0.5, 9), max_epochs=3, enable_checkpointing=True)
    # The first iteration is the best, for nothing is better by ten: two others are more than one, which is borne.
    for done, rates in ((1, [1e-3, 1e-3, 1e-4]), (2, [1e-3, 1e-4]), (3, [1e-4])):
        ckpt = paths[2] / f"epoch={done - 1}.ckpt"
        _, history, trainer = run(paths, module=settings(0.1, 1), ckpt=ckpt, max_epochs=4)
        assert [metrics["train/lr"] for metrics in history.values()] == pytest.approx(rates)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert (scheduler.factor, scheduler.patience) == (0.1, 1)


def test_a_plateau_sees_each_iteration_once_however_often_the_run_is_resumed(paths: Paths) -> None:
    class Saves(RolloutCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(paths[2] / f"{self.name} early.ckpt")

        def on_rollout_progress(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(paths[2] / f"{self.name} late.ckpt")

    rule = {"monitor": "reward/mean", "mode": "max", "threshold_mode": "abs", "threshold": 10.0, "patience": 1}
    module = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "lr_scheduler": partial(ReduceLROnPlateau, **rule)}
    checkpoints = ModelCheckpoint(paths[2], "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(paths, Saves("whole"), checkpoints, module=module, max_epochs=3, enable_checkpointing=True)
    run(paths, Saves("resumed"), module=module, ckpt=paths[2] / "epoch=1.ckpt", max_epochs=3)
    for name in ("whole late", "resumed early", "resumed late"):
        _, history, _ = run(paths, module=module, ckpt=paths[2] / f"{name}.ckpt", max_epochs=5)
        assert [metrics["train/lr"] for metrics in history.values()] == pytest.approx([1e-3, 1e-4, 1e-4])


def test_a_run_that_was_stopped_early_goes_on_with_more_patience(paths: Paths) -> None:
    def stop(patience: int) -> EarlyStopping:
        return EarlyStopping("reward/mean", mode="max", min_delta=10.0, patience=patience)

    checkpoints = ModelCheckpoint(paths[2], "stopped", save_top_k=-1, save_on_train_epoch_end=True)
    _, _, trainer = run(paths, stop(1), checkpoints, max_epochs=8, enable_checkpointing=True)
    assert trainer.current_epoch == 2
    _, history, _ = run(paths, stop(4), max_epochs=8, ckpt=paths[2] / "stopped.ckpt")
    assert list(history) == [3, 4, 5]


def test_another_policy_on_resume_is_named(paths: Paths, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint_of(paths)
    other = shutil.copytree(paths[0], paths[2] / "other")
    run((str(other), *paths[1:]), ckpt=path)
    assert f"model.policy was {paths[0]} and is {other}" in caplog.text


@pytest.mark.parametrize("kept", ["policy", "reference", None])
def test_other_weights_that_no_checkpoint_holds_are_named_on_resume(
    kept: str | None, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_policy(paths[2] / "policy")
    penalized = GRPO(loss_kl=KLPenalty(coef=0.1))
    module: dict[str, Any] = {
        "policy": {"lora": LoRA(rank=4)},
        "reference": {"objective": penalized, "reference": str(folder)},
        None: {},
    }[kept]
    places = (paths[0] if kept == "reference" else str(folder), *paths[1:])
    path = checkpoint_of(places, module=module)
    (folder / "training_args.bin").write_bytes(b"no weights")
    with caplog.at_level(logging.WARNING):
        run(places, ckpt=path, module=module, max_epochs=1)
        assert "goes on otherwise" not in caplog.text
        save_policy(folder, seed=1)
        run(places, ckpt=path, module=module, max_epochs=1)
    assert (f"checksum of the weights of model.{kept} was" in caplog.text) is (kept is not None)


def test_states_of_8_bits_resume_exactly_with_rates_that_are_tensors(
    paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    from torchao.optim import AdamW8bit  # seconds to import

    def settings(lr: float) -> dict[str, Any]:
        return {"optimizer": lambda groups: AdamW8bit(groups, lr=lr)}

    path = paths[2] / "within.ckpt"
    with torch.compiler.set_stance("force_eager"):  # its compiled step takes half a minute to make
        whole, _, trainer = run(paths, SaveAt(path, "scored", 1), module=settings(3e-3))
        resumed, _, _ = run(paths, module=settings(3e-3), ckpt=path)
        states = [type(each["exp_avg"]).__name__ for each in trainer.optimizers[0].state.values()]
        assert "OptimState8bit" in states
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
        assert "Resumed with" not in caplog.text
        _, _, trainer = run(paths, module=settings(3e-4), ckpt=path)
    assert "another `lr` of the optimizer: 0.0003 instead of 0.003" in caplog.text
    assert trainer.optimizers[0].param_groups[0]["lr"].item() == pytest.approx(3e-4)


def test_settings_that_change_what_comes_are_named_on_resume(paths: Paths, caplog: pytest.LogCaptureFixture) -> None:
    usual = {"objective": None}
    path = checkpoint_of(paths, module=usual)
    with caplog.at_level(logging.WARNING):
        run(paths, ckpt=path, module=usual)
        assert "goes on otherwise" not in caplog.text
        run(paths, ckpt=path, data={"group_size": 8, "sampling": Sampling(max_tokens=8, temperature=0.5)})
    assert "data.group_size was 4 and is 8" in caplog.text
    assert "data.sampling.temperature was 1.0 and is 0.5." in caplog.text
    assert "prompts" not in caplog.text


def test_other_prompts_are_named_on_resume_and_take_nothing_of_those_before(
    paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    known: list[dict[int, float]] = []

    class Known(RolloutCallback):
        def on_rollout_start(self, trainer: Any, *_: Any) -> None:
            known.append(trainer.datamodule.answer_lengths.means)

    data = {"schedule": TailBatching(1.0)}
    path = checkpoint_of(paths, data=data)
    other = paths[2] / "other.jsonl"
    other.write_text("".join(line + "\n" for line in reversed(Path(paths[1]).read_text().splitlines())))
    with caplog.at_level(logging.WARNING):
        _, history, _ = run((paths[0], str(other), paths[2]), Known(), ckpt=path, data=data)
    assert known[0] == {}
    assert history[2]["schedule/deferred"] == 4  # drawn anew
    assert "checksum of the training prompts was" in caplog.text
    assert "number of training prompts" not in caplog.text


def test_a_checkpoint_can_be_validated_by_a_run_of_another_size(paths: Paths) -> None:
    path = checkpoint_of(paths)
    trainer = make_trainer(paths[2], limit_val_batches=1.0)
    module = make_module(paths[0], objective=GRPO())
    (metrics,) = trainer.validate(module, make_data(paths[1], group_size=2), ckpt_path=path, verbose=False)
    assert set(metrics) >= {"val/accuracy", "val/reward", "val/length"}


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_killed_and_resumed_run_has_the_weights_of_the_uninterrupted_one(
    lora: LoRA | None, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    def checkpointing() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "checkpoints", filename="{epoch}", save_top_k=-1, every_n_epochs=1)

    class Kill(RolloutCallback):
        def on_rollout_progress(self, trainer, pl_module, progress):  # type: ignore[no-untyped-def]
            if trainer.current_epoch == 2:
                raise ZeroDivisionError("killed in the middle of the third rollout")

    def run(*callbacks: L.Callback, ckpt_path: Path | None = None) -> RLModule:
        L.seed_everything(11)
        module = make_module(policy_path, lora=lora)
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=4, enable_checkpointing=True)
        trainer.fit(module, make_data(prompts_path, inner_epochs=2), ckpt_path=ckpt_path)
        return module

    uninterrupted = weights(run(checkpointing()))
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(ZeroDivisionError):
        run(checkpointing(), Kill())
    recorder = Recorder()
    resumed = weights(run(checkpointing(), recorder, ckpt_path=tmp_path / "checkpoints" / "epoch=1.ckpt"))
    assert recorder.versions == [(8, {8}), (12, {12})]
    assert uninterrupted.keys() == resumed.keys()
    for name, tensor in uninterrupted.items():
        assert torch.equal(tensor, resumed[name]), name


def test_checkpoint_of_another_lora_is_refused(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, ModelCheckpoint(tmp_path, filename="last"), max_epochs=1, enable_checkpointing=True
    )
    trainer.fit(make_module(policy_path, lora=LoRA(rank=4)), make_data(prompts_path))
    other = make_module(policy_path, lora=LoRA(rank=8))
    with pytest.raises(ValueError, match="rank=4"):
        make_trainer(tmp_path).fit(other, make_data(prompts_path), ckpt_path=tmp_path / "last.ckpt")


def test_a_checkpoint_that_follows_a_validation_is_of_the_iterations_end(paths: Paths) -> None:
    best = ModelCheckpoint(paths[2], "{epoch}", "val/accuracy", mode="max", save_top_k=-1, save_last="link")
    whole, history, _ = run(paths, best, enable_checkpointing=True)
    assert sorted(path.name for path in paths[2].glob("*.ckpt")) == ["epoch=1.ckpt", "last.ckpt"]  # as it is validated
    resumed, rest, _ = run(paths, ckpt=paths[2] / "last.ckpt")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert rest == {3: pytest.approx(history[3])}
