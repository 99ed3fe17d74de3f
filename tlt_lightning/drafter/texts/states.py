"""Run the target over texts for the states that a head learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from tlt_lightning.drafter.texts.formats import Text
from tlt_lightning.hidden_states import HiddenStateTap, PolicyText

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StateReader:
    """Reads texts with their states from a target.

    Args:
        target: Frozen trunk.
        layer_ids: Layers whose states are read.
        max_tokens: Most tokens, with padding, of a pass over several texts.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int], max_tokens: int) -> None:
        self.target = target
        self.layer_ids = layer_ids
        self.max_tokens = max_tokens

    @torch.no_grad()
    def read(self, texts: Sequence[Text]) -> list[PolicyText]:
        """Return `texts` with the target's states over them, on the CPU, in their order."""
        results: dict[int, PolicyText] = {}
        for rows in similar_lengths([len(text.ids) for text in texts], self.max_tokens):
            ids = [torch.tensor(texts[row].ids) for row in rows]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.target.device)
            with HiddenStateTap(self.target, self.layer_ids, range(len(rows))) as tap:
                self.target(input_ids=padded, use_cache=False)
            results |= zip(rows, tap.read(ids, [texts[row].prompt_length for row in rows]), strict=True)
        for row, sequence in results.items():
            sequence.others = texts[row].others
        return [results[row] for row in range(len(texts))]


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
