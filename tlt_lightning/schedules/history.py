"""Remember earlier answers to a prompt: lengths, by which prompts are dealt to ranks, and texts to draft from."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tlt_lightning.arguments import Count, check_argument, checked

if TYPE_CHECKING:
    from tlt_lightning.engine.base import RolloutEngine


@checked("earlier_answers.")
@dataclass(frozen=True, kw_only=True)
class EarlierAnswers:
    """Keeps answers for the next time that their prompt is drawn; look-ups then draft from them, too.

    Args:
        max_tokens: Tokens kept over all prompts; beyond it the prompts that were answered least recently are forgotten.
            Each rank holds all of them, in 4 bytes each, and the checkpoint holds them once.
    """

    max_tokens: Count = 4_000_000


@dataclass(frozen=True, slots=True)
class Answered:
    """Lists what a rank has written in an iteration, each with the number of its prompt.

    Args:
        lengths: Tokens of every response that has ended.
        texts: Responses that are learned from.
    """

    lengths: list[tuple[int, int]] = field(default_factory=list)
    texts: "list[tuple[int, array[int]]]" = field(default_factory=list)


class AnswerHistory:
    """Remembers the last answers to each prompt, the same on all ranks.

    What it holds is replaced and never changed, so that an iteration can save what there was when it began.

    Args:
        settings: Says how many texts are kept; None keeps lengths alone.
    """

    def __init__(self, settings: EarlierAnswers | None = None) -> None:
        check_argument("earlier_answers", settings, EarlierAnswers | None)
        self.settings = settings
        self.mean_lengths: dict[int, float] = {}
        self.texts: dict[int, list[array[int]]] = {}  # by prompt, least recently answered first

    def check(self, engine: "RolloutEngine") -> None:
        """Raise ValueError if texts are kept that nobody could read."""
        if self.settings is not None and not engine.reads_drafts:
            raise ValueError(
                f"`data.earlier_answers` is given, but `data.engine` {type(engine).__name__} drafts from no text; use "
                "VLLMEngine with `speculation.siblings: true`, or leave it out."
            )

    def learn(self, answered: Answered, gather: Callable[[Answered], Sequence[Answered]]) -> None:
        """Take an iteration's answers, in place of older ones.

        Args:
            answered: Those of this rank.
            gather: Returns those of all ranks, in their order; a collective.
        """
        ranks = gather(answered)
        lengths: dict[int, list[int]] = {}
        for prompt, length in chain.from_iterable(each.lengths for each in ranks):
            lengths.setdefault(prompt, []).append(length)
        means = {prompt: sum(found) / len(found) for prompt, found in lengths.items()}
        self.mean_lengths = {**self.mean_lengths, **means}
        if self.settings is None:
            return
        answers: dict[int, list[array[int]]] = {}
        for prompt, text in chain.from_iterable(each.texts for each in ranks):
            answers.setdefault(prompt, []).append(text)
        texts = {prompt: held for prompt, held in self.texts.items() if prompt not in answers} | answers
        surplus = sum(len(text) for held in texts.values() for text in held) - self.settings.max_tokens
        for prompt in [*texts]:
            if surplus <= 0:
                break
            surplus -= sum(map(len, texts.pop(prompt)))
        self.texts = texts

    def copy(self) -> "AnswerHistory":
        """Return a history that holds what this one holds now."""
        made = AnswerHistory(self.settings)
        made.mean_lengths, made.texts = self.mean_lengths, self.texts
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return everything remembered, as tensors and primitives."""
        held, tokens = [(prompt, text) for prompt, texts in self.texts.items() for text in texts], array("i")
        for _, text in held:
            tokens.extend(text)
        return {
            "mean_lengths": self.mean_lengths,
            "texts": [(prompt, len(text)) for prompt, text in held],
            "tokens": torch.from_numpy(np.array(tokens, dtype=np.int32)),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved; texts only where they are kept."""
        self.mean_lengths, self.texts = state_dict["mean_lengths"], {}
        if self.settings is None:
            return
        tokens = array("i")
        tokens.frombytes(state_dict["tokens"].numpy().tobytes())
        begin = 0
        for prompt, length in state_dict["texts"]:
            self.texts.setdefault(prompt, []).append(tokens[begin : begin + length])
            begin += length


def deal(lengths: Sequence[float], numbers: Sequence[int]) -> list[list[int]]:
    """Deal prompts so that ranks write and train on about equally many tokens, as far as their numbers allow.

    The longest goes first, each to the rank with the fewest tokens. Where nothing is known, ranks take turns.

    Args:
        lengths: Tokens to expect of a response to each prompt; 0 if unknown, which counts as the mean of the others.
        numbers: Prompts that each rank gets, all of them together.

    Returns:
        Places in `lengths` of each rank's prompts, ascending.
    """
    known = [length for length in lengths if length]
    typical = sum(known) / len(known) if known else 1.0
    expected = [length or typical for length in lengths]
    shares: list[list[int]] = [[] for _ in numbers]
    lightest = [(0.0, rank) for rank, number in enumerate(numbers) if number]  # a heap, as it is sorted
    for place in sorted(range(len(expected)), key=lambda place: -expected[place]):
        num_tokens, rank = heappop(lightest)
        shares[rank].append(place)
        if len(shares[rank]) < numbers[rank]:
            heappush(lightest, (num_tokens + expected[place], rank))
    return [sorted(share) for share in shares]
