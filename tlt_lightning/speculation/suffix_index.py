"""Index text that is being written, to find what followed the last few tokens before.

The paper's model-free drafter (arXiv 2511.16665, section 5.3) retrieves from the sibling responses of a prompt. Ours
serves both look-ups: `sibling` with one group for all responses to a prompt, `ngram` with a group for each response.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

MATCH_LENGTHS = (8, 4, 2)
"""Tokens at the end of a text that are looked for, longest first."""

MAX_TOKENS = 1_000_000
"""Tokens held over all groups; beyond it the group that was appended to least recently is forgotten."""

COUNT_BIT = 40
"""An entry is count << COUNT_BIT | place: the largest entry is the most frequent and then the most recent one."""

PLACE_MASK = (1 << COUNT_BIT) - 1

MAX_CONTINUATIONS = 16
"""Continuations kept of one match; the rarest goes, so that common short matches stay cheap."""


@dataclass(slots=True)
class _Group:
    """Holds texts that draft for each other; a place is a token's arrival number over all texts."""

    texts: list[array[int]] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    text_of: array[int] = field(default_factory=lambda: array("i"))
    offset_of: array[int] = field(default_factory=lambda: array("i"))
    # Hash of the tokens before a place -> what followed: token -> entry. A single continuation is the entry itself.
    follows: dict[int, int | dict[int, int]] = field(default_factory=dict)


class SuffixIndex:
    """Finds what followed the longest match of a text's last tokens in the texts of a group.

    Every continuation was written before, in one piece. Appending a token and looking up take some microseconds however
    many tokens are held; a token takes 200 to 500 bytes of host memory.

    Example:
        >>> index = SuffixIndex()
        >>> index.append("prompt 1", "response 1", [5, 6, 7, 8, 9])
        >>> index.look_up("prompt 1", [1, 6, 7], 2)
        ([8, 9], 2)
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._groups: dict[Hashable, _Group] = {}  # least recently appended to first

    def __contains__(self, group: Hashable) -> bool:
        return group in self._groups

    def append(self, group: Hashable, text: Hashable, tokens: Sequence[int]) -> None:
        """Add `tokens` to the end of `text` in `group`; make group and text at first mention.

        Begin a text with tokens of its prompt, so that the response's beginning can be matched: once in a group with
        the whole prompt, the other texts with its last `MATCH_LENGTHS[0]` tokens.
        """
        held = self._groups.pop(group, None) or _Group()
        self._groups[group] = held
        number = held.numbers.setdefault(text, len(held.texts))
        if number == len(held.texts):
            held.texts.append(array("i"))
        written = held.texts[number]
        for token in tokens:
            place = len(held.text_of)
            held.text_of.append(number)
            held.offset_of.append(len(written))
            self._note(held, written, token, place)
            written.append(token)
        self.num_tokens += len(tokens)
        while self.num_tokens > MAX_TOKENS:
            self.clear(next(iter(self._groups)))

    def look_up(self, group: Hashable, tail: Sequence[int], num_draft_tokens: int) -> tuple[list[int], int]:
        """Return tokens that followed the longest match, and the match's length; else ([], 0).

        `tail` is the last tokens written, at least `MATCH_LENGTHS[0]` of them where there are as many.
        """
        held = self._groups.get(group)
        if held is None or num_draft_tokens < 1:
            return [], 0
        last = tuple(tail[-MATCH_LENGTHS[0] :])
        for length in MATCH_LENGTHS:
            if length > len(last):
                continue
            entry = held.follows.get(hash(last[-length:]))
            if entry is None:
                continue
            best = entry if isinstance(entry, int) else max(entry.values())
            place = best & PLACE_MASK
            written, offset = held.texts[held.text_of[place]], held.offset_of[place]
            if tuple(written[offset - length : offset]) == last[-length:]:  # not another text with the same hash
                return written[offset : offset + num_draft_tokens].tolist(), length
        return [], 0

    def clear(self, group: Hashable | None = None) -> None:
        """Forget `group`, or everything if None; an unknown group is fine."""
        if group is None:
            self._groups.clear()
            self.num_tokens = 0
        elif group in self._groups:
            self.num_tokens -= len(self._groups.pop(group).text_of)

    def _note(self, held: _Group, written: array[int], token: int, place: int) -> None:
        """Remember that `token`, at `place`, followed the end of `written`.

        For each match length, `follows` maps the hash of that many last tokens to entries ``count << 40 | place``: the
        greatest is the most frequent continuation, and of equals the latest. While only one token ever followed (nearly
        always), its entry stands without a dictionary, and the token is the one at its place.
        """
        follows = held.follows
        last = tuple(written[-MATCH_LENGTHS[0] :])
        for length in MATCH_LENGTHS:
            if length > len(last):
                continue
            key = hash(last[-length:])
            entry = follows.get(key)
            if entry is None:
                follows[key] = 1 << COUNT_BIT | place
                continue
            if isinstance(entry, int):
                earlier = entry & PLACE_MASK
                first = held.texts[held.text_of[earlier]][held.offset_of[earlier]]
                if first == token:
                    follows[key] = (entry & ~PLACE_MASK) + (1 << COUNT_BIT) + place
                    continue
                entry = follows[key] = {first: entry}
            elif token not in entry and len(entry) == MAX_CONTINUATIONS:
                del entry[min(entry, key=entry.__getitem__)]
            count = entry.get(token, 0) >> COUNT_BIT
            entry[token] = count + 1 << COUNT_BIT | place
