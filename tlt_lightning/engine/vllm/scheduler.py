"""The scheduler of vLLM, told before every step how many tokens to draft. Imports vLLM: import it late."""

from __future__ import annotations

from typing import Any, Protocol

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


class Steering(Protocol):
    """What steers a scheduler; see `steering.SpeculationSteering`."""

    def before_schedule(self, scheduler: Any) -> int:
        """Decide on the step and return how many tokens vLLM's own drafter is to propose in it."""

    def after_schedule(self, output: Any) -> None:
        """See what was scheduled."""

    def drafts(self, scheduler: Any, request_ids: list[str], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts to verify in the next step, given what vLLM's own drafter proposed."""

    def after_step(self, scheduler: Any, output: Any, result: Any) -> None:
        """See what a step emitted, before the scheduler takes it in."""


class _Steered:
    """Mix-in over either scheduler: K of every step comes from `steering`; 0 while there is none."""

    steering: Steering | None = None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        num_draft_tokens = 0 if self.steering is None else self.steering.before_schedule(self)
        # vLLM looks K up by the number of scheduled requests; here it is the same for all.
        self.dynamic_sd_lookup = [num_draft_tokens] * (self.max_num_running_reqs + 1)  # type: ignore[attr-defined]
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        if self.steering is not None:
            self.steering.after_schedule(output)
        return output

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if self.steering is not None:
            drafts = self.steering.drafts(self, draft_token_ids.req_ids, draft_token_ids.draft_token_ids)
            if not any(drafts):
                return  # the scheduler has dropped the last step's drafts already
            draft_token_ids.draft_token_ids = drafts
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self.steering is not None:
            self.steering.after_step(self, scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


class SteeredScheduler(_Steered, Scheduler):  # type: ignore[misc]
    """Schedules a step once the one before it is done."""


class SteeredAsyncScheduler(_Steered, AsyncScheduler):  # type: ignore[misc]
    """Schedules a step while the one before it still runs."""
