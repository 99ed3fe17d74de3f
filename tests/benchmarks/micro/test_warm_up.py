"""`python -m benchmarks warm_up`: heads taught on the texts of several writers, and by two schedules."""

import json
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.common.arguments import ASSETS
from benchmarks.micro import warm_up
from recipes.assets.make_countdown import ANSWER, EOS, HASTY_SHARE, HIT, sample_question, sample_response
from tests.data.test_formats import save_target
from tlt_lightning.rewards.countdown import countdown


def test_one_writer_searches_longer_than_the_policy_was_taught_to_and_one_not_at_all() -> None:
    rng = random.Random(0)
    questions = [sample_question(rng) for _ in range(200)]
    answers = [[searcher(each, rng) for each in questions] for searcher in warm_up.WRITERS.values()]
    taught = [sample_response(each, rng, HASTY_SHARE) for each in questions]
    patient, alone = ([statistics.mean(map(len, part)) for part in (each, taught)] for each in answers)
    assert patient[0] > 1.5 * patient[1]
    assert alone[0] < alone[1] / 2
    assert all(answer[0] == ANSWER and answer[-1] == EOS and HIT not in answer for answer in answers[1])
    texts = [" ".join(answer[:-1]) for answer in answers[1]]
    assert all(countdown(each.prompt, text, each.row) == 1.0 for each, text in zip(questions, texts, strict=True))


@pytest.mark.slow
def test_a_writer_answers_other_questions_than_heads_are_judged_on(tmp_path: Path) -> None:
    path = warm_up.write(tmp_path / "alone.jsonl", warm_up.solve, 40_000, seed=0)
    asked = {json.loads(line)["prompt"] for line in path.read_text().splitlines()}
    held_out = {json.loads(line)["prompt"] for line in (ASSETS / "val.jsonl").read_text().splitlines()}
    assert len(asked) > 1000
    assert not asked & held_out
    assert 40_000 <= sum(len(text.ids) for text in warm_up.read(path)) < 40_100


@pytest.mark.vllm
@pytest.mark.slow
def test_each_writer_and_schedule_teaches_a_head_which_is_judged_on_other_questions(tmp_path: Path) -> None:
    warm_up.main(["--tiny", "--tokenizer", save_target(tmp_path / "tokenizer"), "--out", str(tmp_path)])
    results = json.loads((tmp_path / "warm_up.json").read_text())
    found = {(run["writer"], run["packs"], run["schedule"]): run["tokens_per_step"] for run in results["runs"]}
    assert list(found) == [
        *((warm_up.OWN, packs, way) for packs in (1, 2, 3) for way in (warm_up.CONSTANT, warm_up.COSINE)),
        *((writer, 2, warm_up.CONSTANT) for writer in warm_up.WRITERS),
    ]
    assert found[warm_up.OWN, 3, warm_up.CONSTANT] > found[warm_up.OWN, 1, warm_up.CONSTANT] >= 1
    # A step of one is at the whole rate; of three, the second and third are lower.
    assert found[warm_up.OWN, 1, warm_up.COSINE] == found[warm_up.OWN, 1, warm_up.CONSTANT]
    assert found[warm_up.OWN, 3, warm_up.COSINE] < found[warm_up.OWN, 3, warm_up.CONSTANT]
    assert len(set(found.values())) == 7
    assert results["held_out"] == 24
    assert min(results["stopwatch"]["tokens_per_second"]) > 0
    report = (tmp_path / "warm_up.md").read_text()
    assert (
        f"| 3 | {found[warm_up.OWN, 3, warm_up.CONSTANT]:.2f} | {found[warm_up.OWN, 3, warm_up.COSINE]:.2f} |" in report
    )
    assert "By a stopwatch, " in report
