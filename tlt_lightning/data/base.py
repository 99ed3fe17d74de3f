"""Say what all data modules of a policy have: an epoch's optimizer steps, in micro-batches, and an end in order."""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.data.loader import RolloutLoader
from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.module import RLModule
from tlt_lightning.ranks.liveness import Liveness
from tlt_lightning.ranks.reduce import sum_over_ranks
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.training.fsdp2 import largest_counts
from tlt_lightning.training.micro_batches import cut_alike
from tlt_lightning.training.networks import Networks

log = logging.getLogger(__name__)


def cut_steps(
    trainer: L.Trainer, networks: Networks, batch: RolloutBatch, steps: Sequence[Tensor], max_tokens: int
) -> Iterator[list[RolloutBatch]]:
    """Yield the micro-batches of each step, with the step's counts over all ranks, by which losses divide.

    Args:
        trainer: The run's Trainer; its ranks cut alike where each pass is a collective.
        networks: Read the batch.
        batch: All sequences of this rank.
        steps: Row numbers of each step's sequences.
        max_tokens: Most tokens of a micro-batch.
    """
    alike = largest_counts(trainer)
    plan = cut_alike(steps, batch.lengths, max_tokens, is_padded=networks.is_padded, largest_counts=alike)
    counts = sum_over_ranks(trainer, torch.tensor([batch.count_loss(rows.tolist()) for rows in steps]))
    for step, (num_tokens, num_sequences) in zip(plan, counts.tolist(), strict=True):
        yield [
            replace(
                batch.select(rows),
                num_loss_tokens=num_tokens,
                num_loss_sequences=num_sequences,
                num_shares=trainer.world_size,
            )
            for rows in step
        ]


class PolicyDataModule(L.LightningDataModule):
    """Gives an `RLModule` the micro-batches of its optimizer steps, epoch by epoch; the base of such data modules."""

    engine: RolloutEngine | None = None
    """Writes the texts; None where they are given."""

    has_rewards: bool = False
    """True if what is written is judged, by functions or by an environment."""

    liveness: Liveness | None = None
    """Watches the other ranks, from `setup` to `close`."""

    __str__ = object.__repr__  # Lightning's iterates over the loaders, and these roll out

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Optimizer steps of an epoch; known after `setup`."""

    @abstractmethod
    def train_batches(self) -> Iterator[list[RolloutBatch]]:
        """Yield the micro-batches of each of an epoch's optimizer steps on this rank."""

    @override
    def train_dataloader(self) -> RolloutLoader[list[RolloutBatch]]:
        # What logs by steps does so once an epoch at least, be there 50 steps or one.
        self._trainer.log_every_n_steps = min(self._trainer.log_every_n_steps, self.num_steps)  # type: ignore[attr-defined]
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
        """Take leave of the other ranks, and free what the run has taken; safe to call twice."""
        if self.liveness is not None:
            self.liveness.close()

    @property
    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None, "the data module is not attached to a Trainer"
        return self.trainer

    @property
    def _module(self) -> RLModule:
        return cast("RLModule", self._trainer.lightning_module)
