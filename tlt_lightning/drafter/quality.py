"""How well a head drafts, measured on text that its target wrote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """What a head is worth at `K` drafted tokens; tuples hold one value per drafted token.

    Args:
        accepted: Share of engine steps in which this draft and all before it are accepted.
        top1: Share of positions where the head's likeliest token is the target's.
        top3: Share of positions where the target's likeliest token is among the head's three likeliest.
        loss: Mean training loss, undecayed.
        num_steps: Engine steps that `accepted` is the mean over.
    """

    accepted: tuple[float, ...]
    top1: tuple[float, ...]
    top3: tuple[float, ...]
    loss: tuple[float, ...]
    num_steps: int

    @property
    def acceptance_length(self) -> float:
        """Tokens an engine step emits, the one that needs no draft included; `K + 1` at best."""
        return 1 + sum(self.accepted)

    def metrics(self, prefix: str = "drafter/") -> dict[str, float]:
        """The numbers under the project's metric names."""
        values = {"acceptance_length": self.acceptance_length}
        for name in ("top1", "top3", "loss"):
            values |= {f"{name}_pos_{k}": value for k, value in enumerate(getattr(self, name), start=1)}
        values |= {f"acceptance_rate_pos_{k}": value for k, value in enumerate(self.accepted, start=1)}
        return {prefix + name: value for name, value in values.items()}


def quality_of(sums: Tensor) -> DraftQuality:
    """The quality from sums over batches and ranks.

    Args:
        sums: Accepted drafts, engine steps, then top1, top3 and loss, and the positions these three are over. (6, K)
    """
    accepted, steps, top1, top3, loss, positions = sums.tolist()

    def means(values: list[float], counts: list[float]) -> tuple[float, ...]:
        return tuple(value / max(1, count) for value, count in zip(values, counts, strict=True))

    return DraftQuality(
        accepted=means(accepted, steps),
        top1=means(top1, positions),
        top3=means(top3, positions),
        loss=means(loss, positions),
        num_steps=int(steps[0]),
    )


def count_accepted(matches: Tensor, documents: Tensor, is_response: Tensor) -> Tensor:
    """Retrace how an engine that drafts `K` tokens a step would have written the texts.

    A step drafts from an entry, keeps the drafts that match the text up to the first that does not, and adds the
    token that the text has there: the next step starts one entry after the last match. Steps whose drafts would reach
    beyond the text are left out.

    Args:
        matches: The draft of each step and entry is the text's token. (K, T), bool
        documents: Number of the text of each entry. (T,)
        is_response: Entries that drafting may start from. (T,), bool

    Returns:
        How often the k-th draft and all before it were accepted, and how many steps there were. (2, K)
    """
    num_drafts = len(matches)
    runs = matches.long().cumprod(0).sum(0).tolist()
    responses = is_response.tolist()
    counts = [0] * (num_drafts + 1)
    stop = 0
    for length in documents.unique_consecutive(return_counts=True)[1].tolist():
        entry, stop = stop, stop + length
        while entry + num_drafts <= stop:
            if responses[entry]:
                counts[runs[entry]] += 1
                entry += runs[entry]
            entry += 1
    accepted = [sum(counts[k:]) for k in range(1, num_drafts + 1)]
    return torch.tensor([accepted, [sum(counts)] * num_drafts], dtype=torch.float64)
