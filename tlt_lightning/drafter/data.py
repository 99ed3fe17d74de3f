"""Turn texts on disk, or on the hub, into training data of a drafter, pack by pack."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from tlt_lightning.arguments import Bound, CountOrZero, checked, text_of
from tlt_lightning.data.formats import RowReader, Text
from tlt_lightning.data.loader import ignore_needless_warnings
from tlt_lightning.data.rows import check_path
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import check_num_tokens
from tlt_lightning.drafter.texts.states import StateReader, load_target
from tlt_lightning.drafter.texts.stream import PackStream
from tlt_lightning.drafter.texts.texts import split_by_prompt, texts_in
from tlt_lightning.guard.callback import protect
from tlt_lightning.ranks.liveness import Liveness
from tlt_lightning.training.resume import warn_of_changes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DrafterDataModule(L.LightningDataModule):
    """Warms up a drafter offline, by `Trainer.fit`, on completions that `predict` wrote or on conversations.

    The answers should be the target's own: a head that learns another model's answers drafts for that model. No states
    are stored: the target runs over each text once an epoch, when its turn comes.

    Args:
        completions: A .jsonl, .json, .csv or .parquet file, a `datasets` folder or a hub dataset, or several of them. A
            row has `prompt_ids` and `response_ids` (as in `completions.jsonl`), `messages` (each with `role` and
            `content`), `conversations` (each with `from` and `value`), or `prompt` and `completion`. What `assistant`
            or `gpt` say is learned, as the target's chat template writes it.
        split: Split to read, or slices such as `train[:1000]`; a file is all `train`.
        config: Configuration of a hub dataset.
        num_tokens: Length of a pack, a multiple of 128; memory and time of a step grow with it.
        val_share: Share of the prompts held out, with all their responses, to measure acceptance on.
        seed: Seed of the held-out prompts and of the texts' order.

    Example:
        >>> import lightning as L
        >>> from tlt_lightning import DrafterDataModule, DrafterModule
        >>> data = DrafterDataModule("outputs/completions.jsonl")  # doctest: +SKIP
        >>> L.Trainer(max_epochs=3).fit(DrafterModule("Qwen/Qwen2.5-0.5B-Instruct"), data)  # doctest: +SKIP
    """

    @checked()
    def __init__(
        self,
        completions: str | list[str],
        split: str = "train",
        config: Annotated[str | None, "Leave it out, or give a text."] = None,
        num_tokens: int = 4096,
        val_share: Annotated[float, Bound(0, 1, excludes=(0, 1))] = 0.1,
        seed: CountOrZero = 0,
    ) -> None:
        super().__init__()
        check_num_tokens(num_tokens)
        given = completions if isinstance(completions, list | tuple) else [completions]
        remedy = "Give a file, a folder or a hub name, or a list of them."
        self.paths = [text_of("completions", path, remedy) for path in given]
        for path in self.paths:
            check_path(path, "completions")
        self.split, self.config = split, config
        self.num_tokens = num_tokens
        self.val_share = val_share
        self.seed = seed
        self.target: PreTrainedModel | None = None
        self.liveness: Liveness | None = None

    @property
    def _drafter(self) -> DrafterModule:
        return self.trainer.lightning_module  # type: ignore[union-attr,return-value]

    @override
    def setup(self, stage: str) -> None:
        if self.target is not None:
            return
        ignore_needless_warnings()
        strategy = self.trainer.strategy  # type: ignore[union-attr]
        if isinstance(strategy, ModelParallelStrategy):  # it adds up gradients of what is sharded alone
            raise MisconfigurationException(
                f"`strategy` {type(strategy).__name__} would leave the heads of ranks apart; use `ddp`."
            )
        self.liveness = Liveness(self.trainer)  # type: ignore[arg-type]
        protect(self.trainer)  # type: ignore[arg-type]
        config = self._drafter.target_config
        reader = RowReader(self._drafter.target, config.max_position_embeddings)
        texts, prompts = texts_in(self.paths, reader, config.vocab_size, self.config, self.split)
        parts = split_by_prompt(prompts, self.val_share, self.seed)
        self.train_texts, self.val_texts = ([texts[row] for row in part] for part in parts)
        is_mixed = self.trainer.precision != "32-true"  # type: ignore[union-attr]
        self.target = load_target(self._drafter.target, strategy.root_device, is_mixed=is_mixed)

    def token_counts(self) -> Tensor:
        """Count how often each token was written in the training texts, (V,)."""
        counts = torch.zeros(self._drafter.target_config.vocab_size, dtype=torch.long)
        for text in self.train_texts:
            counts += torch.bincount(torch.tensor(text.answers, dtype=torch.long), minlength=len(counts))
        return counts

    @override
    def train_dataloader(self) -> PackStream:
        return self._stream(self.train_texts, self._begin_epoch)

    def _begin_epoch(self) -> tuple[str, int]:
        trainer: Any = self.trainer
        epoch = 0 if trainer.overfit_batches else trainer.current_epoch  # the same packs come again
        return f"{self.seed} {epoch}", trainer.fit_loop.epoch_loop.batch_progress.current.ready

    @override
    def val_dataloader(self) -> PackStream:
        return self._stream(self.val_texts)

    def _stream(self, texts: list[Text], begin_epoch: Callable[[], tuple[str, int]] | None = None) -> PackStream:
        assert self.target is not None, "packs before `setup`"
        reader = StateReader(self.target, self._drafter.layer_ids, self.num_tokens)
        trainer: Any = self.trainer
        return PackStream(texts, reader, self.num_tokens, trainer.global_rank, trainer.world_size, begin_epoch)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"settings": self._kept_settings}

    @property
    def _kept_settings(self) -> dict[str, float]:
        """Settings that a resumed run must not change to read each text once, and none of those held out."""
        trainer: Any = self.trainer
        own = {f"data.{name}": getattr(self, name) for name in ("num_tokens", "val_share", "seed")}
        num_tokens = sum(len(text.ids) for text in self.train_texts)
        return {"number of workers": trainer.world_size, **own, "tokens of the training texts": num_tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is not None and self.trainer.state.fn == "fit":
            warn_of_changes(state_dict["settings"], self._kept_settings)

    @override
    def teardown(self, stage: str) -> None:
        self.target = None
        if self.liveness is not None:
            self.liveness.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.liveness is not None:
            self.liveness.report(exception)
            self.liveness.close()
