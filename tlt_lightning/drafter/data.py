"""Turn rollouts that `predict` saved into training data of a drafter, pack by pack."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.drafter.packing import PackedBatch, Piece, check_num_tokens, fill_pack, plan_packs
from tlt_lightning.hidden_states import HiddenStateTap, PolicyText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tlt_lightning.drafter.module import DrafterModule

Text = tuple[list[int], list[int]]  # tokens of a prompt, and of the response to it


class DrafterDataModule(L.LightningDataModule):
    """Warms up a drafter offline on completions that `predict` wrote, by `Trainer.fit`.

    The texts should be the target's own: a head that learns from another's drafts for that one. Nothing is stored: the
    target runs over the texts of each pack when its turn comes.

    Args:
        completions: A `completions.jsonl`, or several, one per rank of the run that wrote them.
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
        self, completions: str | list[str], num_tokens: int = 4096, val_share: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        check_num_tokens(num_tokens)
        if not 0 < val_share < 1:
            raise ValueError(f"`val_share` must be between 0 and 1, got {val_share}.")
        self.paths = [Path(path) for path in ([completions] if isinstance(completions, str) else completions)]
        if missing := [str(path) for path in self.paths if not path.is_file()]:
            raise FileNotFoundError(f"`completions` {', '.join(missing)} does not exist (from {Path.cwd()}).")
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

        texts = read_texts(self.paths, self._drafter.target_config.vocab_size)
        self.train_texts, self.val_texts = split_by_prompt(texts, self.val_share, self.seed)
        target = AutoModel.from_pretrained(self._drafter.target, dtype="auto").requires_grad_(False)
        self.target = target.to(self.trainer.strategy.root_device)  # type: ignore[union-attr]

    def token_counts(self) -> Tensor:
        """Count how often each token was written in the training texts, (V,)."""
        ids = torch.tensor([token for _, response in self.train_texts for token in response])
        return torch.bincount(ids, minlength=self._drafter.target_config.vocab_size)

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
        for rows in similar_lengths([len(prompt) + len(response) for prompt, response in texts], self.num_tokens):
            ids = [torch.tensor(texts[row][0] + texts[row][1]) for row in rows]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.target.device)
            with HiddenStateTap(self.target, self._drafter.layer_ids, range(len(rows))) as tap:
                self.target(input_ids=padded, use_cache=False)
            results |= zip(rows, tap.read(ids, [len(texts[row][0]) for row in rows]), strict=True)
        return [results[row] for row in range(len(texts))]

    @override
    def teardown(self, stage: str) -> None:
        self.target = None


class PackLoader:
    """Yields the packs of one epoch on this rank, in another order each epoch if `shuffled`."""

    def __init__(self, data: DrafterDataModule, texts: Sequence[Text], *, shuffled: bool) -> None:
        trainer: Any = data.trainer
        self.data = data
        self.texts = texts
        self.shuffled = shuffled
        lengths = [len(prompt) + len(response) for prompt, response in texts]
        self.plans = plan_packs(lengths, data.num_tokens)
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


def read_texts(paths: Sequence[Path], vocab_size: int) -> list[Text]:
    """Read prompts and responses as tokens; raise ValueError unless they are the target's."""
    texts: list[Text] = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            row = json.loads(line)
            if "response_ids" not in row or "prompt_ids" not in row:
                raise ValueError(
                    f"`completions` {str(path)!r}, line {number}, has no `prompt_ids` and `response_ids`; write it "
                    "with `predict` of this package."
                )
            if max(row["prompt_ids"] + row["response_ids"]) >= vocab_size:
                raise ValueError(
                    f"`completions` {str(path)!r}, line {number}, holds tokens that the target's vocabulary of "
                    f"{vocab_size} has not: they are another model's."
                )
            texts.append((row["prompt_ids"], row["response_ids"]))
    return texts


def split_by_prompt(texts: Sequence[Text], val_share: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Split `texts` into training and held-out ones; no prompt is on both sides."""
    prompts = sorted({tuple(prompt) for prompt, _ in texts})
    if len(prompts) < 2:
        raise ValueError(
            f"`completions` answer {len(prompts)} prompt(s); at least one to train on and one to hold out."
        )
    num_held_out = min(len(prompts) - 1, max(1, round(val_share * len(prompts))))
    held_out = set(random.Random(seed).sample(prompts, num_held_out))
    parts: tuple[list[Text], list[Text]] = ([], [])
    for text in texts:
        parts[tuple(text[0]) in held_out].append(text)
    return parts


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
