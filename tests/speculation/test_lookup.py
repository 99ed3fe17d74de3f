"""Looking up how texts go on, and telling which source drafts better."""

import json

import pytest

from tlt_lightning.speculation import lookup
from tlt_lightning.speculation.lookup import LEARNED, PRIOR_COUNT, TRIAL_PERIOD, LookupDrafter, LookupScores
from tlt_lightning.speculation.strategy import Strategy

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
SIBLING, NGRAM, MIXED = Strategy(3, "sibling"), Strategy(3, "ngram"), Strategy(3, "mixed")


class Texts(LookupDrafter):
    """A look-up drafter together with the texts that vLLM holds."""

    def __init__(self, siblings: bool = True, ngram: bool = False) -> None:
        super().__init__(siblings=siblings, ngram=ngram)
        self.written: dict[str, list[int]] = {}
        for request_id, prompt in {"a": PROMPT, "b": PROMPT, "other": [*PROMPT[:-1], 99]}.items():
            self.begin(request_id, prompt)

    def begin(self, request_id: str, prompt: list[int]) -> None:
        self.written[request_id] = list(prompt)
        self.add(request_id, self.written[request_id])

    def grow(self, request_id: str, tokens: list[int]) -> None:
        self.written[request_id] += tokens
        self.next_step()

    def drafts(self, request_id: str, text: list[int], strategy: Strategy = SIBLING) -> list[int]:
        """Draft for a request that has written `text`, prompt included."""
        self.written[request_id][:] = text
        found = self.propose(request_id, strategy, 3)
        assert found is None or found.num_known == len(text)
        return found.tokens if found else []


def test_siblings_draft_for_each_other_and_for_nobody_else() -> None:
    made = Texts()
    made.grow("a", [20, 21, 22, 23])
    assert made.drafts("b", PROMPT) == [20, 21, 22]
    assert made.drafts("b", [*PROMPT, 20, 21]) == [22, 23]
    assert made.drafts("other", [*PROMPT[:-1], 99, 20, 21]) == []
    made.grow("a", [24])
    assert made.drafts("b", [*PROMPT, 20, 21]) == [22, 23, 24]


def test_a_text_shorter_than_a_match_is_looked_up_whole() -> None:
    made = Texts()
    for request_id in ("c", "d"):
        made.begin(request_id, [7, 8])
    made.grow("c", [9])
    assert made.drafts("d", [7, 8]) == [9]


def test_the_text_itself_is_looked_up_alone_when_asked_for() -> None:
    made = Texts(ngram=True)
    made.grow("a", [20, 21, 22])
    assert made.drafts("b", [*PROMPT, 20, 21], NGRAM) == []
    assert made.drafts("b", [*PROMPT, 3, 4], NGRAM) == [5, 6, 7]
    assert made.drafts("b", [*PROMPT, 20, 21], SIBLING) == [22]


def test_where_siblings_are_off_none_is_looked_in_and_a_prompt_is_read_by_its_first_response() -> None:
    made = Texts(siblings=False, ngram=True)
    made.grow("a", [20, 21, 22, 23, 24])
    assert made.drafts("b", [*PROMPT, 20, 21], MIXED) == []
    made, prompt = Texts(), list(range(30, 50))
    made.begin("c", prompt)
    assert made.drafts("c", [*prompt, 31, 32]) == [33, 34, 35]


def test_responses_are_looked_up_until_the_rollout_ends() -> None:
    made = Texts()
    made.grow("a", [20, 21, 22])
    made.remove("a")
    assert made.drafts("b", [*PROMPT, 20, 21]) == [22]
    made.clear()
    made.begin("c", PROMPT)
    assert made.drafts("c", [*PROMPT, 20, 21]) == []
    assert made.propose("b", SIBLING, 3) is None


def test_nothing_is_read_before_it_is_looked_up_and_no_more_than_a_step_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Texts(ngram=True)
    made.grow("a", list(range(100, 150)))
    made.grow("b", [20])
    assert {index.num_tokens for index in made.indices.values()} == {0}
    monkeypatch.setattr(lookup, "READ_PER_STEP", 16)
    counts = []
    for _ in range(5):
        made.next_step()
        made.drafts("b", [*PROMPT, 20])
        counts.append(made.indices["sibling"].num_tokens)
    assert counts == [16, 32, 48, 64, 69]  # all of a, then b from the end of the prompt on
    assert made.drafts("b", [20, 148]) == []
    assert made.drafts("b", [20, 147, 148]) == [149]
    assert made.indices["ngram"].num_tokens == 11


