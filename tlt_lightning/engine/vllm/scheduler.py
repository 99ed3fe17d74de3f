"""Steer vLLM's schedulers before every step. Imports vLLM: import this module late."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tlt_lightning.engine.vllm.runner import SpeculativeRunner


class _Steered:
    """Mixes into a scheduler: `speculative_runner` gives K of every step; 0 while there is none."""

    speculative_runner: SpeculativeRunner | None = None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        num_draft_tokens = 0 if self.speculative_runner is None else self.speculative_runner.before_schedule(self)
        # vLLM looks K up by the number of scheduled requests; here it is the same for all.
        self.dynamic_sd_lookup = [num_draft_tokens] * (self.max_num_running_reqs + 1)  # type: ignore[attr-defined]
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        if self.speculative_runner is not None:
            self.speculative_runner.after_schedule(output)
        return output

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if self.speculative_runner is not None:
            drafts = self.speculative_runner.drafts(self, draft_token_ids.req_ids, draft_token_ids.draft_token_ids)
            if not any(drafts):
                return  # the scheduler has dropped the last step's drafts already
            draft_token_ids.draft_token_ids = drafts
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self.speculative_runner is not None:
            self.speculative_runner.after_step(self, scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


class SteeredScheduler(_Steered, Scheduler):  # type: ignore[misc]
    """Schedules a step once the step before is done."""


class SteeredAsyncScheduler(_Steered, AsyncScheduler):  # type: ignore[misc]
    """Schedules a step while the step before still runs."""
