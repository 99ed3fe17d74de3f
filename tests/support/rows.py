"""Rows in the formats of the public data sets that recipes name, written by us, and responses to them."""

import json
from pathlib import Path
from typing import Any

FORMATS = Path(__file__).parents[2] / "recipes/assets/formats"


def _read(task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FORMATS / f"{task}.jsonl").read_text().splitlines()]


GSM8K = _read("gsm8k")
GSM8K_GOOD = ["48 made, 31 sold, so \\boxed{17}.", "That is \\boxed{12000} dollars."]
GSM8K_BAD = ["\\boxed{18}", "no idea"]
ARC = _read("arc")
ARC_GOOD = ["Metals conduct. The answer is (B).", "They take in CO2. The answer is (4)"]
ARC_BAD = ["The answer is (A).", "The answer is (2)."]
HUMANEVAL = _read("humaneval")
HUMANEVAL_GOOD = [f"Here:\n```python\n{row['prompt']}{row['canonical_solution']}```" for row in HUMANEVAL]
HUMANEVAL_BAD = ["```python\ndef double_evens(values):\n    return values\n```", "I refuse."]
