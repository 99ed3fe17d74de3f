"""Let a drafter's first pass use only CUDA graphs of the very shape of the target's pass.

The first pass goes over the tokens just verified. Its full graph reads attention metadata from buffers which the
target's pass filled, and FlashAttention 3 lays them out by the number of requests, padding included. A graph of more
requests than the target's pass had reads other vectors and memory that nobody wrote: wrong drafts, and an illegal
memory access where a padded request seems to end before it begins.

vLLM 0.32 replays such graphs. With its own table of draft lengths, 153 requests of one draft each find no full graph
for the target, hidden by a graph of another length, and run piecewise, without padding; the drafter then finds its
graph of 160. A plan with a graph of the target that the drafter has not leads there, too.
"""

from typing import Any

from tlt_lightning.engine.vllm.internals import is_cpu_build, reach
from tlt_lightning.engine.vllm.patches.patch import Patch


def keep_first_pass_with_target(runner: Any) -> None:
    """Let a V2 runner's drafter begin with a full graph only if the target used that shape.

    Elsewhere it goes piecewise, which takes the target's metadata as they are.
    """
    from vllm.config.compilation import CUDAGraphMode

    target = reach(runner, "cudagraph_manager")
    prefill = getattr(reach(runner, "speculator"), "prefill_cudagraph_manager", None)
    if target is None or prefill is None:
        return
    dispatch_target, dispatch = reach(target, "dispatch"), reach(prefill, "dispatch")
    last: Any = None

    def remembered(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        last = dispatch_target(*args, **kwargs)
        return last

    def matching(num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any) -> Any:
        desc = dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        if desc.cg_mode == CUDAGraphMode.FULL and desc != last:
            desc = dispatch(num_reqs, num_tokens, None, *args, **kwargs)
        return desc

    target.dispatch, prefill.dispatch = remembered, matching


def _capture_and_pair(capture: Any, runner: Any, *args: Any, profile_only: bool = False, **kwargs: Any) -> Any:
    result = capture(runner, *args, profile_only=profile_only, **kwargs)
    if not profile_only:  # a rehearsal's managers are thrown away
        keep_first_pass_with_target(runner)
    return result


PATCH = Patch(
    why="The drafter's first pass replays CUDA graphs for more requests than the target's pass had: wrong drafts, or "
    "an illegal memory access.",
    versions="0.32, V2 model runner, CUDA",
    is_needed=lambda: not is_cpu_build(),
    around={"vllm.v1.worker.gpu.model_runner.GPUModelRunner.capture_model": _capture_and_pair},
)
