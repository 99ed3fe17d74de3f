"""Remember earlier answers to a prompt, and what was written ahead: lengths, and texts to draft from."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tlt_lightning.arguments import check_count, check_optional

if TYPE_CHECKING:
    from tlt_lightning.engine.base import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class EarlierAnswers:
    """Keeps answers for the next time that their prompt is drawn; look-ups then draft from them, too.

    Args:
        max_tokens: Tokens kept over all prompts; beyond it the prompts that were answered least recently are forgotten.
            Each rank holds all of them, in 4 bytes each, and the checkpoint holds them once.
        ahead: Answers that a worker which waits for others writes ahead to each prompt of its next iteration, with the
            weights that it has (after BubbleSpec, arXiv 2605.08862); 0 writes none. Where drafts may share the noise,
            on vLLM's V2 runner, they are those very responses, at most `group_size`, and are kept for that iteration
            alone, beside `max_tokens`. The engine keeps the memory meanwhile: callbacks, such as one that trains a
            drafter, get what is left of the idle window.
    """

    max_tokens: int = 4_000_000
    ahead: int = 0

    def __post_init__(self) -> None:
        check_count("earlier_answers.max_tokens", self.max_tokens, 1)
        check_count("earlier_answers.ahead", self.ahead, 0)


@dataclass(frozen=True, slots=True)
class Answered:
    """Lists what a rank has written in an iteration, each with the number of its prompt.

    Args:
        lengths: Tokens of every response that has ended.
        texts: Responses that will not be written again with the noise that they had.
        ahead: What was written ahead with noise of its own, of responses that may be unfinished.
        twins: What was written ahead with the noise of responses to come, with their seeds. No earlier answers: a run
            may be resumed with an engine whose drafts must not know the noise.
    """

    lengths: list[tuple[int, int]] = field(default_factory=list)
    texts: list[tuple[int, array[int]]] = field(default_factory=list)
    ahead: list[tuple[int, array[int]]] = field(default_factory=list)
    twins: list[tuple[int, array[int]]] = field(default_factory=list)


class AnswerHistory:
    """Remembers the last answers to each prompt, the same on all ranks.

    What it holds is replaced and never changed, so that an iteration can save what there was when it began.

    Args:
        settings: Says how many texts are kept; None keeps lengths alone.
    """

    def __init__(self, settings: EarlierAnswers | None = None) -> None:
        check_optional("earlier_answers", settings, EarlierAnswers, "Give for example `EarlierAnswers()`.")
        self.settings = settings
        self.mean_lengths: dict[int, float] = {}
        self.texts: dict[int, list[array[int]]] = {}  # by prompt, least recently answered first
        self.twins: dict[int, array[int]] = {}  # by seed, those of the next iteration's responses

    def check(self, engine: RolloutEngine, num_ranks: int) -> None:
        """Raise ValueError if texts are kept that nobody could read, or write ahead."""
        if self.settings is None:
            return
        if not engine.reads_drafts:
            raise ValueError(
                f"`data.earlier_answers` is given, but `data.engine` {type(engine).__name__} drafts from no text; use "
                "VLLMEngine with `speculation.siblings: true`, or leave it out."
            )
        if self.ahead and num_ranks == engine.num_ranks:
            raise ValueError(
                f"`data.earlier_answers.ahead` is {self.ahead}, but there is one engine, which waits for no other: "
                "leave it 0, or train with more ranks."
            )
        if self.ahead and engine.num_ranks > 1:
            raise ValueError(
                f"`data.earlier_answers.ahead` is {self.ahead}, but each engine spans {engine.num_ranks} ranks, which "
                "have idle windows of their own: leave it 0, or use `tensor_parallel: 1`."
            )

    @property
    def ahead(self) -> int:
        """Answers that are written ahead to a prompt."""
        return 0 if self.settings is None else self.settings.ahead

    def learn(self, own: Answered, gather: Callable[[Answered], Sequence[Answered]]) -> None:
        """Take an iteration's answers, in place of older ones, and beside them those written ahead.

        Args:
            own: Those of this rank.
            gather: Returns those of all ranks, in their order; a collective.
        """
        ranks = gather(own)
        lengths: dict[int, list[int]] = {}
        for prompt, length in chain.from_iterable(own.lengths for own in ranks):
            lengths.setdefault(prompt, []).append(length)
        means = {prompt: sum(found) / len(found) for prompt, found in lengths.items()}
        self.mean_lengths = {**self.mean_lengths, **means}
        if self.settings is None:
            return
        answers: dict[int, list[array[int]]] = {}
        for prompt, text in chain.from_iterable(own.texts for own in ranks):
            answers.setdefault(prompt, []).append(text)
        self.twins = {}
        self.texts = {prompt: held for prompt, held in self.texts.items() if prompt not in answers} | answers
        self.take_ahead(ranks)

    def take_ahead(self, ranks: Sequence[Answered]) -> None:
        """Keep what all ranks have written ahead beside what is remembered; texts must be kept."""
        assert self.settings is not None
        self.twins = self.twins | dict(chain.from_iterable(own.twins for own in ranks))
        texts = dict(self.texts)
        for prompt, text in chain.from_iterable(own.ahead for own in ranks):
            texts[prompt] = [*texts.pop(prompt, ()), text]
        surplus = sum(len(text) for held in texts.values() for text in held) - self.settings.max_tokens
        for prompt in [*texts]:
            if surplus <= 0:
                break
            surplus -= sum(map(len, texts.pop(prompt)))
        self.texts = texts

    def copy(self) -> AnswerHistory:
        """Return a history that holds what this one holds now."""
        made = AnswerHistory(self.settings)
        made.mean_lengths, made.texts, made.twins = self.mean_lengths, self.texts, self.twins
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return everything remembered, as tensors and primitives."""
        held, tokens = [(prompt, text) for prompt, texts in self.texts.items() for text in texts], array("i")
        for _, text in (*held, *self.twins.items()):
            tokens.extend(text)
        return {
            "mean_lengths": self.mean_lengths,
            "texts": [(prompt, len(text)) for prompt, text in held],
            "twins": [(seed, len(text)) for seed, text in self.twins.items()],
            "tokens": torch.from_numpy(np.array(tokens, dtype=np.int32)),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved; texts only where they are kept."""
        self.mean_lengths, self.texts, self.twins = state_dict["mean_lengths"], {}, {}
        if self.settings is None:
            return
        tokens = array("i")
        tokens.frombytes(state_dict["tokens"].numpy().tobytes())
        begin = 0
        for prompt, length in state_dict["texts"]:
            self.texts.setdefault(prompt, []).append(tokens[begin : begin + length])
            begin += length
        for seed, length in state_dict["twins"]:
            self.twins[seed] = tokens[begin : begin + length]
            begin += length
