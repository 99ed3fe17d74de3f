"""The texts that are being written, and which of them says best how each may go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt_lightning.speculation.strategy import Drafter, Strategy
from tlt_lightning.speculation.suffix_index import SuffixIndex

Source = tuple[Drafter, int]
"""Who drafted, and how many tokens the match had that was drafted from (0 for the learned head)."""

LEARNED: Source = ("learned", 0)
PRIOR_COUNT = 4
"""Verifications that a source's prior is worth."""
NEWEST_WEIGHT = 0.02
"""Least weight of the newest verification in a score: what was accepted some hundred drafts ago is forgotten."""
READ_PER_STEP = 1024
"""Tokens that a step reads at most before it looks up, a few milliseconds of the host."""
TRIAL_PERIOD = 64
"""One draft in so many is looked up although the head is expected to do better: the look-ups may have been unlucky."""


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

    Before a source was tried, a match is expected to go on half as long as it already has, and the head to have one
    draft accepted.
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


@dataclass(slots=True, eq=False)
class _Text:
    request_id: str
    group: int
    tokens: Sequence[int]  # prompt and answer; grows while it is written
    read: dict[Drafter, int]  # tokens of it that each index holds


class RunningTexts:
    """Looks up how texts may go on, in other answers to the same prompt and in what they said themselves.

    Nothing is read before somebody looks it up, so that texts cost nothing while speculation is off. When it is
    switched on, what was written meanwhile is read over the following steps.

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
        self._num_groups = 0  # ever made
        self._members: dict[int, list[_Text]] = {}  # texts of a group that run or are not read to their end
        self._texts: dict[str, _Text] = {}
        self._read_groups: set[int] = set()  # in this step
        self._allowance = READ_PER_STEP
        self._num_mixed = 0

    def add(self, request_id: str, tokens: Sequence[int]) -> None:
        """Begin a text: `tokens` is its prompt, and by reference whatever is written after it."""
        prompt = tuple(tokens)
        is_first = prompt not in self._groups
        if is_first:
            self._groups[prompt] = self._num_groups
            self._num_groups += 1
        group = self._groups[prompt]
        read = {
            drafter: 0 if drafter == "ngram" or is_first else max(0, len(prompt) - index.match_lengths[0])
            for drafter, index in self.indices.items()
        }
        text = self._texts[request_id] = _Text(request_id, group, tokens, read)
        if "sibling" in self.indices:
            self._members.setdefault(group, []).append(text)

    def next_step(self) -> None:
        """Allow look-ups to read what has been written since, up to a number of tokens."""
        self._read_groups.clear()
        self._allowance = READ_PER_STEP

    def propose(self, request_id: str, tail: Sequence[int], strategy: Strategy, num_tokens: int) -> Found | None:
        """The draft that most of is expected to be accepted, in a mixed step only if that is more than of the head's.

        Args:
            request_id: Whose text.
            tail: Its last tokens.
            strategy: The strategy in force: where siblings' drafts are asked for, also the text itself may draft, if it
                is indexed, but not the other way round.
            num_tokens: Longest draft.
        """
        text = self._texts.get(request_id)
        if text is None:
            return None
        best, most = None, -1.0
        if strategy.drafter == "mixed":
            self._num_mixed += 1
            if self._num_mixed % TRIAL_PERIOD:
                most = self.scores.expected(LEARNED, strategy.num_draft_tokens)
        for drafter, index in self.indices.items():
            if strategy.drafter == "ngram" and drafter != "ngram":
                continue
            self._read_for(text, drafter)
            found = index.look_up(text.group if drafter == "sibling" else request_id, tail, num_tokens)
            source = (drafter, found.match_length)
            expected = self.scores.expected(source, len(found.tokens))
            if found.tokens and expected > most:
                best, most = Found(found.tokens, source), expected
        return best

    @property
    def tail_length(self) -> int:
        """Tokens of a text's end that a look-up compares at most."""
        return max(index.match_lengths[0] for index in self.indices.values())

    def remove(self, request_id: str) -> None:
        """End a text; its siblings can still look in it."""
        if self._texts.pop(request_id, None) is not None and "ngram" in self.indices:
            self.indices["ngram"].clear(request_id)

    def end_rollout(self) -> None:
        """End all texts and, unless they are kept, forget them."""
        for request_id in list(self._texts):
            self.remove(request_id)
        if not self.keeps:
            self.clear()
        else:
            for members in self._members.values():
                self._allowance = sum(len(text.tokens) for text in members)
                self._read_group(members)
            self._members.clear()
            siblings = self.indices.get("sibling", ())
            self._groups = {prompt: group for prompt, group in self._groups.items() if group in siblings}

    def clear(self) -> None:
        """Forget all texts that have ended; call it between rollouts."""
        for index in self.indices.values():
            index.clear()
        self._groups.clear()
        self._members.clear()

    def _read_for(self, text: _Text, drafter: Drafter) -> None:
        if drafter == "ngram":
            self._read(text, drafter)
        elif text.group not in self._read_groups:
            self._read_groups.add(text.group)
            self._read_group(self._members[text.group])

    def _read_group(self, members: list[_Text]) -> None:
        for text in members:
            self._read(text, "sibling")
        members[:] = [text for text in members if text.request_id in self._texts or self._num_unread(text)]

    def _num_unread(self, text: _Text) -> int:
        return len(text.tokens) - text.read["sibling"]

    def _read(self, text: _Text, drafter: Drafter) -> None:
        start = text.read[drafter]
        tokens = text.tokens[start : start + self._allowance]
        if tokens:
            group = text.group if drafter == "sibling" else text.request_id
            self.indices[drafter].append(group, text.request_id, tokens)
            text.read[drafter] += len(tokens)
            self._allowance -= len(tokens)
