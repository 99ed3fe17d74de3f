"""A cycle of tail batching that does not pay is told from its numbers, once."""

from pathlib import Path

import pytest

from benchmarks.common.arguments import RESULTS
from benchmarks.end_to_end.run import read_runs
from tests.support.rl_runs import make_data, make_engine, make_module, make_trainer
from tlt_lightning import Sampling, TailBatching
from tlt_lightning.schedules.cycle import CycleDiagnosis


def cycle(longest: float, thrown: float = 100.0, waited: float = 4.0) -> list[dict[str, float]]:
    """Four short iterations and a long one, with 500 tokens learned from."""
    short = {"rollout/length_max": longest, "rollout/tokens": 75.0, "schedule/waited": 0.0}
    long = {"rollout/length_max": 2000.0, "rollout/tokens": 200.0, "schedule/waited": waited}
    return [*[short] * 4, long | {"schedule/tokens_thrown_away": thrown}]


def said(iterations: list[dict[str, float]]) -> list[tuple[int, str]]:
    diagnosis = CycleDiagnosis()
    found = [(number, diagnosis.read(metrics)) for number, metrics in enumerate(iterations, start=1)]
    return [(number, words) for number, words in found if words is not None]


def test_a_cycle_that_saves_less_than_a_quarter_of_what_it_throws_away_is_told_once() -> None:
    ((number, words),) = said(cycle(1900.0) * 3)  # 4% of the steps, a sixth of the tokens
    assert number == 5
    assert "4 short rollouts waited for responses of 1,900 tokens" in words
    assert "the longest of the cycle has 2,000. That saves at most 4% of the decoding" in words
    assert "17% of the tokens were thrown away" in words
    assert "`data.group_size`, or take PartialRollout or SynchronousSchedule" in words
    assert said([*cycle(1000.0), *cycle(1900.0)])[0][0] == 10


@pytest.mark.parametrize(
    "iterations",
    [
        cycle(1850.0),  # saves 6%
        cycle(1900.0, thrown=0.0),
        cycle(1900.0)[1:],  # resumed within a cycle
        cycle(1900.0)[:4] * 5,
    ],
)
def test_a_cycle_that_may_pay_is_left_in_peace(iterations: list[dict[str, float]]) -> None:
    assert said(iterations) == []


def test_the_cycle_that_was_measured_to_cost_a_tenth_is_told() -> None:
    runs = {run.arm: run for run in read_runs(RESULTS / "end_to_end_25m_schedules.json")}
    ((number, words),) = said([row["metrics"] for row in runs["plain+tail"].iterations])
    assert number == 5
    assert "at most 2% of the decoding steps, and 22% of the tokens" in words


@pytest.mark.vllm
def test_a_run_whose_responses_all_reach_the_limit_says_that_tail_batching_does_not_pay(
    policy_path: str, prompts_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_data(prompts_path, make_engine("vllm"), schedule=TailBatching(1.0), sampling=Sampling(max_tokens=3))
    make_trainer(tmp_path, max_epochs=4).fit(make_module(policy_path), data)
    (warning,) = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert warning.startswith("Iteration 2: `data.schedule` TailBatching does not pay: its 1 short rollout")
    assert "saves at most 0% of the decoding steps, and 33% of the tokens were thrown" in warning
