"""Write texts that show SmolLM2 how to call a calculator: sums and differences, of which half are answered without it.

    python recipes/assets/make_calculator.py recipes/assets/calculator/calls.jsonl

Prompts are worded as in a rollout with `Calculator`, for a policy whose chat template describes no tools.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.turns import Turns
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.recipes.environments import Calculator

QUESTION = "State the final answer to the following arithmetic problem: {} ="
ANY_POLICY = str(Path(__file__).parent / "countdown/policy")


def rows_of(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of `prompt` and `answer`, the turns behind it: every second calls."""
    draw, tools = random.Random(seed), [*Environments(Calculator).tools.values()]
    turns = Turns(load_tokenizer(ANY_POLICY), "{{ messages[0]['content'] }}", tools=tools)
    rows = []
    for index in range(number):
        calls, sign, a, b = index % 2 == 0, draw.choice("+-"), draw.randint(10, 999), draw.randint(10, 999)
        result, call = Calculator().calculate(a, sign, b), {"a": a, "operation": sign, "b": b}
        said = [
            ("assistant", f"<tool_call>\n{json.dumps({'name': 'calculate', 'arguments': call})}\n</tool_call>"),
            ("tool", f"{result}"),
        ] * calls + [("assistant", f"{result}")]
        rows.append(
            {
                "prompt": turns.prompt([{"role": "user", "content": QUESTION.format(f"{a} {sign} {b}")}]),
                "answer": [{"role": role, "content": content} for role, content in said],
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(80)))
