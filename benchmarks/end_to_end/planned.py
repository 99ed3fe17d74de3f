"""Forecast the memory of a run of `end_to_end`, beside which its report puts the peaks."""

from __future__ import annotations

from benchmarks.end_to_end.arm import modules_of, optimizer_of
from benchmarks.end_to_end.work import Work
from tlt_lightning.engine.planned_memory import gpu_bytes
from tlt_lightning.training.memory.forecast import GIB, TrainedModel, forecast
from tlt_lightning.training.memory.passes import Passes


def planned(work: Work) -> dict[str, float]:
    """Return GiB of each device by stage and by part, as a run forecasts them, of work whose passes have a set size."""
    module, data = modules_of(work, None)
    num_shards = work.devices if work.strategy == "fsdp2" else 1
    longest = work.max_prompt_tokens + work.max_tokens
    assert work.micro_batch_tokens is not None
    passes = Passes(work.micro_batch_tokens, longest, not work.is_tiny, work.gradient_checkpointing, num_shards)
    plan = forecast({"policy": TrainedModel(work.policy, module.lora)}, passes, optimizer_of(work), {})
    held = {"update": plan.update, "held": sum(plan.held.values())}
    if not work.is_tiny and data.engine is not None:
        engine = data.engine.planned_memory(work.policy, max_model_len=longest, device_bytes=gpu_bytes())
        held["rollout"] = held["held"] - plan.held["gradients"] + sum(engine.values())
    return {name: round(size / GIB, 2) for name, size in held.items()}