def test_a_text_that_has_ended_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "READ_PER_STEP", 8)
    made = Texts()
    made.grow("a", [20, 21, 22, 23])
    made.remove("a")
    assert made.drafts("b", [*PROMPT, 20, 21]) == []
    made.next_step()
    assert made.drafts("b", [*PROMPT, 20, 21]) == [22, 23]
    assert [text.request_id for text in made._members[hash(tuple(PROMPT))]] == ["b"]


def test_texts_that_nobody_looks_up_are_forgotten_with_their_group() -> None:
    made = Texts()
    made.grow("a", [20, 21, 22])
    for request_id in ("a", "b"):
        made.remove(request_id)
    assert [text.request_id for members in made._members.values() for text in members] == ["other"]


def test_a_response_that_is_continued_drafts_for_its_siblings_and_they_for_it() -> None:
    made = Texts()
    made.written["c"] = [*PROMPT, 20, 21, 22, 23]
    made.add("c", made.written["c"], len(PROMPT))
    made.grow("c", [24])
    assert made.drafts("b", [*PROMPT, 20, 21]) == [22, 23, 24]
    made.grow("a", [30, 31, 32])
    assert made.drafts("c", [*PROMPT, 20, 21, 22, 23, 24, 30, 31]) == [32]
    assert made.drafts("other", [*PROMPT[:-1], 99, 20, 21]) == []


def test_the_better_source_drafts() -> None:
    made = Texts(ngram=True)
    made.grow("b", [20, 21, 22, 23, 24, 20, 21])

    def source() -> tuple[str, int]:
        found = made.propose("b", SIBLING, 3)
        assert found is not None
        assert found.tokens == [22, 23, 24]
        return found.source

    assert source() == ("sibling", 2)  # who also reads the text itself
    made.scores.update(("sibling", 2), 0)
    assert source() == ("ngram", 2)
    for _ in range(20):
        made.scores.update(("ngram", 2), 0)
    assert source() == ("sibling", 2)


def test_mixed_with_a_head_only_what_is_expected_to_do_better_is_drafted() -> None:
    made = Texts()
    made.grow("a", [20, 21, 22, 23])
    made.grow("b", [20])
    found = made.propose("b", MIXED, 3)
    assert found is not None
    assert found.source == ("sibling", 8)
    for _ in range(100):
        made.scores.update(found.source, 0)
        made.scores.update(LEARNED, 2)
    assert made.propose("b", MIXED, 3) is None
    assert made.propose("b", SIBLING, 3) is not None
    tried = [made.propose("b", MIXED, 3) is not None for _ in range(TRIAL_PERIOD)]
    assert sum(tried) == 1


def test_scores_start_from_a_prior_and_forget() -> None:
    scores, source = LookupScores(), ("sibling", 8)
    assert scores.expected(LEARNED, 5) == 1
    assert scores.expected(source, 5) == 4
    assert scores.expected(source, 2) == 2
    scores.update(source, 0)
    assert scores.expected(source, 5) == 4 * PRIOR_COUNT / (PRIOR_COUNT + 1)
    scores.update(source, 1)
    assert scores.expected(source, 5) == pytest.approx((4 * PRIOR_COUNT + 1) / (PRIOR_COUNT + 2))
    for _ in range(500):
        scores.update(source, 3)
    assert abs(scores.expected(source, 5) - 3) < 0.01
    for _ in range(200):
        scores.update(source, 0)
    assert scores.expected(source, 5) < 0.1


def test_scores_are_restored() -> None:
    scores, again = LookupScores(), LookupScores()
    scores.update(("sibling", 8), 0)
    scores.update(LEARNED, 3)
    again.load_state_dict(json.loads(json.dumps(scores.state_dict())))
    assert again == scores


def test_a_run_that_clears_nothing_keeps_no_prompt_and_reads_one_that_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tlt_lightning.speculation.suffix_index.MAX_TOKENS", 60)
    made = Texts()
    for number in [*range(100, 120), 100]:
        prompt = [*range(10), number, 77, 78]
        for request_id in (f"{number} a", f"{number} b"):
            made.begin(request_id, prompt)
        made.grow(f"{number} a", [20, 21, number, 77])
        assert made.drafts(f"{number} b", [*prompt, 3, 4]) == [5, 6, 7]  # of the prompt
        for request_id in (f"{number} a", f"{number} b"):
            made.remove(request_id)
    held = [len(value) for value in vars(made).values() if isinstance(value, (dict, set)) and value is not made.written]
    assert max(held) <= 3  # those that `Texts` begins
