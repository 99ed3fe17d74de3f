"""The texts that are being written, and who drafts best for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt_lightning.speculation.base import Drafter, Strategy
from tlt_lightning.speculation.suffix_index import SuffixIndex

Source = tuple[Drafter, int]
"""Who drafted, and how many tokens the match had that was drafted from (0 for the learned drafter)."""

LEARNED: Source = ("learned", 0)
PRIOR_COUNT = 4
"""Verifications that a source's prior is worth."""
NEWEST_WEIGHT = 0.02
"""Least weight of the newest verification in a score: what was accepted some hundred drafts ago is forgotten."""
TRIAL_PERIOD = 64
"""One draft in so many is looked up although another source is expected to do better: it may have been unlucky."""


@dataclass(frozen=True, slots=True)
class Found:
    """A draft that was looked up.

    Args:
        tokens: The draft.
        source: Whose it is.
    """

    tokens: list[int]
    source: Source


@dataclass(slots=True)
class SourceScores:
    """Mean accepted drafts of each source, by which the better one is told.

    Before a source was tried, a match is expected to go on half as long as it already has, and the learned drafter to
    have one draft accepted.
    """

    scores: dict[Source, tuple[float, int]] = field(default_factory=dict)

    def expected(self, source: Source, num_tokens: int) -> float:
        """Drafts of `num_tokens` expected to be accepted."""
        return min(self._score(source)[0], num_tokens)

    def update(self, source: Source, num_accepted: int) -> None:
        """Learn from one verification."""
        score, count = self._score(source)
        weight = max(1 / (count + 1), NEWEST_WEIGHT)
        self.scores[source] = (score + weight * (num_accepted - score), count + 1)

    def _score(self, source: Source) -> tuple[float, int]:
        return self.scores.get(source, (1.0 if source == LEARNED else source[1] / 2, PRIOR_COUNT))


class RunningTexts:
    """Looks up how texts may go on, in other answers to the same prompt and in what they said themselves.

    Args:
        siblings: Look in other answers to the same prompt.
        ngram: Look in the prompt and the answer itself.
        keeps: Keep answers for later rollouts that meet the same prompt.
    """

    def __init__(self, *, siblings: bool, ngram: bool, keeps: bool) -> None:
        self.indices: dict[Drafter, SuffixIndex] = {}
        if siblings:
            self.indices["sibling"] = SuffixIndex()
        if ngram:
            self.indices["ngram"] = SuffixIndex()
        self.keeps = keeps
        self.scores = SourceScores()
        self._groups: dict[tuple[int, ...], int] = {}  # prompt -> group of its answers
        self._group_of: dict[str, int] = {}
        self._num_look_ups = 0

    def add(self, request_id: str, prompt_ids: Sequence[int]) -> None:
        """Begin a text with its prompt."""
        prompt = tuple(prompt_ids)
        is_first = prompt not in self._groups
        group = self._group_of[request_id] = self._groups.setdefault(prompt, len(self._groups))
        for drafter, index in self.indices.items():
            whole = drafter == "ngram" or is_first
            start = prompt if whole else prompt[-index.match_lengths[0] :]
            index.append(*self._place(drafter, request_id, group), start)

    def grow(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add what a text has written."""
        group = self._group_of.get(request_id)
        if group is not None:
            for drafter, index in self.indices.items():
                index.append(*self._place(drafter, request_id, group), token_ids)

    def propose(
        self, request_id: str, tail: Sequence[int], strategy: Strategy, num_tokens: int, floor: float
    ) -> Found | None:
        """The draft that most of is expected to be accepted, if that is more than `floor`.

        Args:
            request_id: Whose text.
            tail: Its last tokens.
            strategy: The strategy in force: drafters that look up may draft for the learned one and siblings' for each
                other, the text itself only for itself.
            num_tokens: Longest draft.
            floor: Drafts that another source is expected to have accepted; negative if there is none.
        """
        group = self._group_of.get(request_id)
        if group is None:
            return None
        self._num_look_ups += 1
        if self._num_look_ups % TRIAL_PERIOD == 0:
            floor = -1.0
        best: Found | None = None
        for drafter, index in self.indices.items():
            if strategy.drafter == "ngram" and drafter != "ngram":
                continue
            found = index.look_up(self._place(drafter, request_id, group)[0], tail, num_tokens)
            source = (drafter, found.match_length)
            expected = self.scores.expected(source, len(found.tokens))
            if found.tokens and expected > floor:
                best, floor = Found(found.tokens, source), expected
        return best

    @property
    def tail_length(self) -> int:
        """Tokens of a text's end that a look-up compares at most."""
        return max(index.match_lengths[0] for index in self.indices.values())

    def remove(self, request_id: str) -> None:
        """End a text; its siblings can still look in it."""
        if self._group_of.pop(request_id, None) is not None and "ngram" in self.indices:
            self.indices["ngram"].clear(request_id)

    def end_rollout(self) -> None:
        """End all texts and, unless they are kept, forget them."""
        for request_id in list(self._group_of):
            self.remove(request_id)
        if not self.keeps:
            self.clear()

    def clear(self) -> None:
        """Forget all texts that have ended; call it between rollouts."""
        for index in self.indices.values():
            index.clear()
        self._groups.clear()

    def _place(self, drafter: Drafter, request_id: str, group: int) -> tuple[int | str, str]:
        return (group if drafter == "sibling" else request_id), request_id
