"""What a run replaces inside Lightning is put back at its end, also of one that failed."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conftest import Paths
from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import RolloutCallback
from tlt_lightning.guard.lightning_patches import PATCHES

NAMES = {patch.attribute.partition(".")[2] for patch in PATCHES}


def replaced(trainer: Any) -> set[str]:
    owners = (*trainer.checkpoint_callbacks, trainer._signal_connector, trainer.strategy)
    return {name for owner in owners for name in vars(owner) if name in NAMES | {"barrier"}}


class FailOnce(RolloutCallback):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_rollout_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen, before = replaced(trainer), self.seen
        if not before:
            raise InterruptedError


def test_a_fit_leaves_lightning_as_it_was_and_another_replaces_it_again(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data, failing = make_module(policy_path), make_data(prompts_path), FailOnce()
    saver = ModelCheckpoint(root, "{epoch}")
    trainer = make_trainer(root, saver, failing, enable_checkpointing=True, max_epochs=1)
    with pytest.raises(InterruptedError):
        trainer.fit(module, data)
    assert replaced(trainer) == {"barrier"}  # to which others of its ranks may not come, until the next run
    trainer.fit(module, data)
    assert failing.seen == NAMES
    assert replaced(trainer) == set()
    left = {type(each).__name__ for each in trainer.callbacks}
    assert not left & {"RunGuard", "CloseIteration", "Requeue"}
    assert not trainer.fit_loop.min_epochs  # 0 is of Lightning
    assert [path.name for path in root.glob("*.ckpt")] == ["epoch=0.ckpt"]
