"""Look drafts up in responses to a prompt, and choose the most promising."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tlt_lightning.speculation.strategy import Drafter, Strategy
from tlt_lightning.speculation.suffix_index import MATCH_LENGTHS, SuffixIndex

Source = tuple[Drafter, int]
"""Drafter of a draft, and tokens of the match that was copied from (0 for the head)."""

LEARNED: Source = ("learned", 0)
PRIOR_COUNT = 4
"""Verifications that a source's prior is worth."""
NEWEST_WEIGHT = 0.02
"""Least weight of the newest verification in a score: what was accepted some hundred drafts ago is forgotten."""
READ_PER_STEP = 1024
"""Tokens that a step reads at most before it looks up, a few milliseconds of the host."""
TRIAL_PERIOD = 64
"""One draft in so many is looked up although the head promises more: the look-ups may have been unlucky."""


@dataclass(frozen=True, slots=True)
class LookupDraft:
    """Holds a draft, by `ngram` or `sibling`, that was copied from text.

    Args:
        match_length: Tokens of the response's end that the copied text shares.
        num_known: Tokens of prompt and response known at the look-up; the draft follows them.
    """

    tokens: list[int]
    drafter: Drafter
    match_length: int
    num_known: int

    @property
    def source(self) -> Source:
        """The source under which the draft's acceptance is scored."""
        return self.drafter, self.match_length


@dataclass(slots=True)
class LookupScores:
    """Keeps the mean accepted drafts of each source, to compare sources by.

    Untried, a match is expected to go on for half its length, and the head to have one draft accepted.
    """

    scores: dict[Source, tuple[float, int]] = field(default_factory=dict)

    def expected(self, source: Source, num_tokens: int) -> float:
        """Return how many of `num_tokens` drafts are expected to be accepted."""
        return min(self._score(source)[0], num_tokens)

    def update(self, source: Source, num_accepted: int) -> None:
        """Learn from one verification."""
        score, count = self._score(source)
        weight = max(1 / (count + 1), NEWEST_WEIGHT)
        self.scores[source] = (score + weight * (num_accepted - score), count + 1)

    def _score(self, source: Source) -> tuple[float, int]:
        return self.scores.get(source, (1.0 if source == LEARNED else source[1] / 2, PRIOR_COUNT))

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned."""
        return {"scores": [[*source, *score] for source, score in self.scores.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` saved."""
        self.scores = {(drafter, length): (mean, count) for drafter, length, mean, count in state_dict["scores"]}


@dataclass(slots=True, eq=False)
class _Text:
    request_id: str
    group: int
    tokens: Sequence[int]  # prompt and response; grows while it is written
    read: dict[Drafter, int]  # tokens of it that each index holds


class LookupDrafter:
    """Looks up drafts in all responses to the same prompt (`siblings`), or in prompt and response alone (`ngram`).

    Text is read only for a look-up, so responses cost nothing while speculation is off. What was written meanwhile is
    read over the steps after speculation is switched on.
    """

    def __init__(self, *, siblings: bool, ngram: bool) -> None:
        is_on: dict[Drafter, bool] = {"sibling": siblings, "ngram": ngram}
        self.indices = {drafter: SuffixIndex() for drafter in is_on if is_on[drafter]}
        self.scores = LookupScores()
        self._members: dict[int, list[_Text]] = {}  # of a group, as far as they run or are not read to their end
        self._texts: dict[str, _Text] = {}
        self._read_groups: set[int] = set()  # in this step
        self._allowance = READ_PER_STEP
        self._num_mixed = 0

    def add(self, request_id: str, tokens: Sequence[int], num_prompt_tokens: int | None = None) -> None:
        """Begin a response.

        Args:
            request_id: Name of the response's request, new in the rollout.
            tokens: Prompt and what is written of the response, held by reference: the text grows.
            num_prompt_tokens: Tokens of the prompt; None is all there are now.
        """
        prompt = tuple(tokens[:num_prompt_tokens])
        group = hash(prompt)
        is_first = group not in self._members and group not in self.indices.get("sibling", ())
        # A prompt is read once a group; of the others its end alone, from which their first tokens are looked up.
        read = {
            drafter: 0 if drafter == "ngram" or is_first else max(0, len(prompt) - MATCH_LENGTHS[0])
            for drafter in self.indices
        }
        text = self._texts[request_id] = _Text(request_id, group, tokens, read)
        if "sibling" in self.indices:
            self._members.setdefault(group, []).append(text)

    def next_step(self) -> None:
        """Let look-ups read new text again, up to `READ_PER_STEP` tokens."""
        self._read_groups.clear()
        self._allowance = READ_PER_STEP

    def propose(self, request_id: str, strategy: Strategy, num_tokens: int) -> LookupDraft | None:
        """Return the draft of most expected accepted tokens; a mixed step's must beat the head.

        None also where the response has ended. Where `strategy` asks for siblings' drafts, the response itself may
        draft, too, if it is indexed, but not the other way round.
        """
        text = self._texts.get(request_id)
        if text is None:
            return None
        num_known, best, most = len(text.tokens), None, -1.0
        tail = text.tokens[-MATCH_LENGTHS[0] :]
        if strategy.drafter == "mixed":
            self._num_mixed += 1
            if self._num_mixed % TRIAL_PERIOD:
                most = self.scores.expected(LEARNED, strategy.num_draft_tokens)
        for drafter, index in self.indices.items():
            if strategy.drafter == "ngram" and drafter != "ngram":
                continue
            self._read_for(text, drafter)
            group = request_id if drafter == "ngram" else text.group
            tokens, match_length = index.look_up(group, tail, num_tokens)
            expected = self.scores.expected((drafter, match_length), len(tokens))
            if tokens and expected > most:
                best, most = LookupDraft(tokens, drafter, match_length, num_known), expected
        return best

    def remove(self, request_id: str) -> None:
        """End a response; siblings can still look in it."""
        text = self._texts.pop(request_id, None)
        if "ngram" in self.indices:
            self.indices["ngram"].clear(request_id)
        if text is not None and all(each.request_id not in self._texts for each in self._members.get(text.group, ())):
            self._members.pop(text.group, None)  # nobody is left to look in what is not read

    def clear(self) -> None:
        """Forget all responses; what was learned about sources stays."""
        for index in self.indices.values():
            index.clear()
        self._texts.clear()
        self._members.clear()

    def _read_for(self, text: _Text, drafter: Drafter) -> None:
        if drafter == "ngram":
            self._read(text, drafter)
        elif text.group not in self._read_groups:
            self._read_groups.add(text.group)
            members = self._members[text.group]
            for member in members:
                self._read(member, drafter)
            members[:] = [m for m in members if m.request_id in self._texts or len(m.tokens) > m.read[drafter]]

    def _read(self, text: _Text, drafter: Drafter) -> None:
        start = text.read[drafter]
        tokens = text.tokens[start : start + self._allowance]
        if tokens:
            group = text.request_id if drafter == "ngram" else text.group
            self.indices[drafter].append(group, text.request_id, tokens)
            text.read[drafter] += len(tokens)
            self._allowance -= len(tokens)
