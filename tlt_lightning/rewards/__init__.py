"""Score responses by weighted reward functions, in a pool that runs during the rollout.

A reward is a callable `(prompt, response, row) -> float`, plain or async; TRL's `(prompts, completions, **columns)` is
taken too. `prompt` is the question, of a conversation its last message. `row` is the whole row of the data, a copy for
each call; `row["answer"]` holds the value of the answer column.

Importing is cheap: the first call that needs math-verify, torch or transformers loads it. The imports below are eager
because `countdown` names a function and its module: bound lazily, the name would become the module on its import.
"""

from tlt_lightning.rewards.answers import exact_match
from tlt_lightning.rewards.choice import multiple_choice
from tlt_lightning.rewards.code import PythonTests
from tlt_lightning.rewards.countdown import countdown
from tlt_lightning.rewards.format import Format
from tlt_lightning.rewards.math import math_equivalence
from tlt_lightning.rewards.pool import RewardPool
from tlt_lightning.rewards.reward_model import RewardModel
from tlt_lightning.rewards.term import RewardFunction, RewardTerm

__all__ = [
    "Format",
    "PythonTests",
    "RewardFunction",
    "RewardModel",
    "RewardPool",
    "RewardTerm",
    "countdown",
    "exact_match",
    "math_equivalence",
    "multiple_choice",
]
