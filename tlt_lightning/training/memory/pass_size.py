"""Choose the tokens of an update's passes by the forecast of memory, before anything is loaded."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.training.memory.forecast import MemoryForecast, TrainedModel, check_fits, forecast
from tlt_lightning.training.memory.passes import Passes

log = logging.getLogger(__name__)

SIZES = (32768, 16384, 8192)
"""Tokens of a pass to choose from on a GPU, most first. A short one takes as long to launch."""
CPU_SIZE = 1024
"""Tokens of a pass on a CPU: a core's cache holds the activations of few."""
ROOM = 0.8
"""Share of the free memory that an update may take, by the forecast, where smaller passes could be chosen."""


def pass_sizes(given: int | None, longest: int, *, on_gpu: bool) -> list[int]:
    """Return the tokens that a pass may have, most first: what was given, or sizes that hold the longest sequence."""
    sizes = SIZES if on_gpu else (CPU_SIZE,)
    return sorted({max(size, longest) for size in sizes}, reverse=True) if given is None else [given]


def run_passes(trainer: L.Trainer, module: Any, sizes: Sequence[int], *, longest: int) -> list[Passes]:
    """Return the passes of these sizes that a run's update would make.

    Args:
        trainer: Says how the run computes, and by its strategy over how many ranks it shards.
        module: The `RLModule`.
        sizes: Tokens of a pass.
        longest: Tokens of the longest sequence to learn from.
    """
    return [
        Passes(
            micro_batch_tokens=size,
            longest=longest,
            is_autocast=trainer.precision == "bf16-mixed",
            is_checkpointed=module.gradient_checkpointing,
            num_shards=getattr(trainer.strategy, "num_shards", 1),
        )
        for size in sizes
    ]


def choose_passes(
    module: Any,
    candidates: Sequence[Passes],
    available: float,
    *,
    free: float,
    engine: Mapping[str, float],
    engine_sleeps: bool,
) -> tuple[Passes, MemoryForecast | None]:
    """Choose an update's passes and return them with their forecast, which is logged; refuse a run that cannot fit.

    Args:
        module: The `RLModule`, nothing of it loaded.
        candidates: Passes to choose from, largest first; chosen are the first whose update takes at most `ROOM` of the
            free memory, else the last, and without a forecast these.
        available: Bytes of the device.
        free: Those of them that no other process holds.
        engine: What the rollout engine takes, by name.
        engine_sleeps: The engine gives its memory back during updates.

    Raises:
        MisconfigurationException: An update of the smallest passes cannot fit.
    """
    models = {"policy": TrainedModel(module.policy_path, module.lora)}
    critic, frozen = module.critic_config, {}
    if module.objective.needs_critic and critic is not None and critic.path is not None:
        models["critic"] = TrainedModel(critic.path, critic.lora)
    if module.objective.uses_reference and (module.reference_path or module.lora is None):
        frozen["reference"] = module.reference_path or module.policy_path
    teacher = None if module.objective.divergence is None else frozen["reference"]
    try:
        for passes in candidates:
            planned = forecast(models, passes, module.optimizer, frozen, teacher)
            held = {**planned.held, **module.callback_bytes}
            planned = replace(planned, held=held, engine=engine, engine_sleeps=engine_sleeps)
            if planned.update <= ROOM * free:
                break
    except (RuntimeError, AttributeError) as error:
        log.warning(
            "What the run will hold in memory is not forecast for `policy` %r, and a pass has at most %s tokens: %s",
            *(module.policy_path, f"{candidates[-1].micro_batch_tokens:,}", error),
        )
        return candidates[-1], None
    rank_zero_info("An update in passes of %s tokens:\n%s", f"{passes.micro_batch_tokens:,}", planned.table())
    check_fits(planned, available, passes)
    return passes, planned


def choose_on_device(
    trainer: L.Trainer, engine: RolloutEngine | None, sizes: Sequence[int], *, longest: int, max_model_len: int = 0
) -> int:
    """Return the tokens of a pass that the device of a `fit` has room for; the fewest where there is no GPU.

    Args:
        trainer: Runs the fit, with an `RLModule`.
        engine: The rollout engine, not loaded; None if nothing is written.
        sizes: Tokens of a pass to choose from, most first.
        longest: Tokens of the longest sequence to learn from.
        max_model_len: Tokens of the longest sequence that the engine writes.

    Raises:
        MisconfigurationException: An update cannot fit the device.
    """
    module: Any = trainer.lightning_module
    strategy = trainer.strategy
    if strategy.root_device.type != "cuda":
        return sizes[-1]
    candidates = run_passes(trainer, module, sizes, longest=longest)
    free, total = torch.cuda.mem_get_info(strategy.root_device)
    free += torch.cuda.memory_reserved(strategy.root_device)  # by this process: an earlier run may have left it some
    sleeps, planned = True, cast("Mapping[str, float]", {})
    if engine is not None:
        planned = engine.planned_memory(module.policy_path, max_model_len=max_model_len, device_bytes=total)
        sleeps = engine.sleeps
    passes, _ = choose_passes(module, candidates, total, free=free, engine=planned, engine_sleeps=sleeps)
    return passes.micro_batch_tokens
