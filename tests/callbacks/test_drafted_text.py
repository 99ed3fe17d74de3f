"""A completion on the report: who wrote which piece of it."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.rollout_loop import make_rollout
from tlt_lightning.callbacks.drafted_text import MAX_CHARS, MAX_TOKENS, completion, pieces, spans
from tlt_lightning.engine.requests import joined
from tlt_lightning.rollout import Request, Response, VerifiedDraft


def response(length: int, drafts: Sequence[VerifiedDraft] = ()) -> Response:
    return Response(0, list(range(length)), [-0.5] * length, "stop", (0,), drafts)


def from_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def from_words(ids: Sequence[int]) -> str:
    """Like SentencePiece, which drops the space before the first word."""
    return " ".join(f"w{token}" for token in ids)


@pytest.mark.parametrize(
    ("length", "drafts", "expected"),
    [
        (5, [], [("", 0, 5)]),
        (5, [(0, "learned", 3, 3)], [("learned", 0, 3), ("", 3, 5)]),  # all kept: the next token is the policy's own
        (5, [(2, "ngram", 3, 1)], [("", 0, 2), ("ngram", 2, 3), ("-ngram", 3, 4), ("", 4, 5)]),
        (5, [(1, "sibling", 2, 0)], [("", 0, 1), ("-sibling", 1, 2), ("", 2, 5)]),
        (3, [(0, "learned", 5, 5)], [("learned", 0, 3)]),  # it ends within the draft
        (4, [(0, "learned", 1, 1), (2, "learned", 2, 2)], [("learned", 0, 1), ("", 1, 2), ("learned", 2, 4)]),
        (0, [], []),
    ],
)
def test_spans(length: int, drafts: list[VerifiedDraft], expected: list[Any]) -> None:
    assert spans(response(length, drafts)) == expected


def test_kept_tokens_are_counted_up_to_the_end_of_the_response() -> None:
    assert response(9, [(0, "learned", 2, 2), (3, "ngram", 4, 1), (6, "learned", 5, 5)]).num_kept == {
        "learned": 5,
        "ngram": 1,
    }


@pytest.mark.parametrize("decode", [from_bytes, from_words])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_the_text_whoever_drafted(decode: Callable[[Sequence[int]], str], seed: int) -> None:
    draw, ids, drafts, at = random.Random(seed), list("naïve 東京 → 🙂 x".encode() * 3), list[VerifiedDraft](), 0
    while at < len(ids):
        kept = draw.randint(0, 3)
        drafts.append((at, draw.choice(["learned", "sibling"]), 3, kept))
        at += kept + draw.randint(1, 3)
    made = list(pieces(Response(0, ids, [0.0] * len(ids), "stop", (0,), drafts), decode, MAX_TOKENS))
    assert "".join(text for _, text in made) == decode(ids)
    assert {who for who, _ in made} >= {"learned", "sibling", "-learned", ""}
    assert not any("\ufffd" in text for _, text in made)


def test_of_a_long_response_the_middle_is_left_out() -> None:
    made = list(pieces(response(1000, [(5, "ngram", 2, 2), (300, "learned", 600, 600)]), from_words, 400))
    assert [who for who, _ in made] == [
        "",
        "ngram",
        "",
        "…",
        "",
    ]
    assert made[2][1].split()[-1] == "w299"
    assert made[3][1] == "600 tokens"
    assert made[4][1].split() == [f"w{token}" for token in range(901, 1000)] or made[4][1].split()[0] == "w900"


def test_a_completion_has_a_bounded_size_and_no_number_that_json_lacks() -> None:
    rollout = make_rollout(float("nan"), length=20_000)
    rollout.prompt.text, rollout.prompt.answer = "p" * 50_000, "a" * 50_000
    shown = completion(rollout, from_words)
    assert shown["reward"] is None
    assert sum(len(text) for _, text in shown["pieces"]) < 8 * MAX_TOKENS
    assert len(shown["prompt"]) < MAX_CHARS + 10 > len(shown["answer"])


def test_a_draft_ends_with_its_turn() -> None:
    observed = response(4, [(2, "ngram", 5, 5)]).observing([9])
    assert spans(observed) == [("", 0, 2), ("ngram", 2, 4), ("environment", 4, 5)]


def test_what_an_environment_said_stands_between_turns() -> None:
    talk = response(3, [(0, "ngram", 1, 0)]).observing([9, 8])
    went_on = joined(Request(0, [2], written=talk), response(2, [(0, "sibling", 2, 2)])).observing([7])
    assert spans(went_on) == [
        ("-ngram", 0, 1),
        ("", 1, 3),
        ("environment", 3, 5),
        ("sibling", 5, 7),
        ("environment", 7, 8),
    ]
