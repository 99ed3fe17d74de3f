"""Runs of the same objects one after another: a later one takes from an earlier one what it should and no more."""

from typing import Any

import pytest

from tests.conftest import Paths
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer
from tlt_lightning import RolloutCallback

pytestmark = pytest.mark.slow


class Fail(RolloutCallback):
    """Raises RuntimeError in an epoch, the second unless told otherwise, when a hook is called for the first time."""

    def __init__(self, hook: str, epoch: int = 1) -> None:
        self.hook, self.epoch = hook, epoch

    def _fail(self, trainer: Any, hook: str) -> None:
        if hook == self.hook and trainer.current_epoch == self.epoch:
            self.hook = ""
            raise RuntimeError("made to fail")

    def on_rollout_end(self, trainer: Any, *_: Any) -> None:
        self._fail(trainer, "rollout")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._fail(trainer, "update")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self._fail(trainer, "validation")


@pytest.mark.parametrize("hook", ["rollout", "update", "validation"])
def test_checkpoints_of_a_fit_after_one_that_failed_resume(hook: str, paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data = make_module(policy_path), make_data(prompts_path)
    trainer = make_trainer(root, Fail(hook), max_epochs=3, limit_val_batches=1.0)
    with pytest.raises(RuntimeError, match="made to fail"):
        trainer.fit(module, data)
    trainer.fit(module, data)
    trainer.save_checkpoint(root / "third.ckpt")
    recorder = Recorder()
    resumed = make_trainer(root, recorder, max_epochs=4, limit_val_batches=1.0)
    resumed.fit(make_module(policy_path), make_data(prompts_path), ckpt_path=root / "third.ckpt")
    assert recorder.calls.count("scored") == 1
    assert resumed.global_step == trainer.global_step + 2


def test_a_validation_after_one_that_failed_measures_its_own_responses_alone(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data = make_module(policy_path), make_data(prompts_path)
    trainer = make_trainer(root, limit_val_batches=1.0)
    whole = trainer.validate(module, data)
    failing = make_trainer(root, Fail("validation", epoch=0), limit_val_batches=1.0)
    with pytest.raises(RuntimeError, match="made to fail"):
        failing.validate(module, data)
    assert trainer.validate(module, data) == whole
    with pytest.raises(RuntimeError, match="made to fail"):
        make_trainer(root, Fail("validation", epoch=0), limit_val_batches=1.0).validate(module, data)
    trainer.fit(module, data)
