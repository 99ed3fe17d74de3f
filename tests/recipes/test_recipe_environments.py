"""The environments of the recipes and of the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.environments.test_runs import settings
from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import Sampling
from tlt_lightning.commands.starter import RECIPES
from tlt_lightning.environments.environments import Environments
from tlt_lightning.recipes.environments import Calculator, CodeTester, CountdownTries

PAGE = (Path(__file__).parents[2] / "docs/your_environment.md").read_text()


def of_the_page(title: str, name: str) -> Any:
    code = re.findall(rf'```python title="{title}"\n(.*?)```', PAGE, re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": title}
    exec(code, names)
    return names[name]


def test_a_wrong_answer_is_followed_by_the_question_and_a_late_one_is_worth_less() -> None:
    row = {"prompt": "make 42 from 7 6 :", "answer": 42, "numbers": [7, 6]}
    game = CountdownTries(tries=3, patience=0.5)
    game.reset(**row)
    assert game.step("<answer> 7 + 6") == row["prompt"]
    assert game.step("<answer> 7 * 6") is None
    assert game.get_reward() == 0.5
    game.reset(**row)
    assert [game.step("no") for _ in range(3)] == [row["prompt"], row["prompt"], None]
    assert game.get_reward() == 0


def test_a_calculator_computes_and_says_what_it_cannot() -> None:
    assert [*Environments(Calculator).tools] == ["calculate"]
    assert [Calculator().calculate(6, sign, 3) for sign in "+-*/"] == [9, 3, 18, 2]
    with pytest.raises(ValueError, match="no such operation: %"):
        Calculator().calculate(1, "%", 2)


def test_code_is_tried_in_the_sandbox() -> None:
    tester = CodeTester()
    tester.reset(test=["assert double(2) == 4"])
    assert tester.try_code("def double(x): return x") == "Some test fails."
    assert tester.get_reward() == 0
    assert tester.try_code("def double(x): return 2 * x") == "All tests pass."
    assert tester.get_reward() == 1


def test_code_for_a_row_of_the_recipe_is_tried_until_it_passes() -> None:
    row = json.loads((RECIPES / "assets/formats/humaneval.jsonl").read_text().splitlines()[0])
    tester = CodeTester()
    tester.reset(**row)
    assert tester.try_code(row["prompt"] + "    return values") == "Some test fails."
    assert tester.try_code(row["prompt"] + row["canonical_solution"]) == "All tests pass."
    assert tester.get_reward() == 1


def test_the_environments_of_the_page_do_what_it_says(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    guessing = of_the_page("my_environment.py", "Guessing")
    environments = Environments(guessing)
    game = environments.take()
    assert [*environments.tools] == ["guess"]
    assert game.reset(answer=7) == " It is at most 9."
    assert [game.guess(number) for number in (5, 8, 7)] == ["higher", "lower", "yes"]
    assert game.get_reward() == 1
    doubling = of_the_page("my_game.py", "Doubling")
    data = make_data(prompts_path, **settings(environment=doubling, sampling=Sampling(max_tokens=20)))
    trainer = make_trainer(tmp_path, max_epochs=1, limit_val_batches=2)
    trainer.fit(make_module(policy_path), data)
    assert trainer.callback_metrics["environment/turns"] == 3
    assert {*trainer.callback_metrics} >= {"reward/Doubling", "environment/failures", "environment/failed_calls"}
    assert trainer.callback_metrics["val/accuracy"] == 0  # of the environment's reward; nothing is learned yet
