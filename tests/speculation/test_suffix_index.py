"""Drafting by look-up: proposals are what was really written, preferred as promised, and forgettable."""

import random

import pytest

from tlt_lightning.speculation import SuffixIndex, suffix_index
from tlt_lightning.speculation.suffix_index import MATCH_LENGTHS


def proposed(index, group, tail, num):
    return index.look_up(group, tail, num)[0]


def occurs(texts: list[list[int]], wanted: list[int]) -> bool:
    return any(text[i : i + len(wanted)] == wanted for text in texts for i in range(len(text) - len(wanted) + 1))


@pytest.mark.parametrize("seed", range(5))
def test_proposal_is_always_a_continuation_that_occurred_after_the_match(seed):
    generator = random.Random(seed)
    index, texts, num_found = SuffixIndex(), [[] for _ in range(4)], 0
    for _ in range(400):
        number = generator.randrange(4)
        new = [generator.randrange(5) for _ in range(generator.randint(1, 4))]
        index.append("group", number, new)
        texts[number] += new
        tail = generator.choice(texts)[-12:]
        tokens, match_length = index.look_up("group", tail, 5)
        if tokens:
            num_found += 1
            assert 2 <= match_length <= 8
            assert len(tokens) <= 5
            assert occurs(texts, tail[-match_length:] + tokens)
    assert num_found > 200


@pytest.mark.parametrize("seed", range(5))
def test_longest_match_wins(seed):
    generator = random.Random(seed)
    index, text = SuffixIndex(), [generator.randrange(4) for _ in range(300)]
    index.append(0, 0, text)
    for _ in range(50):
        tail = [generator.randrange(4) for _ in range(8)]
        longest = max((n for n in MATCH_LENGTHS if occurs([text[:-1]], tail[-n:])), default=0)
        assert index.look_up(0, tail, 3)[1] == longest


def test_most_frequent_continuation_wins_then_the_most_recent():
    index = SuffixIndex()
    index.append(0, "a", [1, 2, 3])
    index.append(0, "b", [1, 2, 4])
    assert proposed(index, 0, [1, 2], 1) == [4]  # as frequent, more recent
    index.append(0, "c", [1, 2, 3])
    assert proposed(index, 0, [1, 2], 1) == [3]
    index.append(0, "d", [1, 2, 5])
    assert proposed(index, 0, [1, 2], 1) == [3]  # frequent beats recent
    for name, token in (("e", 3), ("f", 3), ("g", 4)):
        index.append(1, name, [1, 2, token])
    assert proposed(index, 1, [1, 2], 1) == [3]  # also where the frequent one was the only one at first


def test_draft_goes_on_as_the_most_recent_occurrence_did():
    index = SuffixIndex()
    index.append(0, "a", [1, 2, 3, 7, 7])
    index.append(0, "b", [1, 2, 3, 8, 8])
    assert proposed(index, 0, [1, 2], 3) == [3, 8, 8]


def test_own_text_is_looked_up_while_it_grows():
    index = SuffixIndex()
    written = []
    for token in (5, 6, 7, 8, 5):
        written.append(token)
        index.append("request", "request", [token])
        assert proposed(index, "request", written, 3) == []  # the tail is not a match of itself
    index.append("request", "request", [6])
    assert proposed(index, "request", [*written, 6], 3) == [7, 8, 5]


def test_siblings_help_and_strangers_do_not():
    index = SuffixIndex()
    index.append("prompt 1", "response 1", [1, 2, 3, 4])
    index.append("prompt 2", "response 1", [1, 2, 9, 9])
    assert proposed(index, "prompt 1", [0, 1, 2], 2) == [3, 4]
    assert proposed(index, "prompt 3", [0, 1, 2], 2) == []


def test_texts_of_a_group_do_not_run_into_each_other():
    index = SuffixIndex()
    index.append(0, "a", [1, 2])
    index.append(0, "b", [3, 4])
    assert proposed(index, 0, [1, 2], 2) == []
    index.append(0, "a", [5])
    assert proposed(index, 0, [1, 2], 2) == [5]


def test_clearing_forgets_one_group_or_all():
    index = SuffixIndex()
    for group in "xyz":
        index.append(group, 0, [1, 2, 3])
    index.clear("x")
    assert proposed(index, "x", [1, 2], 1) == []
    assert proposed(index, "y", [1, 2], 1) == [3]
    assert index.num_tokens == 6
    index.clear("unknown")
    index.clear()
    assert proposed(index, "y", [1, 2], 1) == []
    assert index.num_tokens == 0


def test_memory_is_bounded_by_forgetting_the_group_that_was_quiet_longest(monkeypatch):
    monkeypatch.setattr(suffix_index, "MAX_TOKENS", 10)
    index = SuffixIndex()
    index.append("x", 0, [1, 2, 3, 4])
    index.append("y", 0, [1, 2, 3, 4])
    index.append("x", 0, [5])
    index.append("z", 0, [1, 2])
    assert index.num_tokens == 7
    assert proposed(index, "y", [1, 2], 1) == []
    assert proposed(index, "x", [1, 2], 1) == [3]
    index.append("x", 0, range(20))
    assert index.num_tokens <= 10
    index.clear()
    index.append("x", 0, range(10))  # as many as are allowed
    assert index.num_tokens == 10
    index.append("x", 0, [10])
    assert index.num_tokens == 0


def test_common_matches_keep_a_bounded_number_of_continuations():
    index = SuffixIndex()
    for token in range(100, 200):
        index.append(0, token, [1, 2, 7])
        index.append(0, -token, [1, 2, token])
    assert proposed(index, 0, [1, 2], 1) == [7]
    (entry,) = (entry for entry in index._groups[0].follows.values() if not isinstance(entry, int))
    assert len(entry) == 16


def test_of_many_continuations_the_rarest_makes_room_for_a_new_one_alone():
    index = SuffixIndex()
    for token in (*range(100, 116), 100, 116):  # one comes again when there is no room, and then a new one
        index.append(0, token, [1, 2, token])
    assert proposed(index, 0, [1, 2], 1) == [100]
    index.append(0, 101, [1, 2, 101])  # it had made room
    assert proposed(index, 0, [1, 2], 1) == [100]


def test_equal_hashes_are_not_equal_texts():
    assert hash((-1, 5)) == hash((-2, 5))
    index = SuffixIndex()
    index.append(0, 0, [-1, 5, 9])
    assert proposed(index, 0, [-2, 5], 1) == []
    assert proposed(index, 0, [-1, 5], 1) == [9]


def test_short_tails_and_no_drafts_give_nothing():
    index = SuffixIndex()
    index.append(0, 0, [1, 2, 3, 4])
    assert proposed(index, 0, [3], 4) == []
    assert proposed(index, 0, [1, 2, 3], 0) == []
    assert proposed(index, 0, [1, 2, 3], 4) == [4]
