"""Hold the drafter that learns from the states of a policy's passes: its trainer, its published weights, its state."""

import logging
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from tlt_lightning.arguments import text_of
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import check_num_tokens
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.guard.parts import OWN
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.checkpoint import from_checkpoint, to_checkpoint
from tlt_lightning.long_tail.publishing import DrafterPublisher
from tlt_lightning.long_tail.trainer import DrafterTrainer
from tlt_lightning.ranks.reduce import sum_over_ranks
from tlt_lightning.training.memory.optimizer_state import training_bytes
from tlt_lightning.training.resume import begins_run

log = logging.getLogger(__name__)


class DrafterCallback(RolloutCallback):
    """Trains a drafter beside the policy; derived classes say when, and build it before the device is full.

    Their arguments of the same names are described there.
    """

    data: ClassVar[str]
    """The data module whose hook builds the drafter."""

    training: DrafterTrainer
    """Trainer of the drafter, from `setup` on."""

    publisher: DrafterPublisher
    """Keeper of the published weights, which decides on new ones, from `setup` on."""

    def __init__(self, drafter: DrafterModule, pack_tokens: int, buffer_gib: float, dirpath: str | None) -> None:
        check_num_tokens(pack_tokens, "pack_tokens")
        self.drafter = drafter
        self.buffer = DrafterBuffer(int(buffer_gib * 2**30))
        self.pack_tokens = pack_tokens
        self.dirpath = None if dirpath is None else Path(text_of("dirpath", dirpath, "Give a folder."))

    def count_memory(self, pl_module: Any) -> None:
        """Tell the forecast of memory what training the drafter, which is built, will take."""
        pl_module.callback_bytes["drafter, trained"] = training_bytes(self.drafter, self.drafter.optimizer)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.drafter.head is None:
            raise MisconfigurationException(f"`{type(self).__name__}` needs a `{self.data}`.")
        if not hasattr(self, "training"):
            self.training = DrafterTrainer(
                self.drafter,
                self.buffer,
                pack_tokens=self.pack_tokens,
                device=trainer.strategy.root_device,
                num_ranks=trainer.world_size,
            )
            self.publisher = DrafterPublisher(self.training, self.expected_speedup)
        self.training.sum_over_ranks = partial(sum_over_ranks, trainer)
        if begins_run(trainer):
            self.publisher.forget_policy()

    def expected_speedup(self, quality: DraftQuality) -> float | None:
        """Return how many times as fast as plainly such a head makes decoding; None if that is not known."""
        return None

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.drafter.refresh_target(pl_module.policy)
        self.publisher.publish_if_better()
        if trainer.is_global_zero:
            self.publisher.export(self.folder(trainer))

    def folder(self, trainer: L.Trainer) -> Path:
        """Return where heads go."""
        return self.dirpath or Path(trainer.default_root_dir) / "drafter"

    @override
    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.hidden_state_request = None
        pl_module.callback_bytes.pop("drafter, trained", None)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "training"):
            return {}
        return {
            "trainer": self.training.state_dict(),
            "publisher": self.publisher.state_dict(),
            "vocabulary": self.drafter.vocabulary,
            "layer_ids": list(self.drafter.layer_ids),
            "head": self.drafter.origin,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.drafter.begins_from(began := state_dict.get("head", self.drafter.origin)):
            message = "The drafter begins anew from `drafter.head` %s: the checkpoint's began from %s; %s."
            log.warning(message, self.drafter.origin[0], began[0], "give that to go on with what it has learned")
            return
        self.drafter.check_layers(state_dict["layer_ids"])
        if (vocabulary := state_dict["vocabulary"]) is not None:
            self.drafter.load_vocabulary(vocabulary)
        self.training.load_state_dict(state_dict["trainer"])
        self.publisher.load_state_dict(state_dict["publisher"])

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if state := checkpoint["callbacks"].get(self.state_key):
            checkpoint.setdefault(OWN, {})[self.state_key] = to_checkpoint(
                state, trainer.global_rank, trainer.world_size
            )

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if state := checkpoint["callbacks"].get(self.state_key):
            own = checkpoint[OWN][self.state_key]
            checkpoint["callbacks"][self.state_key] = from_checkpoint(state, own, trainer.global_rank)
