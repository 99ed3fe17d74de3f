"""Count the progress of a rollout as responses finish."""

import time
from collections.abc import Sequence

from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.rollout import Response
from tlt_lightning.speculation.strategy import OFF, Strategy


class ProgressCounter:
    """Counts finished responses, from construction on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._num_finished = self._finished_tokens = self._longest = 0

    def after_step(
        self,
        finished: Sequence[Response],
        *,
        waiting: int,
        running: Sequence[int] = (),
        num_before: int = 0,
        strategy: Strategy = OFF,
        acceptance_length: float = 1.0,
    ) -> RolloutProgress:
        """Return the rollout's state after an engine step.

        Args:
            finished: Responses that finished in it.
            waiting: Requests that have not begun.
            running: Tokens of each response under way.
            num_before: Tokens of these and of all that have finished which earlier rollouts wrote.
            strategy: As in `RolloutProgress`.
            acceptance_length: Likewise.
        """
        lengths = [len(response.token_ids) for response in finished]
        self._num_finished += len(lengths)
        self._finished_tokens += sum(lengths)
        self._longest = max([self._longest, *running, *lengths])
        return RolloutProgress(
            waiting=waiting,
            running=len(running),
            finished=self._num_finished,
            tokens=self._finished_tokens + sum(running) - num_before,
            longest=self._longest,
            elapsed=time.perf_counter() - self._started,
            strategy=strategy,
            acceptance_length=acceptance_length,
        )
