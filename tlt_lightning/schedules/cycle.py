"""Diagnose from the metrics of a cycle that tail batching does not pay. Pure."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_GAIN = 0.25
"""Share of decoding steps saved over that of tokens thrown away, below which rollouts take 0.96 to 1.57 of the
synchronous ones at all step times of `benchmarks/results/schedules.md`."""


class CycleDiagnosis:
    """Finds that tail batching saves next to nothing for the tokens that it throws away; says it once.

    A synchronous rollout is taken to wait for a response as long as the longest of the cycle, so that what is saved
    is the most that it can be.

    Example:
        >>> diagnosis = CycleDiagnosis()
        >>> short = {"rollout/length_max": 2000.0, "rollout/tokens": 8e4}
        >>> long = {"rollout/length_max": 2048.0, "rollout/tokens": 2e5, "schedule/waited": 4.0}
        >>> cycle = [*[short] * 4, long | {"schedule/tokens_thrown_away": 2e5}]
        >>> [found is not None for found in map(diagnosis.read, cycle * 2)].index(True)
        4
    """

    def __init__(self) -> None:
        self._longest: list[float] = []  # response of each iteration of the cycle
        self._tokens = 0.0
        self._has_said = False

    def read(self, metrics: Mapping[str, float]) -> str | None:
        """Return what the iteration that ends a cycle makes certain, with its remedy."""
        self._longest.append(metrics["rollout/length_max"])
        self._tokens += metrics["rollout/tokens"]
        thrown = metrics.get("schedule/tokens_thrown_away", 0.0)
        if not thrown:
            return None
        longest, share = self._longest, thrown / (thrown + self._tokens)
        self._longest, self._tokens = [], 0.0
        is_whole = len(longest) > metrics["schedule/waited"]  # not in a run that was resumed within the cycle
        saved = 1 - sum(longest) / len(longest) / max(longest)
        if self._has_said or not is_whole or saved >= LEAST_GAIN * share:
            return None
        self._has_said = True
        *short, _ = longest
        return (
            f"its {len(short)} short rollouts waited for responses of {sum(short) / len(short):,.0f} tokens in the "
            f"mean, the longest of the cycle has {max(longest):,.0f}. That saves at most {saved:.0%} of the decoding "
            f"steps, and {share:.0%} of the tokens were thrown away. Too many groups hold a long response: lower "
            "`data.group_size`, or take PartialRollout or SynchronousSchedule (docs/schedules.md)."
        )
