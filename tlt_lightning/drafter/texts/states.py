"""Run the target over texts for the states that a head learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tlt_lightning.data.formats import Text
from tlt_lightning.drafter.target import frozen_dtype
from tlt_lightning.hidden_states import HiddenStateTap, PolicyText
from tlt_lightning.model_files import load_whole
from tlt_lightning.training.micro_batches import fill_padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class StateReader:
    """Reads texts with their states from a target.

    Args:
        target: Frozen trunk, see `load_target`.
        layer_ids: Layers whose states are read.
        max_tokens: Most tokens, with padding, of a pass over several texts.
    """

    target: PreTrainedModel
    layer_ids: Sequence[int]
    max_tokens: int

    @torch.no_grad()
    def read(self, texts: Sequence[Text]) -> list[PolicyText]:
        """Return `texts` with the target's states over them, on the CPU, in their order."""
        results: dict[int, PolicyText] = {}
        groups = similar_lengths([len(text.ids) for text in texts], self.max_tokens)
        for rows in groups:
            ids = [torch.tensor(texts[row].ids) for row in rows]
            with HiddenStateTap(self.target, self.layer_ids, range(len(rows))) as tap:
                padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
                self.target(input_ids=padded.to(self.target.device), use_cache=False)
            results |= zip(rows, tap.read(ids, [texts[row].prompt_length for row in rows]), strict=True)
        for row, sequence in results.items():
            sequence.others = texts[row].others
        return [results[row] for row in range(len(texts))]


def load_target(path: str, device: torch.device, *, is_mixed: bool) -> PreTrainedModel:
    """Load the trunk of the model at `path`, frozen, in the type of its files, but on a CPU (`frozen_dtype`)."""
    from transformers import AutoModel

    target: Any = load_whole(
        AutoModel, path, "target", may_hold_more=True, dtype=frozen_dtype(device, is_mixed=is_mixed) or "auto"
    ).requires_grad_(False)
    return target.to(device)


def similar_lengths(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group rows of similar lengths, so that each padded group holds at most `max_tokens`.

    A row longer than that is a group of its own.
    """
    if not lengths:
        return []
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [[rows[place] for place in part] for part in fill_padded([lengths[row] for row in rows], max_tokens)]
