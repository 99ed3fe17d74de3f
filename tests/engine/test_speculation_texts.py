"""Looking up how texts go on, and telling which source drafts better."""

from tlt_lightning.engine.vllm_texts import LEARNED, PRIOR_COUNT, TRIAL_PERIOD, RunningTexts, SourceScores
from tlt_lightning.speculation.base import Strategy

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
SIBLING, NGRAM, LEARN = Strategy(3, "sibling"), Strategy(3, "ngram"), Strategy(3, "learned")


def texts(siblings: bool = True, ngram: bool = False, keeps: bool = False) -> RunningTexts:
    made = RunningTexts(siblings=siblings, ngram=ngram, keeps=keeps)
    for request_id in "ab":
        made.add(request_id, PROMPT)
    made.add("other", [*PROMPT[:-1], 99])
    return made


def tokens(made: RunningTexts, request_id: str, tail: list[int], strategy: Strategy = SIBLING) -> list[int]:
    found = made.propose(request_id, tail, strategy, 3, -1.0)
    return found.tokens if found else []


def test_siblings_draft_for_each_other_and_for_nobody_else() -> None:
    made = texts()
    made.grow("a", [20, 21, 22, 23])
    assert tokens(made, "b", [*PROMPT, 20, 21]) == [22, 23]
    assert tokens(made, "b", PROMPT) == [20, 21, 22]
    assert tokens(made, "other", [*PROMPT[:-1], 99, 20, 21]) == []
    made.grow("a", [24])
    assert tokens(made, "b", [*PROMPT, 20, 21]) == [22, 23, 24]


def test_the_text_itself_is_looked_up_alone_when_asked_for() -> None:
    made = texts(ngram=True)
    made.grow("a", [20, 21, 22])
    assert tokens(made, "b", [*PROMPT, 20, 21], NGRAM) == []
    assert tokens(made, "b", [*PROMPT, 3, 4], NGRAM) == [5, 6, 7]
    assert tokens(made, "b", [*PROMPT, 20, 21], SIBLING) == [22]


def test_answers_stay_until_the_rollout_ends_or_for_the_run() -> None:
    for keeps in (False, True):
        made = texts(keeps=keeps)
        made.grow("a", [20, 21, 22])
        made.remove("a")
        assert tokens(made, "b", [*PROMPT, 20, 21]) == [22]
        made.end_rollout()
        made.add("c", PROMPT)
        assert tokens(made, "c", [*PROMPT, 20, 21]) == ([22] if keeps else [])


def test_the_better_source_drafts() -> None:
    made = texts()
    made.grow("a", [20, 21, 22, 23])
    found = made.propose("b", [*PROMPT, 20], LEARN, 3, made.scores.expected(LEARNED, 3))
    assert found is not None
    assert found.source == ("sibling", 8)
    for _ in range(100):
        made.scores.update(found.source, 0)
        made.scores.update(LEARNED, 2)
    floor = made.scores.expected(LEARNED, 3)
    assert made.propose("b", [*PROMPT, 20], LEARN, 3, floor) is None
    tried = [made.propose("b", [*PROMPT, 20], LEARN, 3, floor) is not None for _ in range(TRIAL_PERIOD)]
    assert sum(tried) == 1


def test_scores_start_from_a_prior_and_forget() -> None:
    scores = SourceScores()
    assert scores.expected(LEARNED, 5) == 1
    assert scores.expected(("sibling", 8), 5) == 4
    assert scores.expected(("sibling", 8), 2) == 2
    scores.update(("sibling", 8), 0)
    assert scores.expected(("sibling", 8), 5) == 4 * PRIOR_COUNT / (PRIOR_COUNT + 1)
    for _ in range(500):
        scores.update(LEARNED, 3)
    assert abs(scores.expected(LEARNED, 5) - 3) < 0.01
    for _ in range(200):
        scores.update(LEARNED, 0)
    assert scores.expected(LEARNED, 5) < 0.1
