"""Train a drafter along with supervised fine-tuning, so that a run that follows begins with a head that drafts."""

from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from typing_extensions import override

from tlt_lightning.arguments import Positive, checked
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.attach import check_drafter
from tlt_lightning.long_tail.base import DrafterCallback
from tlt_lightning.seeds import iteration_seed


class SupervisedDrafterCallback(DrafterCallback):
    """Trains a drafter on the texts that a policy imitates, by the states of the policy's own passes.

    After each optimizer step the drafter learns from that step's texts, but for a quarter of all texts, which judge it.
    Weights that draft these better are kept at the end of an epoch; `dirpath/final` holds the last.

    Args:
        drafter: Drafter to train, and its optimizer, as of `LongTailIdleCallback`.
        pack_tokens: Tokens of one training step of the drafter, a multiple of 128.
        buffer_gib: Host memory for the states of an optimizer step's texts, in GiB on each rank; some of every length
            are learned from if not all fit.
        passes: Passes over the texts of an optimizer step.
        dirpath: Where the head goes; None is `drafter` in the Trainer's `default_root_dir`.

    Example:
        >>> from tlt_lightning import DrafterModule
        >>> callback = SupervisedDrafterCallback(DrafterModule("Qwen/Qwen2.5-0.5B"))  # doctest: +SKIP
    """

    data: ClassVar[str] = "SupervisedDataModule"

    @checked()
    def __init__(
        self,
        drafter: DrafterModule,
        pack_tokens: int = 4096,
        buffer_gib: Positive = 1.0,
        passes: Positive = 1.0,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(drafter, pack_tokens, buffer_gib, dirpath)
        self.passes = passes

    @override
    def on_texts_read(self, trainer: L.Trainer, pl_module: Any, texts: Sequence[Sequence[int]]) -> None:
        """Build the drafter; a new one of a reduced vocabulary drafts the commonest tokens of all texts."""
        check_drafter(self.drafter, pl_module.policy_path)
        if self.drafter.needs_vocabulary:
            tokens = torch.tensor([token for ids in texts for token in ids])
            self.drafter.choose_vocabulary(tokens.bincount(minlength=self.drafter.target_config.vocab_size))
        self.drafter.configure_model()
        self.count_memory(pl_module)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        width = self.drafter.target_config.hidden_size
        pl_module.hidden_state_request = self.buffer.request(self.drafter.layer_ids, width, share=1.0, seed=0)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Keep what the epoch before has taught, if it drafts better."""
        pl_module.iteration_log.lap("other")
        self.drafter.refresh_target(pl_module.policy)  # a resumed run's drafter has read that of the beginning
        if (decision := self.publisher.publish_if_better()) is not None:
            pl_module.iteration_log.update(decision.metrics())
        pl_module.iteration_log.lap("drafter")

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.drafter.refresh_target(pl_module.policy)  # the states will be those of the policy before its step

    @override
    def on_hidden_states(self, trainer: L.Trainer, pl_module: Any, texts: Sequence[PolicyText]) -> None:
        self.buffer.add(texts, come_again=True)
        self.training.begin(iteration_seed(trainer, "drafter", trainer.global_step))
        if len(self.buffer):
            stretch = self.training.train(lambda: self.training.num_passes < self.passes)
            stretch.write(pl_module.iteration_log)
        pl_module.iteration_log.sum("drafter/tokens", self.training.num_seen)
        self.training.average()
        pl_module.iteration_log.lap("drafter")
