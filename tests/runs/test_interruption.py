"""Runs that Ctrl-C or SIGTERM ends: what they save, what they say, and that a resumed one goes on exactly."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.conftest import Paths
from tests.environments.test_runs import Counting
from tests.support.rl_runs import make_data, make_module, make_trainer, weights
from tlt_lightning import RolloutCallback, Sampling
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.callbacks.run_report import RunReport
from tlt_lightning.engine import TransformersEngine
from tlt_lightning.environments.limits import TurnLimits

pytestmark = pytest.mark.slow

STEPS = 2  # optimizer steps an iteration


class Signal(RolloutCallback):
    """Sends this process a signal in the third iteration, when a hook is called for the n-th time."""

    def __init__(self, number: int, hook: str, count: int) -> None:
        self.number, self.hook, self.left = number, hook, count

    def _count(self, trainer: L.Trainer, hook: str) -> None:
        if hook == self.hook and trainer.current_epoch == 2:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.number)

    def on_rollout_start(self, trainer: Any, *_: Any) -> None:
        self._count(trainer, "start")

    def on_rollout_progress(self, trainer: Any, *_: Any) -> None:
        self._count(trainer, "progress" if trainer.training else "validation")

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self._count(trainer, "update")


def run(paths: Paths, *callbacks: L.Callback, ckpt: Path | None = None, every_minutes: float = 99.0) -> Any:
    L.seed_everything(11)
    policy_path, prompts_path, root = paths
    checkpoints = IterationCheckpoint(str(root / "checkpoints"), every_minutes)
    report = RunReport(str(root / "report"))
    settings = {"max_epochs": 4, "limit_val_batches": 1.0, "check_val_every_n_epoch": 3, "enable_checkpointing": True}
    trainer = make_trainer(root, *callbacks, checkpoints, report, **settings)
    module = make_module(policy_path)
    trainer.fit(module, make_data(prompts_path, TransformersEngine(batch_size=8)), ckpt_path=ckpt)
    return weights(module), trainer


@pytest.fixture(scope="module")
def whole(policy_path: str, prompts_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run((policy_path, prompts_path, tmp_path_factory.mktemp("whole")))[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("number", "hook", "saved"),
    [
        (signal.SIGINT, "progress", "interrupted.ckpt"),
        (signal.SIGTERM, "progress", "interrupted.ckpt"),
        (signal.SIGINT, "update", "epoch=2.ckpt"),  # once the update is over
        (signal.SIGTERM, "validation", "epoch=2.ckpt"),
    ],
)
def test_a_signal_saves_what_was_learned_and_the_resumed_run_equals_the_uninterrupted_one(
    number: int, hook: str, saved: str, whole: dict[str, torch.Tensor], paths: Paths, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit if number == signal.SIGINT else SIGTERMException):
        run(paths, Signal(number, hook, 1))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    said = capfd.readouterr()
    last = paths[2] / "checkpoints" / "last.ckpt"
    assert names(last.parent) == sorted(["epoch=0.ckpt", saved, "last.ckpt"])
    assert last.resolve().name == saved
    assert f"  checkpoint  {last} (after {2 if hook == 'progress' else 3} iterations)\n" in said.out
    assert f"  to go on    L.Trainer(...).fit(module, data, ckpt_path='{last}')\n" in said.out
    assert ("Ctrl-C again ends at once" in said.err) == (number == signal.SIGINT)
    resumed, trainer = run(paths, ckpt=last)
    assert trainer.global_step == 4 * STEPS
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert names(last.parent) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]


class Pondering(Counting):
    """Takes long for its second turn, amid which the run is told to end."""

    def step(self, text: str) -> str | None:
        if self.turns:
            ponder()
        return super().step(text)


def ponder(*_: Any) -> float:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(85)
    return 0.0


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("slow", ["reward", "environment"])
def test_a_run_ends_while_it_waits_for_rewards_and_environments(slow: str, waits: bool, paths: Paths) -> None:
    limits = TurnLimits(tokens=4, seconds=90, waits=waits)
    talk = {"rewards": [], "environment": Pondering, "turns": limits, "sampling": Sampling(max_tokens=24)}
    data = talk if slow == "environment" else {"rewards": [ponder], "reward_timeout": 90.0}
    started = time.monotonic()
    with pytest.raises(SIGTERMException):
        make_trainer(paths[2]).fit(make_module(paths[0]), make_data(paths[1], **data))
    assert time.monotonic() - started < 80


def test_nothing_is_saved_twice(paths: Paths, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(paths, Signal(signal.SIGINT, "start", 1), every_minutes=0.0)
    assert names(paths[2] / "checkpoints") == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert "last.ckpt (after 2 iterations)\n" in capfd.readouterr().out


def test_a_second_ctrl_c_ends_at_once_and_the_summary_says_what_the_last_checkpoint_holds(
    paths: Paths, capfd: pytest.CaptureFixture[str]
) -> None:
    class Impatient(Signal):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            super().on_before_optimizer_step(trainer)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
                raise AssertionError("gone on")

    with pytest.raises(SystemExit):
        run(paths, Impatient(signal.SIGINT, "update", 1))
    assert names(paths[2] / "checkpoints") == ["epoch=0.ckpt", "last.ckpt"]
    assert "last.ckpt (after 1 iteration)\n" in capfd.readouterr().out


def test_a_second_ctrl_c_ends_the_writing_of_the_checkpoint(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.save

    def interrupt(state: Any, file: Any) -> None:
        save(state, file)
        if "interrupted" in file.name:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(paths, Signal(signal.SIGINT, "progress", 1))
    assert names(paths[2] / "checkpoints") == ["epoch=0.ckpt", "last.ckpt"]


def test_a_last_checkpoint_for_which_the_disk_has_no_room_is_not_said_to_be_there(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    save = torch.save

    def fill_the_disk(state: Any, file: Any) -> None:
        if "epoch=3" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with caplog.at_level("INFO"), pytest.raises(RuntimeError, match="No space left on device"):
        run(paths)
    assert "To go on" not in caplog.text
    assert "last.ckpt (after 1 iteration)\n" in capfd.readouterr().out


def test_a_handler_that_was_there_is_left_alone(paths: Paths) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        _, trainer = run(paths, Signal(signal.SIGINT, "progress", 1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
    assert trainer.global_step == 4 * STEPS


class Failing(RolloutCallback):
    def on_iteration_end(self, trainer: Any, pl_module: Any, iteration: int, metrics: dict[str, float]) -> None:
        if iteration == 3:
            raise OSError("the tracker does not answer")


def test_an_error_behind_an_iteration_loses_none_of_it(whole: dict[str, torch.Tensor], paths: Paths) -> None:
    with pytest.raises(OSError, match="tracker"):
        run(paths, Failing())
    last = paths[2] / "checkpoints" / "last.ckpt"
    assert last.resolve().name == "interrupted.ckpt"
    resumed, trainer = run(paths, ckpt=last)
    assert trainer.global_step == 4 * STEPS
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_an_update_that_breaks_the_policy_is_not_saved(paths: Paths) -> None:
    class Broken(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                next(pl_module.policy.parameters()).data.fill_(float("inf"))

    with pytest.raises(RuntimeError, match="has broken the policy"):
        run(paths, Broken())
    assert names(paths[2] / "checkpoints") == ["epoch=0.ckpt", "last.ckpt"]
