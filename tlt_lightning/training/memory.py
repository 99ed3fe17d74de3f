"""Forecast what a run will hold on each device from shapes, before engine and policy are loaded.

Activations are not estimated by a formula: the trunk runs once over fake tensors, which have shapes and no storage, and
what autograd would keep for the backward pass is added up. So every architecture, LoRA and autocast count as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from tlt_lightning.packed_pass import without_mask
from tlt_lightning.policy import CHUNK_SIZE, LoRA, causal_lm, load_shapes
from tlt_lightning.sharding.units import layers_of
from tlt_lightning.training.optimization import fuse_adam

log = logging.getLogger(__name__)

GIB = 2**30
LOGIT_COPIES = 2
"""Copies of a chunk's logits at once, in the type that the head computes in: they and their gradient."""
GRADIENTS_AT_ONCE = 3
"""Gradients of a layer's widest tensors that its backward pass holds at once: of gate, up and their product."""
CONTEXT = 0.7 * GIB
"""CUDA's context, kernels and cuBLAS' workspaces of a process."""
ERROR = 0.1
"""Relative error of a forecast that is nothing to stop a run for."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Describes the forward and backward passes of an update.

    Args:
        micro_batch_tokens: Tokens of the largest pass.
        longest: Tokens of the longest sequence, which a pass must hold.
        is_autocast: True if passes run in bfloat16 over weights of another type.
        is_checkpointed: True if activations are recomputed layer by layer.
        chunk_size: Tokens that meet the vocabulary at a time.
        num_shards: Ranks that hold the rows of a weight together.
    """

    micro_batch_tokens: int
    longest: int
    is_autocast: bool
    is_checkpointed: bool
    chunk_size: int = CHUNK_SIZE
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Lists the bytes that a device will hold.

    Args:
        held: What stays from the first update to the end of the run, by name; callbacks' part too.
        activations: Bytes of the largest pass, of the two kinds: kept for the backward pass, and logits.
        step: Temporary bytes of an optimizer step.
        engine: What the rollout engine takes, by name; beside all else unless the engine sleeps during updates.
        engine_sleeps: True if the engine gives its memory back during updates.
        whole: Bytes of `held` that more GPUs do not share: CUDA's context and callbacks' part.
    """

    held: Mapping[str, float]
    activations: Mapping[str, float]
    step: float
    engine: Mapping[str, float] = field(default_factory=dict)
    engine_sleeps: bool = True
    whole: float = CONTEXT

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
) -> MemoryForecast:
    """Forecast an update; reads the models' configs alone.

    Args:
        models: What is trained, by name, the policy first.
        passes: Size and kind of the passes, which go through all of `models`.
        optimizer: Builds the optimizer, whose state is measured on a small parameter.
        frozen: Paths of float32 models that stay on the device beside them, by name.
    """
    built: dict[str, Any] = {name: load_shapes(model.path, model.lora) for name, model in models.items()}
    trained = sum(p.numel() for model in built.values() for p in model.parameters() if p.requires_grad)
    vocab_size = causal_lm(next(iter(built.values()))).get_output_embeddings().weight.shape[0]
    state, temporary = _optimizer_bytes(optimizer)
    sharded = {
        **{name: _bytes_of(model) for name, model in built.items()},
        **{name: _bytes_of(load_shapes(path)) for name, path in frozen.items()},
        "gradients": 4.0 * trained,
        "optimizer": state * trained,
    }
    gathered = {"gathered": sum(gathered_bytes(model, passes) for model in built.values())}
    kept, backward = zip(*(kept_bytes(model, passes) for model in built.values()), strict=True)
    width = 2 if passes.is_autocast else 4
    logits = float(LOGIT_COPIES * width * vocab_size * min(passes.chunk_size, passes.micro_batch_tokens))
    return MemoryForecast(
        held={"context": CONTEXT, **{name: size / passes.num_shards for name, size in sharded.items()}},
        activations={
            "activations": sum(kept),
            # A layer's backward pass begins when the logits are gone.
            "logits": max(logits, *backward),
            **(gathered if passes.num_shards > 1 else {}),
        },
        step=temporary * trained / passes.num_shards,
    )


def training_bytes(model: nn.Module, optimizer: OptimizerCallable) -> float:
    """Return the bytes of a model that is trained: weights, gradients and the optimizer's state."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return _bytes_of(model) + (4.0 + _optimizer_bytes(optimizer)[0]) * trained


