"""Every plugin of the package keeps the duties that the kit checks."""

from pathlib import Path
from typing import Any

import pytest

from tlt_lightning import (
    AsyncRollout,
    BEGMABSelector,
    CostModelSelector,
    FixedSelector,
    PartialRollout,
    SynchronousSchedule,
    TailBatching,
    ThresholdSelector,
    objectives,
)
from tlt_lightning.gallery.answer_variety import AnswerVariety
from tlt_lightning.gallery.completions_table import CompletionsTable
from tlt_lightning.gallery.early_warning import RewardLengthWarning
from tlt_lightning.gallery.length_histogram import LengthHistogram
from tlt_lightning.rewards import Format, PythonTests, countdown, exact_match, math_equivalence, multiple_choice
from tlt_lightning.testing import (
    check_callback,
    check_objective,
    check_reward,
    check_schedule,
    check_selector,
)

KL = objectives.KLPenalty(coef=0.1)


@pytest.mark.parametrize(
    "objective",
    [
        objectives.GRPO(),
        objectives.GRPO(correction=None, loss_kl=KL, reward_kl=KL, entropy_coef=0.1),
        objectives.DAPO(overlong=objectives.OverlongPunishment(max_tokens=8, buffer_tokens=4)),
        objectives.DrGRPO(aggregation=objectives.SequenceMeanTokenSumNorm(max_tokens=64)),
        objectives.GSPO(),
        objectives.CISPO(),
        objectives.SAPO(),
        objectives.RLOO(),
        objectives.ReinforcePlusPlus(),
        objectives.ReinforcePlusPlusBaseline(),
        objectives.PPO(),
        objectives.Distillation(),
        objectives.Distillation(divergence=None, loss_kl=KL, reward_coef=0.5),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_objectives(objective: Any) -> None:
    check_objective(objective)


@pytest.mark.parametrize(
    "selector",
    [
        FixedSelector(3, "sibling"),
        FixedSelector(0),
        ThresholdSelector(3, max_running=16),
        BEGMABSelector(epsilon=0.2),
        CostModelSelector(drafters=("learned", "sibling")),
    ],
    ids=lambda selector: type(selector).__name__,
)
def test_selectors(selector: Any) -> None:
    check_selector(selector)


@pytest.mark.parametrize(
    "schedule", [SynchronousSchedule(), TailBatching(), PartialRollout(), AsyncRollout(), AsyncRollout(4)]
)
@pytest.mark.parametrize("wanted", [1, 4])
def test_schedules(schedule: Any, wanted: int) -> None:
    check_schedule(schedule, wanted)


@pytest.mark.slow
def test_callbacks_of_the_gallery(policy_path: str, tmp_path: Path) -> None:
    class Own(AnswerVariety):
        def on_new_best(self) -> None:
            """Be called by the callback itself."""

    for callback in (
        Own(),
        RewardLengthWarning(),
        CompletionsTable(str(tmp_path)),
        LengthHistogram(str(tmp_path), every_n_iterations=1),
    ):
        check_callback(callback, policy_path)


ROW = {"prompt": "What is 6 * 7?", "answer": "42"}


@pytest.mark.parametrize(
    ("reward", "row", "right", "wrong"),
    [
        (exact_match, ROW, "42", "41"),
        (math_equivalence, ROW, r"\boxed{42.0}", r"\boxed{41}"),
        (multiple_choice, {"answer": "B"}, "The answer is B", "The answer is C"),
        (countdown, {"answer": 17, "numbers": [12, 5]}, "<answer>12 + 5</answer>", "<answer>12 - 5</answer>"),
        (Format(), ROW, "<think>a</think><answer>b</answer>", "b"),
        (PythonTests(), {"test": "assert double(2) == 4"}, "```python\ndouble = lambda x: 2 * x\n```", "x = 1"),
    ],
)
def test_rewards(reward: Any, row: dict[str, Any], right: str, wrong: str) -> None:
    check_reward(reward, row, right=right, wrong=wrong)
