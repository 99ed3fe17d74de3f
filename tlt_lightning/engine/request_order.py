"""Order waiting requests: the longest expected first, so that a rollout does not end with a few long ones. Pure.

A response's length is expected from earlier answers to its prompt, and from siblings that have ended or are long by
now. Where nothing is known of a prompt, one of its requests starts before all others: its length tells of theirs.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import inf

_TO_COME = 2.0  # length of a response that is being written, in what is written of it
_HISTORY = 2.0  # siblings that earlier answers count for: the policy has changed since


class RequestOrder:
    """Expects the lengths of responses, by their group."""

    def __init__(self) -> None:
        self._history: dict[int, float] = {}
        self._ended: dict[int, list[int]] = defaultdict(list)
        self._num_open: Counter[int] = Counter()

    def begin(self, group: int, expected_tokens: float) -> None:
        """Take up a request with the mean length of earlier answers to its prompt; 0 if there are none."""
        self._num_open[group] += 1
        self._history[group] = expected_tokens

    def end(self, group: int, num_tokens: int | None) -> None:
        """Learn the length of a response, None of one that was stopped; forget a group whose last one this was."""
        if num_tokens is not None:
            self._ended[group].append(num_tokens)
        self._num_open[group] -= 1
        if not self._num_open[group]:
            for known in (self._num_open, self._ended, self._history):
                known.pop(group, None)

    def expected(self, group: int, running: Sequence[int]) -> float:
        """Return the tokens to expect of the group's next response; infinity if nothing is known.

        `running` are the tokens so far of its responses that are being written.
        """
        ended, before = self._ended[group], self._history.get(group, 0.0)
        weight = _HISTORY if before else 0.0
        if not (weight or ended or running):
            return inf
        typical = sum(ended) / len(ended) if ended else before
        lengths = [*ended, *(max(typical, _TO_COME * tokens) for tokens in running)]
        return (weight * before + sum(lengths)) / (weight + len(lengths))

    def order(self, groups: Sequence[int], running: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the places of waiting requests in the order in which they are to start.

        Negative groups come first: somebody waits for these probes of new weights. A validation has no others.

        Args:
            groups: Group of each waiting request.
            running: Tokens so far of the responses that are being written, by group.
        """
        lengths = {group: self.expected(group, running.get(group, ())) for group in {*groups}}
        first = {group: place for place, group in reversed([*enumerate(groups)])}

        def rank(place: int) -> tuple[bool, float]:
            group = groups[place]
            return group >= 0, 0.0 if lengths[group] == inf and place != first[group] else -lengths[group]

        return sorted(range(len(groups)), key=rank)