def _bytes_of(model: nn.Module) -> float:
    return float(sum(p.numel() * p.element_size() for p in model.parameters()))


def gathered_bytes(model: nn.Module, passes: Passes) -> float:
    """Return the bytes that a pass of a sharded model holds whole: root, a layer, and the next one, which comes early.

    Trained weights come with a gradient of the same type; that of the root is then copied to float32 to be reduced.
    """
    network, width = causal_lm(model), 2 if passes.is_autocast else 4
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(network)]
    root = sum(p.numel() for p in network.parameters()) - sum(layers)
    is_trained = any(p.requires_grad and "lora_" not in name for name, p in network.named_parameters())
    return width * (root + 2.0 * max(layers)) + ((width + 4.0) * root if is_trained else 0.0)


def kept_bytes(model: Any, passes: Passes) -> tuple[float, float]:
    """Add up what autograd keeps of one pass of a model on the meta device, its parameters left out.

    Layers keep alike: two passes, through the last layer and through the last two, tell of all.

    Returns:
        Bytes kept from the forward pass on, and those that a layer's backward pass adds: gradients of its widest
        tensors, and its own again if it is checkpointed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    trunk: Any = causal_lm(model).base_model
    if any(getattr(trunk.config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise RuntimeError("experts are chosen by values, and shapes have none")
    layers, kept, widest = trunk.layers, [], 0.0
    with FakeTensorMode():
        _give_storage(model)
        for number in (1, 2):
            trunk.layers = layers[-number:]
            sizes = _kept_of_pass(trunk, passes)
            kept.append(sum(sizes))
            widest = max(sizes)
    gradients = GRADIENTS_AT_ONCE * widest
    of_layer, others = kept[1] - kept[0], 2 * kept[0] - kept[1]
    if not passes.is_checkpointed:
        return others + len(layers) * of_layer, gradients
    # Every layer keeps its input; one at a time is computed again and then keeps what it did without.
    width = 2 if passes.is_autocast else next(model.parameters()).element_size()
    inputs = len(layers) * float(passes.micro_batch_tokens * trunk.config.hidden_size * width)
    return others + inputs, of_layer + gradients


def _kept_of_pass(trunk: nn.Module, passes: Passes) -> list[float]:
    """Return the bytes of each tensor that autograd keeps of one pass, parameters left out."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=passes.is_autocast),
        without_mask(),
    ):
        ids = torch.zeros(1, passes.micro_batch_tokens, dtype=torch.long)
        output = trunk(input_ids=ids, use_cache=False)  # holds what is kept until it is counted
    own = {parameter.untyped_storage()._cdata for parameter in trunk.parameters()}
    del output
    return [float(size) for storage, size in saved.items() if storage not in own]


def _give_storage(model: nn.Module) -> None:
    """Put fake tensors on the CPU in the place of meta tensors: autocast knows no meta device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # tied weights stay one
                    tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _optimizer_bytes(build: OptimizerCallable) -> tuple[float, float]:
    """Return bytes of state, and temporary bytes of a step, for each trained number."""
    group, states = _sample_step(build)
    state = sum(map(_stored_bytes, states)) / group["params"][0].numel()
    # torch's `foreach` steps, its default on CUDA, hold one more copy of the parameters.
    is_foreach = "foreach" in group and group["foreach"] is not False and not group.get("fused")
    return state, 4.0 if is_foreach else 0.0


def has_composed_states(build: OptimizerCallable) -> bool:
    """Return True if an optimizer's states hold tensors of their own, as those of 8 bits do."""
    return any(hasattr(state, "__tensor_flatten__") for state in _sample_step(build)[1])


