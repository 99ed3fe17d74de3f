"""Say what all data modules of a policy have: an epoch's optimizer steps, and an end in order."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import lightning as L
from typing_extensions import override

from tlt_lightning.data.loader import RolloutLoader
from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.ranks.liveness import Liveness
from tlt_lightning.rollout import RolloutBatch

if TYPE_CHECKING:
    from tlt_lightning.module import RLModule

log = logging.getLogger(__name__)


class PolicyDataModule(L.LightningDataModule):
    """Gives an `RLModule` the micro-batches of its optimizer steps, epoch by epoch; the base of such data modules."""

    engine: RolloutEngine | None = None
    """Writes the texts; None where they are given."""

    has_rewards: bool = False
    """True if what is written is judged, by functions or by an environment."""

    liveness: Liveness | None = None
    """Watches the other workers, from `setup` to `close`."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Optimizer steps of an epoch; known after `setup`."""

    @abstractmethod
    def train_batches(self) -> Iterator[list[RolloutBatch]]:
        """Yield the micro-batches of each of an epoch's optimizer steps on this rank."""

    @override
    def train_dataloader(self) -> RolloutLoader[list[RolloutBatch]]:
        return RolloutLoader(self.num_steps, self.train_batches)

    @override
    def teardown(self, stage: str) -> None:
        self.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.liveness is not None:
            self.liveness.report(exception)
        try:
            self.close()  # Lightning runs no teardown after an exception
        except Exception:  # a broken device must not hide the error that broke it
            log.exception("The engine could not be closed after the error that ended the run.")

    def close(self) -> None:
        """Take leave of the other workers, and free what the run has taken; safe to call twice."""
        if self.liveness is not None:
            self.liveness.close()

    @property
    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None, "the data module is not attached to a Trainer"
        return self.trainer

    @property
    def _module(self) -> RLModule:
        return cast("RLModule", self._trainer.lightning_module)
