"""Forecast what a run will hold on each device from shapes, before engine and policy are loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.adapters import LoRA
from tlt_lightning.fused.logps import rows_per_chunk
from tlt_lightning.policy import causal_lm, load_shapes
from tlt_lightning.training.memory.optimizer_state import bytes_of, optimizer_bytes
from tlt_lightning.training.memory.passes import Passes, gathered_bytes, kept_bytes, teacher_bytes

GIB = 2**30
LOGIT_COPIES = 2
"""Copies of a chunk's logits at once, in the type that the head computes in: they and their gradient."""
CONTEXT = 0.7 * GIB
"""CUDA's context, kernels and cuBLAS' workspaces of a process."""
ERROR = 0.1
"""Relative error of a forecast that is nothing to stop a run for."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Lists the bytes that a device will hold.

    Args:
        held: What stays from the first update to the end of the run, by name; callbacks' part too.
        activations: Bytes of the largest pass, of the two kinds: kept for the backward pass, and logits.
        step: Temporary bytes of an optimizer step.
        engine: What the rollout engine takes, by name; beside all else unless the engine sleeps during updates.
        engine_sleeps: True if the engine gives its memory back during updates.
    """

    held: Mapping[str, float]
    activations: Mapping[str, float]
    step: float
    engine: Mapping[str, float] = field(default_factory=dict)
    engine_sleeps: bool = True

    @property
    def update(self) -> float:
        """Bytes at the worst moment of an update."""
        passing = max(sum(self.activations.values()), self.step)
        return sum(self.held.values()) + passing + (0.0 if self.engine_sleeps else sum(self.engine.values()))

    @property
    def rollout(self) -> float:
        """Bytes during a rollout, at which neither gradients nor activations are held."""
        return sum(size for name, size in self.held.items() if name != "gradients") + sum(self.engine.values())

    def table(self) -> str:
        """Return a Markdown table of GiB."""
        rows = {**self.held, **self.activations, "optimizer step": self.step, **self.engine}
        rows |= {"**update, at its worst**": self.update, "**rollout**": self.rollout}
        lines = [f"| {name} | {size / GIB:.2f} |" for name, size in rows.items()]
        return "\n".join(["| device memory | GiB |", "|---|---|", *lines])


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Names a model that is trained: path or hub name, and its adapters if only those are."""

    path: str
    lora: LoRA | None = None


def forecast(
    models: Mapping[str, TrainedModel],
    passes: Passes,
    optimizer: OptimizerCallable,
    frozen: Mapping[str, str],
    teacher: str | None = None,
) -> MemoryForecast:
    """Forecast an update; reads the models' configs alone.

    Args:
        models: What is trained, by name, the policy first.
        passes: Size and kind of the passes, which go through all of `models`.
        optimizer: Builds the optimizer, whose state is measured on a small parameter.
        frozen: Paths of float32 models that stay on the device beside them, by name.
        teacher: Path of one of these that runs in the update's passes, held in their type, whose logits are compared
            with the policy's.
    """
    built: dict[str, Any] = {name: load_shapes(model.path, model.lora) for name, model in models.items()}
    trained = sum(p.numel() for model in built.values() for p in model.parameters() if p.requires_grad)
    vocab_size = causal_lm(next(iter(built.values()))).get_output_embeddings().weight.shape[0]
    state, temporary = optimizer_bytes(optimizer)
    is_half = {path: path == teacher and passes.is_autocast for path in frozen.values()}
    sharded = {
        **{name: bytes_of(model) for name, model in built.items()},
        **{name: bytes_of(load_shapes(path, is_half=is_half[path])) for name, path in frozen.items()},
        "gradients": 4.0 * trained,
        "optimizer": state * trained,
    }
    gathered = {"gathered": sum(gathered_bytes(model, passes) for model in built.values())}
    kept, backward = zip(*(kept_bytes(model, passes) for model in built.values()), strict=True)
    width = 2 if passes.is_autocast else 4
    num_heads = 1 if teacher is None else 2
    rows = min(rows_per_chunk(vocab_size, num_heads), passes.micro_batch_tokens)
    activations = {
        "activations": sum(kept),
        # A layer's backward pass begins when the logits are gone.
        "logits": max(float(LOGIT_COPIES * num_heads * width * vocab_size * rows), *backward),
        **(gathered if passes.num_shards > 1 else {}),
    }
    if teacher is not None:  # its own pass comes first and alone, and may take more than all that follows
        kept_of_it, own_pass = teacher_bytes(load_shapes(teacher, is_half=is_half[teacher]), passes)
        activations["teacher"] = max(kept_of_it, own_pass - sum(activations.values()))
    return MemoryForecast(
        held={"context": CONTEXT, **{name: size / passes.num_shards for name, size in sharded.items()}},
        activations=activations,
        step=temporary * trained / passes.num_shards,
    )


def check_fits(plan: MemoryForecast, available: float, passes: Passes) -> None:
    """Raise MisconfigurationException, naming settings that would help, if an update cannot fit a device.

    Args:
        plan: The forecast.
        available: Bytes of the device.
        passes: Passes that the forecast is of.
    """
    if plan.update <= available / (1 - ERROR):
        return
    remedies = {
        f"lower `data.micro_batch_tokens`, {passes.longest} at least": passes.micro_batch_tokens > passes.longest,
        "set `model.gradient_checkpointing: true`": not passes.is_checkpointed,
        "set `data.engine.sleep: true`": not plan.engine_sleeps,
        "train adapters (`model.lora`)": plan.held["gradients"] > plan.update / 8,
        "shard over more GPUs (`trainer.strategy: fsdp2`)": True,
    }
    helpful = [remedy for remedy, helps in remedies.items() if helps]
    raise MisconfigurationException(
        f"An update would take {plan.update / GIB:.1f} GiB, and the device has {available / GIB:.1f} GiB: "
        f"{', or '.join(helpful)}.\n{plan.table()}"
    )
