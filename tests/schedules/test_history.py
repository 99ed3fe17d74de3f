"""Earlier answers to a prompt: what is kept, what is forgotten, and what nobody could use is refused."""

from array import array
from pathlib import Path

import pytest
import torch

from tlt_lightning import EarlierAnswers, TransformersEngine
from tlt_lightning.rollout import Response
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.history import Answered, AnswerHistory
from tlt_lightning.schedules.partial_rollout import PartialRollout
from tlt_lightning.schedules.under_way import RolloutUnderWay


def answered(**texts: list[list[int]]) -> Answered:
    """A rank's answers, by `p<prompt>`."""
    own = Answered()
    for name, held in texts.items():
        own.texts.extend((int(name[1:]), array("i", text)) for text in held)
        own.lengths.extend((int(name[1:]), len(text)) for text in held)
    return own


def learn(history: AnswerHistory, *ranks: Answered) -> None:
    history.learn(ranks[-1], lambda own: ranks)


def texts_of(history: AnswerHistory) -> dict[int, list[list[int]]]:
    return {prompt: [text.tolist() for text in held] for prompt, held in history.texts.items()}


def test_the_last_answers_of_all_ranks_are_kept() -> None:
    history = AnswerHistory(EarlierAnswers())
    learn(history, answered(p1=[[5, 6], [7]], p2=[[8]]), answered(p3=[[9]]))
    assert texts_of(history) == {1: [[5, 6], [7]], 3: [[9]], 2: [[8]]}
    assert history.mean_lengths == {1: 1.5, 2: 1, 3: 1}
    before = history.copy()
    learn(history, answered(p2=[[3, 3, 3]]))
    assert texts_of(history) == {1: [[5, 6], [7]], 3: [[9]], 2: [[3, 3, 3]]}
    assert texts_of(before)[2] == [[8]]
    assert before.mean_lengths[2] == 1


@pytest.mark.parametrize(("max_tokens", "kept"), [(4, {1, 2}), (3, {2}), (2, {2}), (1, set())])
def test_as_many_tokens_are_kept_as_are_allowed_and_none_more(max_tokens: int, kept: set[int]) -> None:
    history = AnswerHistory(EarlierAnswers(max_tokens=max_tokens))
    learn(history, answered(p1=[[1, 1]], p2=[[2, 2]]))
    assert {*history.texts} == kept


def test_prompts_answered_least_recently_are_forgotten_first() -> None:
    history = AnswerHistory(EarlierAnswers(max_tokens=5))
    learn(history, answered(p1=[[1, 1]], p2=[[2, 2]]))
    learn(history, answered(p1=[[1, 1, 1]]))
    learn(history, answered(p3=[[3, 3]]))
    assert texts_of(history) == {1: [[1, 1, 1]], 3: [[3, 3]]}
    assert set(history.mean_lengths) == {1, 2, 3}
    learn(history, answered(p4=[[4] * 7]))
    assert texts_of(history) == {}


def test_without_settings_lengths_alone_are_kept() -> None:
    history = AnswerHistory()
    learn(history, answered(p1=[[5, 6]]))
    assert (history.texts, history.mean_lengths) == ({}, {1: 2.0})


def test_a_saved_history_is_the_one_that_was(tmp_path: Path) -> None:
    history = AnswerHistory(EarlierAnswers())
    learn(history, answered(p3=[[5, 6], [7]], p1=[[8, 9]]))
    torch.save(history.state_dict(), tmp_path / "history")
    saved = torch.load(tmp_path / "history", weights_only=True)
    again, without = AnswerHistory(EarlierAnswers()), AnswerHistory()
    for other in (again, without):
        other.load_state_dict(saved)
        assert other.mean_lengths == history.mean_lengths
    assert list(texts_of(again).items()) == list(texts_of(history).items())
    assert without.texts == {}
    history.load_state_dict(AnswerHistory().state_dict())
    assert history.texts == {}


def course_of(responses: list[Response], earlier: dict[int, list[list[int]]]) -> RolloutUnderWay:
    group = PendingGroup(prompt=6, draw=6, drawn_in=0, begun_in=0, responses=tuple(responses))
    new = PendingGroup(prompt=7, draw=7, drawn_in=1, begun_in=1)
    return RolloutUnderWay(PartialRollout(), RolloutDemand(wanted=1, iteration=1), [group, new], 2, earlier)


def test_requests_bring_earlier_answers_and_what_ended_of_their_own_group() -> None:
    ended, open_one = Response(0, [5, 1], [0, 0], "stop", (0,)), Response(1, [6], [0], "unfinished", (0,))
    course = course_of([ended, open_one], {7: [[9, 9]], 8: [[8]]})
    asked = {request.id: request.earlier_answers for request in course.requests([[2], [3]])}
    assert asked == {13: [[5, 1]], 14: [[9, 9]], 15: [[9, 9]]}


def test_what_is_learned_from_is_an_earlier_answer_and_whatever_ended_tells_a_length() -> None:
    course = course_of([], {})
    for number, reason in ((14, "stop"), (15, "stop"), (12, "stop"), (13, "unfinished")):
        course.add(Response(number, [number], [0.0], reason, (0,)))
    assert [prompt for prompt, _ in course.texts] == [7, 7]
    assert {prompt for prompt, _ in course.lengths} == {6, 7}


def test_texts_that_nobody_reads_are_refused() -> None:
    AnswerHistory().check(TransformersEngine())
    with pytest.raises(ValueError, match=r"TransformersEngine drafts from no text; use VLLMEngine"):
        AnswerHistory(EarlierAnswers()).check(TransformersEngine())


def test_the_number_of_tokens_is_whole() -> None:
    with pytest.raises(TypeError, match=r"`earlier_answers\.max_tokens` must be a whole number"):
        EarlierAnswers(max_tokens=1.5)  # type: ignore[arg-type]
