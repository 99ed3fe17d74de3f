"""Turn rollouts that `predict` saved into training data of a drafter, pack by pack."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Hashable, Iterator, Sequence
from hashlib import blake2b
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
_PLANNED = 4096  # texts whose packs are planned together: the time grows with their square


class DrafterDataModule(L.LightningDataModule):
    """Warms up a drafter offline on completions that `predict` wrote, by `Trainer.fit`.

    The texts should be the target's own: a head that learns from another's drafts for that one. Nothing is stored: the
    texts of each pack are read, and the target runs over them, when its turn comes.

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

        texts = Texts(self.paths, self._drafter.target_config.vocab_size)
        parts = split_by_prompt(texts.prompts, self.val_share, self.seed)
        self.train_texts, self.val_texts = map(texts.part, parts)
        target = AutoModel.from_pretrained(self._drafter.target, dtype="auto").requires_grad_(False)
        self.target = target.to(self.trainer.strategy.root_device)  # type: ignore[union-attr]

    def token_counts(self) -> Tensor:
        """Count how often each token was written in the training texts, (V,)."""
        counts = torch.zeros(self._drafter.target_config.vocab_size, dtype=torch.long)
        for _, response in self.train_texts:
            counts += torch.bincount(torch.tensor(response, dtype=torch.long), minlength=len(counts))
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


class Texts(Sequence[Text]):
    """Reads prompts and responses, as tokens, from the files that they are in whenever they are asked for.

    So a million long texts take some 30 MB. They are read once at the start: ValueError unless they are the target's.
    """

    def __init__(self, paths: Sequence[Path], vocab_size: int) -> None:
        self.paths = paths
        self.lengths, self.prompts = array("q"), array("Q")  # tokens, and a hash of the prompt
        self._files, self._starts = array("H"), array("q")
        for number, path in enumerate(paths):
            start = 0
            with path.open("rb") as file:
                for line_number, line in enumerate(file, start=1):  # ends at "\n" alone, unlike `str.splitlines`
                    if line.strip():
                        self._add(number, start, line, line_number, vocab_size)
                    start += len(line)

    def _add(self, file: int, start: int, line: bytes, line_number: int, vocab_size: int) -> None:
        place = f"`completions` {str(self.paths[file])!r}, line {line_number},"
        try:
            prompt, response = _read(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{place} has no `prompt_ids` and `response_ids`; write it with `predict` of this package."
            ) from error
        if max(prompt + response, default=0) >= vocab_size:
            raise ValueError(
                f"{place} holds tokens that the target's vocabulary of {vocab_size} has not: they are another model's."
            )
        self.lengths.append(len(prompt) + len(response))
        self.prompts.append(int.from_bytes(blake2b(str(prompt).encode(), digest_size=8).digest(), "little"))
        self._files.append(file)
        self._starts.append(start)

    def part(self, rows: Sequence[int]) -> Texts:
        """Return the texts of some rows."""
        part = Texts.__new__(Texts)
        part.paths = self.paths
        for name in ("lengths", "prompts", "_files", "_starts"):
            values: array[int] = getattr(self, name)
            setattr(part, name, array(values.typecode, (values[row] for row in rows)))
        return part

    @override
    def __len__(self) -> int:
        return len(self.lengths)

    @override
    def __getitem__(self, row: Any) -> Any:
        with self.paths[self._files[row]].open("rb") as file:
            file.seek(self._starts[row])
            return _read(file.readline())


def _read(line: bytes) -> Text:
    row = json.loads(line)
    return row["prompt_ids"], row["response_ids"]


def split_by_prompt(keys: Sequence[Hashable], val_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split texts, given a key of each one's prompt, into rows to train on and held-out ones.

    No prompt is on both sides.
    """
    prompts = sorted(set(keys))  # type: ignore[type-var]
    if len(prompts) < 2:
        raise ValueError(
            f"`completions` answer {len(prompts)} prompt(s); at least one to train on and one to hold out."
        )
    num_held_out = min(len(prompts) - 1, max(1, round(val_share * len(prompts))))
    held_out = set(random.Random(seed).sample(prompts, num_held_out))
    parts: tuple[list[int], list[int]] = ([], [])
    for row, key in enumerate(keys):
        parts[key in held_out].append(row)
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
