"""Environments of the recipes: a game in words, a calculator, a Python that tests code; `init` copies them."""

from __future__ import annotations

from typing import Any

from tlt_lightning.rewards.code import PythonTests
from tlt_lightning.rewards.countdown import countdown


class CountdownTries:
    """Asks a Countdown question again until its answer is right; the later, the less it is worth.

    Args:
        tries: Answers that are heard.
        patience: Factor of the reward for each answer before the right one.
    """

    def __init__(self, tries: int = 3, patience: float = 0.7) -> None:
        self.tries, self.patience = tries, patience

    def reset(self, **row: Any) -> None:
        """Begin with the question of a row."""
        self.row, self.num_heard, self.reward = row, 0, 0.0

    def step(self, text: str) -> str | None:
        """Hear an answer; return the question again if it is wrong and there is another try."""
        self.num_heard += 1
        self.reward = countdown("", text, self.row) * self.patience ** (self.num_heard - 1)
        return None if self.reward or self.num_heard == self.tries else str(self.row["prompt"])

    def get_reward(self) -> float:
        """Return what the last answer was worth."""
        return self.reward


class Calculator:
    """Computes for the policy."""

    def reset(self, **row: Any) -> None:
        """Begin anew; there is nothing to remember."""

    def calculate(self, a: float, operation: str, b: float) -> float:
        """Compute with two numbers.

        Args:
            a: The first number.
            operation: One of + - * /.
            b: The second number.

        Returns:
            The result.
        """
        if operation not in ("+", "-", "*", "/"):
            raise ValueError(f"no such operation: {operation}")
        return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else float("nan")}[operation]


class CodeTester:
    """Lets the policy try Python code on the tests of its row, in the sandbox of `PythonTests`.

    Args:
        time_limit: Seconds of a trial.
    """

    def __init__(self, time_limit: float = 5.0) -> None:
        self._tests = PythonTests(time_limit=time_limit)
        self._passed = 0.0

    def reset(self, **row: Any) -> None:
        """Begin with the tests of a row."""
        self._row, self._passed = row, 0.0

    def try_code(self, code: str) -> str:
        """Run Python code and the tests of the task.

        Args:
            code: The whole program.

        Returns:
            Whether it passes.
        """
        self._passed = self._tests("", code, self._row)
        return "All tests pass." if self._passed else "Some test fails."

    def get_reward(self) -> float:
        """Return 1 if the code that was tried last passes, else 0."""
        return self._passed
