import os
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from tlt_lightning.data.prompts import PromptSource, load_prompts
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rewards import RewardPool, RewardTerm
from tlt_lightning.tasks import ReasoningGym, verify

EASY = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def test_questions_are_distinct_repeatable_and_as_hard_as_asked() -> None:
    rows = list(ReasoningGym("chain_sum", size=120, seed=3, config=EASY))
    assert rows == list(ReasoningGym("chain_sum", size=120, seed=3, config=EASY))
    assert rows != list(ReasoningGym("chain_sum", size=120, seed=4, config=EASY))
    assert len({row["prompt"] for row in rows}) == 120
    assert {row["metadata"]["num_terms"] for row in rows} == {2}
    assert {row["metadata"]["num_terms"] for row in ReasoningGym("chain_sum", config={"min_terms": 5})} == {5, 6}


def test_train_and_held_out_questions_of_one_source_are_disjoint(policy_path: str) -> None:
    rows = ReasoningGym("gsm_symbolic", size=30)
    tokenizer = load_tokenizer(policy_path)
    train, val = (
        {prompt.text for prompt in load_prompts(PromptSource(rows=rows, split=split), tokenizer, max_prompt_tokens=500)}
        for split in ("train[10:]", "train[:10]")
    )
    assert (len(train), len(val), train & val) == (20, 10, set())


def test_the_verifier_scores_the_whole_response_or_its_last_answer_block() -> None:
    row = ReasoningGym("chain_sum", size=1, config=EASY)[0]
    right, wrong = row["answer"], str(int(row["answer"]) + 1)
    responses = [
        *(f" {right}\n", f"<answer>{wrong}</answer> no, <answer>{right}</answer>", f"<think>{wrong}</think>\n{right}"),
        *(wrong, f"It is {right}."),
    ]
    pool = RewardPool([RewardTerm(function=verify)])
    for number, response in enumerate(responses):
        pool.submit(number, row["prompt"], response, row)
    scores = [score["verify"] for score in pool.collect().values()]
    pool.close()
    assert scores[:4] == [1.0, 1.0, 1.0, 0.0]
    assert 0 < scores[4] < 0.5  # the library's part for an answer among other words


@pytest.mark.parametrize("answer", ["9**9**9", "<answer>9 ** (9 ** 9)</answer>", "9**9*9**9**9"])
def test_a_huge_number_does_not_stop_the_run(answer: str, monkeypatch) -> None:
    monkeypatch.setattr("tlt_lightning.rewards.children.TIME_LIMIT", 0.5)
    with pytest.raises(TimeoutError):
        verify("", answer, ReasoningGym("countdown", size=1)[0])


def test_an_answer_that_is_run_reaches_neither_this_process_nor_the_next_answer(tmp_path: Path) -> None:
    row = ReasoningGym("countdown", size=1)[0]
    for attack in (f"open('{tmp_path}/here', 'w')", "__import__('builtins').__dict__.update(sorted=bool)"):
        assert verify("", attack, row) < 0.1
    assert verify("", str(row["metadata"]["target"]), row) < 0.1
    assert verify("", row["answer"], row) == 1.0
    assert os.listdir(tmp_path) == []


def test_a_pool_begins_to_load_the_verifiers_before_the_first_response(monkeypatch) -> None:
    loads: list[int] = []
    monkeypatch.setattr(verify, "load", lambda: loads.append(1))
    RewardPool([RewardTerm(function=verify)]).close()
    assert loads == [1]


def test_powers_of_an_answer_are_no_huge_number() -> None:
    for row in ReasoningGym("polynomial_multiplication", size=10):
        assert verify("", row["answer"], row) == 1.0


def test_every_answer_of_gsm_symbolic_passes_its_own_verifier() -> None:
    rows = ReasoningGym("gsm_symbolic", size=50, seed=1)
    assert {verify("", f"so <answer>{row['answer']}</answer>", row) for row in rows} == {1.0}


def test_the_command_line_names_task_and_difficulty() -> None:
    parser = ArgumentParser()
    parser.add_argument("--source", type=PromptSource)
    rows = {
        "class_path": "tlt_lightning.tasks.ReasoningGym",
        "init_args": {"task": "chain_sum", "size": 90, "config": EASY},
    }
    parsed = parser.parse_object({"source": {"rows": rows, "split": "train[:40]"}})
    source = parser.instantiate_classes(parsed).source
    assert len(source.read()) == 40
    assert source.name == "`rows`"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "chain_sum", "size": 500, "config": EASY}, "`size` 500 .* 200 distinct questions"),
        ({"task": "chain_sum", "size": 0}, "`size` must be at least 1"),
        ({"task": "zzz"}, "Dataset 'zzz' not registered"),
    ],
)
def test_what_the_task_cannot_do_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": 3}, "`task` must be a string, got 3"),
        ({"task": "chain_sum", "size": 2.5}, "`size` must be a whole number"),
        ({"task": "chain_sum", "seed": "x"}, "`seed` must be a whole number"),
        ({"task": "chain_sum", "config": 3}, "`config` must be a dict or None, got 3"),
    ],
)
def test_wrong_types_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ReasoningGym(**arguments)


def test_rows_of_no_task_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got the columns \['answer', 'prompt'"):
        verify("", "1", {"prompt": "", "answer": "1"})
