"""Turn texts on disk, or on the hub, into training data of a drafter, pack by pack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.data.rows import check_path
from tlt_lightning.drafter.packing import PackedBatch, Piece, check_num_tokens, fill_pack, plan_packs
from tlt_lightning.drafter.texts.formats import RowReader, Text
from tlt_lightning.drafter.texts.texts import Texts, split_by_prompt
from tlt_lightning.hidden_states import HiddenStateTap, PolicyText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tlt_lightning.drafter.module import DrafterModule

_PLANNED = 4096  # texts whose packs are planned together: the time grows with their square


class DrafterDataModule(L.LightningDataModule):
    """Warms up a drafter offline, by `Trainer.fit`, on completions that `predict` wrote or on conversations.

    The answers should be the target's own: a head that learns from another's drafts for that one. Nothing is stored:
    the texts of each pack are read, and the target runs over them, when its turn comes.

    Args:
        completions: A .jsonl, .json, .csv or .parquet file, a `datasets` folder or a hub dataset, or several of them. A
            row has `prompt_ids` and `response_ids` (as in `completions.jsonl`), `messages` (each with `role` and
            `content`), `conversations` (each with `from` and `value`), or `prompt` and `completion`. What `assistant`
            or `gpt` say is learned, as the target's chat template writes it.
        split: Split to read, or slices such as `train[:1000]`; a file is all `train`.
        config: Configuration of a hub dataset.
        num_tokens: Length of a pack, a multiple of 128; memory and time of a step grow with it.
        val_share: Share of the prompts held out, with all their responses, to measure acceptance on.
        seed: Seed of the held-out prompts and of the packs' order.

    Example:
        >>> import lightning as L
        >>> from tlt_lightning import DrafterDataModule, DrafterModule
        >>> data = DrafterDataModule("outputs/completions.jsonl")  # doctest: +SKIP
        >>> L.Trainer(max_epochs=3).fit(DrafterModule("Qwen/Qwen2.5-0.5B-Instruct"), data)  # doctest: +SKIP
    """

    def __init__(
        self,
        completions: str | list[str],
        split: str = "train",
        config: str | None = None,
        num_tokens: int = 4096,
        val_share: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_num_tokens(num_tokens)
        if not 0 < val_share < 1:
            raise ValueError(f"`val_share` must be between 0 and 1, got {val_share}.")
        self.paths = [str(path) for path in ([completions] if isinstance(completions, str | Path) else completions)]
        for path in self.paths:
            check_path(path, "completions")
        self.split, self.config = split, config
        self.num_tokens = num_tokens
        self.val_share = val_share
        self.seed = seed
        self.target: PreTrainedModel | None = None

    @property
    def _drafter(self) -> DrafterModule:
        return self.trainer.lightning_module  # type: ignore[union-attr,return-value]

    @override
    def setup(self, stage: str) -> None:
        if self.target is not None:
            return
        from transformers import AutoModel

        config = self._drafter.target_config
        reader = RowReader(self._drafter.target, config.max_position_embeddings)
        texts = Texts(self.paths, reader, config.vocab_size, self.config, self.split)
        parts = split_by_prompt(texts.prompts, self.val_share, self.seed)
        self.train_texts, self.val_texts = map(texts.part, parts)
        target = AutoModel.from_pretrained(self._drafter.target, dtype="auto").requires_grad_(False)
        self.target = target.to(self.trainer.strategy.root_device)  # type: ignore[union-attr]

    def token_counts(self) -> Tensor:
        """Count how often each token was written in the training texts, (V,)."""
        counts = torch.zeros(self._drafter.target_config.vocab_size, dtype=torch.long)
        for text in self.train_texts:
            counts += torch.bincount(torch.tensor(text.answers, dtype=torch.long), minlength=len(counts))
        return counts

    @override
    def train_dataloader(self) -> PackLoader:
        return PackLoader(self, self.train_texts, shuffled=True)

    @override
    def val_dataloader(self) -> PackLoader:
        return PackLoader(self, self.val_texts, shuffled=False)

    @torch.no_grad()
    def sequences(self, texts: Sequence[Text]) -> list[PolicyText]:
        """Return `texts` with the target's states over them, on the CPU, in their order."""
        assert self.target is not None, "`sequences` before `setup`"
        results: dict[int, PolicyText] = {}
        for rows in similar_lengths([len(text.ids) for text in texts], self.num_tokens):
            ids = [torch.tensor(texts[row].ids) for row in rows]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.target.device)
            with HiddenStateTap(self.target, self._drafter.layer_ids, range(len(rows))) as tap:
                self.target(input_ids=padded, use_cache=False)
            results |= zip(rows, tap.read(ids, [texts[row].prompt_length for row in rows]), strict=True)
        for row, sequence in results.items():
            sequence.others = texts[row].others
        return [results[row] for row in range(len(texts))]

    @override
    def teardown(self, stage: str) -> None:
        self.target = None


class PackLoader:
    """Yields the packs of one epoch on this rank, in another order each epoch if `shuffled`."""

    def __init__(self, data: DrafterDataModule, texts: Texts, *, shuffled: bool) -> None:
        trainer: Any = data.trainer
        self.data = data
        self.texts = texts
        self.shuffled = shuffled
        self.plans = [
            [piece._replace(sequence=start + piece.sequence) for piece in plan]
            for start in range(0, len(texts), _PLANNED)
            for plan in plan_packs(texts.lengths[start : start + _PLANNED], data.num_tokens)
        ]
        self.rank, self.num_ranks = trainer.global_rank, trainer.world_size
        if len(self) == 0:
            raise ValueError(
                f"`completions` fill {len(self.plans)} packs of `num_tokens` {data.num_tokens}, fewer than there are "
                f"ranks ({self.num_ranks}); give more completions or shorter packs."
            )

    def __len__(self) -> int:
        return len(self.plans) // self.num_ranks

    def __iter__(self) -> Iterator[PackedBatch]:
        """Compute each pack when it is asked for."""
        order = list(range(len(self.plans)))
        if self.shuffled:
            epoch: int = self.data.trainer.current_epoch  # type: ignore[union-attr]
            random.Random(f"{self.data.seed} {epoch}").shuffle(order)
        for number in range(len(self)):
            yield self._pack(self.plans[order[number * self.num_ranks + self.rank]])

    def _pack(self, plan: list[Piece]) -> PackedBatch:
        sequences = self.data.sequences([self.texts[piece.sequence] for piece in plan])
        return fill_pack(list(zip(sequences, plan, strict=True)), self.data.num_tokens)


def similar_lengths(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Group rows, longest first, so that each padded group holds at most `max_tokens`.

    A row longer than that is a group of its own.
    """
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if group and (len(group) + 1) * lengths[group[0]] > max_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