def _sample_step(build: OptimizerCallable) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the group and the states of an optimizer that has moved one matrix, as it would on a GPU."""
    parameter = nn.Parameter(torch.zeros(512, 512))  # some optimizers keep less of matrices
    parameter.grad = torch.ones_like(parameter)
    optimizer = build([{"params": [parameter]}])
    fuse_adam(optimizer, parameter.device)
    with torch.compiler.set_stance("force_eager"):  # 8-bit ones would be compiled, for this one step
        optimizer.step()
    states = optimizer.state[parameter].values()
    return optimizer.param_groups[0], [each for each in states if isinstance(each, Tensor) and each.dim()]


def _stored_bytes(tensor: Tensor) -> float:
    """Return the bytes of a tensor; a quantised one holds tensors of codes, scales and a table."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return float(tensor.numel() * tensor.element_size())
    return sum(_stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def check_memory(
    module: Any,
    passes: Passes,
    available: float,
    *,
    engine: Mapping[str, float],
    engine_sleeps: bool,
) -> None:
    """Log the memory that a run will take of each device, and refuse a run that cannot fit, before anything is loaded.

    Args:
        module: The `RLModule`, nothing of it loaded.
        passes: Passes of its update.
        available: Bytes of the device.
        engine: What the rollout engine takes, by name.
        engine_sleeps: The engine gives its memory back during updates.
    """
    models = {"policy": TrainedModel(module.policy_path, module.lora)}
    critic, frozen = module.critic_config, {}
    if module.objective.needs_critic and critic is not None and critic.path is not None:
        models["critic"] = TrainedModel(critic.path, critic.lora)
    if module.objective.needs_reference and (module.reference_path or module.lora is None):
        frozen["reference"] = module.reference_path or module.policy_path
    try:
        plan = forecast(models, passes, module.optimizer, frozen)
    except (RuntimeError, AttributeError) as error:
        log.warning("What the run will hold in memory is not forecast for `policy` %r: %s", module.policy_path, error)
        return
    own: dict[str, float] = module.held_by_callbacks
    held, whole = {**plan.held, **own}, plan.whole + sum(own.values())
    plan = replace(plan, held=held, whole=whole, engine=engine, engine_sleeps=engine_sleeps)
    rank_zero_info("%s", plan.table())
    if plan.rollout > available:
        log.warning(
            "A rollout would take %.1f GiB, and the device has %.1f GiB; lower `data.engine.gpu_memory_utilization` or "
            "`data.engine.max_num_seqs`.",
            *(plan.rollout / GIB, available / GIB),
        )
    check_fits(plan, available, passes)


def check_fits(plan: MemoryForecast, available: float, passes: Passes) -> None:
    """Raise MisconfigurationException, naming settings that would help, if an update cannot fit a device.

    Args:
        plan: The forecast.
        available: Bytes of the device.
        passes: Passes that the forecast is of.
    """
    excess = plan.update - available / (1 - ERROR)
    if excess <= 0:
        return
    passing, gradients = sum(plan.activations.values()), plan.held["gradients"]
    per_token = plan.activations["activations"] / passes.micro_batch_tokens
    tokens = int(passes.micro_batch_tokens - excess / per_token) // 128 * 128
    spread = (sum(plan.held.values()) - plan.whole) * passes.num_shards
    left = spread / passes.num_shards - excess
    num_gpus = 2 ** ceil(log2(spread / left)) if left > 0 else 0
    remedies = {
        f"`data.micro_batch_tokens` {tokens} instead of {passes.micro_batch_tokens}": (
            passing - excess > plan.step and tokens >= passes.longest
        ),
        f"`model.gradient_checkpointing: true`, for most of {plan.activations['activations'] / GIB:.1f} GiB": (
            not passes.is_checkpointed
        ),
        f"`model.lora`, for most of {(gradients + plan.held['optimizer']) / GIB:.1f} GiB": gradients > excess / 4,
        f"`trainer.strategy: fsdp2` on {num_gpus} GPUs": num_gpus > passes.num_shards,
        f"`data.engine.sleep: true`, for {sum(plan.engine.values()) / GIB:.1f} GiB": not plan.engine_sleeps,
    }
    helpful = [remedy for remedy, helps in remedies.items() if helps][:2]
    raise MisconfigurationException(
        f"An update would take {plan.update / GIB:.1f} GiB, and the device has {available / GIB:.1f} GiB. "
        f"Set {' or '.join(helpful) or '`model.policy` to a smaller model'}.\n{plan.table()}"
    )
