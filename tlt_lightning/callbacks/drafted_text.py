"""Show a completion: its scores, and its text in pieces that one drafter, or the policy itself, has written."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from tlt_lightning.callbacks.report_page import in_five_digits
from tlt_lightning.rollout import Response, Rollout

MAX_TOKENS, MAX_CHARS = 1600, 4000
"""Most tokens that are shown of a response, and characters of its prompt and of its answer."""

Span = tuple[str, int, int]
"""Writer of some tokens, the first of them, and the one behind the last.

The writer is a drafter, whose draft was kept; the empty string for the policy; `ENVIRONMENT`; or `-` and a drafter for
a token of the policy in the place of a draft that was refused.
"""
ENVIRONMENT = "environment"
"""Writer of what was observed."""

UNFINISHED = "\ufffd"
"""The character that a tokenizer decodes a part of a character to."""

Decode = Callable[[Sequence[int]], str]


def completion(rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Return a rollout for the page, as primitives of bounded size; `decode` is the tokenizer's."""
    answer = rollout.prompt.answer
    return {
        "prompt": _cut(rollout.prompt.text),
        "answer": None if answer is None else _cut(str(answer)),
        "reward": in_five_digits(rollout.reward),
        "rewards": {name: in_five_digits(score) for name, score in rollout.rewards.items()},
        "tokens": len(rollout.response.token_ids),
        "cut": rollout.is_truncated,
        "kept": rollout.response.num_kept,
        "pieces": [list(piece) for piece in pieces(rollout.response, decode, MAX_TOKENS)],
    }


def spans(response: Response) -> list[Span]:
    """Return the spans of a response, in order and without gaps; neighbours differ."""
    begun, cut = 0, list[Span]()
    for at, drafter, num_drafted, num_kept in response.drafts:
        length = response.end_of_turn(at)
        kept = min(at + num_kept, length)  # a turn may end within a draft
        end = min(kept + 1, length)
        cut += [("", begun, at), (drafter, at, kept), ("" if num_kept == num_drafted else f"-{drafter}", kept, end)]
        begun = end
    cut.append(("", begun, len(response.token_ids)))
    filled = ((who, first, last) for who, first, last in _with_observed(cut, response.observed) if last > first)
    runs = (list(run) for _, run in groupby(filled, key=itemgetter(0)))
    return [(run[0][0], run[0][1], run[-1][2]) for run in runs]


def _with_observed(cut: Sequence[Span], observed: Sequence[tuple[int, int]]) -> Iterator[Span]:
    """Yield spans with those of an environment taken out of the policy's, within which they lie."""
    for who, first, last in cut:
        for start, length in observed:
            if not who and first <= start < last:
                yield "", first, start
                yield ENVIRONMENT, start, start + length
                first = start + length
        yield who, first, last


def pieces(response: Response, decode: Decode, most: int) -> Iterator[tuple[str, str]]:
    """Yield who wrote each piece of a response, and its text; about `most` tokens in all.

    Of a longer response the beginning and the last quarter of `most` are shown, and `…` between them. A character of
    several tokens belongs to whoever wrote the last of them.
    """
    ids, cut = list(response.token_ids), spans(response)
    tail = len(ids) - most // 4
    ranges = [(0, len(ids))] if len(ids) <= most else [(0, most - most // 4), (tail, len(ids))]
    for low, high in ranges:
        if low:
            yield "…", f"{low - ranges[0][1]:,} tokens"
        context = shown = low  # tokens whose text is out, and where decoding begins to give what follows
        for who, first, last in cut:
            first, last = max(first, low), min(last, high)
            if first >= last:
                continue
            # With the piece before, as a stream is decoded: a token's text may depend on what it follows.
            before, text = decode(ids[context:shown]), decode(ids[context:last])
            if text.endswith(UNFINISHED) and last < high:
                continue
            yield who, text[len(before) :]
            context, shown = shown, last


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS // 2]} … {text[-MAX_CHARS // 2 :]}"
