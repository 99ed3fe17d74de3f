import time
from pathlib import Path

import pytest

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.guard.callback import RunGuard
from tlt_lightning.hooks import RolloutCallback


class Clock(RolloutCallback):
    """Lets an iteration take four minutes, and notes the checkpoints that are there when the run has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int) -> None:
        self.now, self.stop_after = 1000.0, stop_after
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def on_iteration_end(self, trainer, pl_module, iteration, metrics):  # type: ignore[no-untyped-def]
        self.now += 240
        trainer.should_stop = iteration == self.stop_after


@pytest.mark.parametrize(
    ("every_minutes", "stop_after", "saved"),
    [(10.0, 0, [0, 3, 6, 7]), (8.0, 0, [0, 2, 4, 6, 7]), (10.0, 3, [0, 2]), (0.0, 0, list(range(8)))],
)
def test_it_saves_when_time_has_passed_and_at_the_end(
    every_minutes: float, stop_after: int, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = IterationCheckpoint(str(tmp_path / "all"), every_minutes, keep=100)
    callbacks = [RunGuard(), Clock(monkeypatch, stop_after), checkpoints]
    trainer = make_trainer(tmp_path, callbacks, max_epochs=8, enable_checkpointing=True, limit_val_batches=0)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == [*(f"epoch={epoch}.ckpt" for epoch in saved), "last.ckpt"]
    assert (tmp_path / "all" / "last.ckpt").resolve().name == f"epoch={saved[-1]}.ckpt"


def test_the_latest_are_kept(tmp_path: Path) -> None:
    checkpoints = IterationCheckpoint(str(tmp_path / "kept"), every_minutes=0.0, keep=2)
    trainer = make_trainer(tmp_path, [RunGuard(), checkpoints], enable_checkpointing=True, limit_val_batches=0)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]


@pytest.mark.parametrize("arguments", [{"every_minutes": -1.0}, {"keep": 0}])
def test_bad_arguments_name_themselves(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` must be at least"):
        IterationCheckpoint("checkpoints", **arguments)  # type: ignore[arg-type]
