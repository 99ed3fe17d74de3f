"""Rows in the formats of the public data sets that recipes name, written by us."""

from typing import Any

GSM8K: list[dict[str, Any]] = [
    {
        "question": "A baker fills 6 trays with 8 rolls each and sells 31 rolls. How many are left?",
        "answer": "The baker makes 6 * 8 = <<6*8=48>>48 rolls.\n48 - 31 = <<48-31=17>>17 are left.\n#### 17",
    },
    {
        "question": "A ticket costs $12. How much do 1,000 tickets cost?",
        "answer": "12 * 1000 = <<12*1000=12000>>12,000 dollars.\n#### 12,000",
    },
]
GSM8K_GOOD = ["48 made, 31 sold, so \\boxed{17}.", "That is \\boxed{12000} dollars."]
GSM8K_BAD = ["\\boxed{18}", "no idea"]

ARC: list[dict[str, Any]] = [
    {
        "id": "a",
        "question": "Which of these conducts electricity best?",
        "choices": {"text": ["wood", "copper", "glass"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    },
    {
        "id": "b",
        "question": "What do plants take from the air to make sugar?",
        "choices": {"text": ["oxygen", "nitrogen", "argon", "carbon dioxide"], "label": ["1", "2", "3", "4"]},
        "answerKey": "4",
    },
]
ARC_GOOD = ["Metals conduct. The answer is (B).", "They take in CO2. The answer is (4)"]
ARC_BAD = ["The answer is (A).", "The answer is (2)."]

HUMANEVAL: list[dict[str, Any]] = [
    {
        "task_id": "own/0",
        "prompt": 'def double_evens(values):\n    """Return the list with its even numbers doubled."""\n',
        "test": (
            "def check(candidate):\n    assert candidate([1, 2, 4]) == [1, 4, 8]\n    assert candidate([]) == []\n"
        ),
        "entry_point": "double_evens",
        "canonical_solution": "    return [2 * v if v % 2 == 0 else v for v in values]\n",
    },
    {
        "task_id": "own/1",
        "prompt": 'def initials(name):\n    """Return the first letters of the words of `name`."""\n',
        "test": "def check(candidate):\n    assert candidate('Ada Lovelace') == 'AL'\n",
        "entry_point": "initials",
        "canonical_solution": "    return ''.join(word[0] for word in name.split())\n",
    },
]
HUMANEVAL_GOOD = [f"Here:\n```python\n{row['prompt']}{row['canonical_solution']}```" for row in HUMANEVAL]
HUMANEVAL_BAD = ["```python\ndef double_evens(values):\n    return values\n```", "I refuse."]
