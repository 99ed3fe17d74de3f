"""Check a reward on right, wrong and odd responses."""

import warnings
from typing import Any

from tlt_lightning.rewards.pool import RewardPool
from tlt_lightning.rewards.term import RewardFunction, RewardTerm

ODD_RESPONSES = ("", " \n", "<answer>", "\\boxed{", "1/0", "\U0001f642" * 9, "9" * 5000, "(" * 5000)
"""Texts that a policy may write before it has learned anything, or after it has collapsed."""


def check_reward(reward: RewardFunction | RewardTerm, row: dict[str, Any], *, right: str, wrong: str) -> None:
    r"""Check a reward on a right, a wrong and some odd responses, by several threads at once, as in a run.

    Args:
        reward: A function, or a term with a name and a weight.
        row: A row of the data; its `prompt`, if any, is what the reward gets as the prompt. A reward that pays as much
            for this text as for `right` is warned of.
        right: A response that has to score more than `wrong`.
        wrong: A response that has to score less.

    Example:
        >>> from tlt_lightning.rewards import math_equivalence
        >>> check_reward(math_equivalence, {"prompt": "1/2 + 1/2 =", "answer": "1"}, right=r"\boxed{1}", wrong="2")
    """
    term = reward if isinstance(reward, RewardTerm) else RewardTerm(function=reward)
    prompt = str(row.get("prompt", ""))
    who, texts = f"Reward `{term.name}`", [right, wrong, prompt, *ODD_RESPONSES]

    pool = RewardPool([term])
    calls = [pool.submit(key, prompt, text, row)[0] for key, text in enumerate([*texts, *texts])]
    pool.collect()
    pool.close()
    for call in calls:
        if call.error is not None:
            failed = f"{who} fails on the response {call.response[:40]!r}: return a number for any text. {call.error!r}"
            raise AssertionError(failed) from call.error
    scores = [call.score or 0.0 for call in calls]
    assert scores[0] > scores[1], (
        f"{who} scores the right response {scores[0]} and the wrong one {scores[1]}: it is called as (prompt, "
        "response, row), by place; compare with what the row holds."
    )
    for text, first, again in zip(texts, scores, scores[len(texts) :], strict=False):
        assert first == again, f"{who} scores {text[:40]!r} {first}, then {again}: keep nothing between calls."
    if prompt and scores[2] >= scores[0]:
        warnings.warn(f"{who} scores the prompt itself {scores[2]}: a policy learns to repeat it.", stacklevel=2)
