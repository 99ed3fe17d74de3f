"""Put LoRA adapters on a policy, and read the weights that an adapted layer computes with."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from tlt_lightning.arguments import Count, checked
from tlt_lightning.fused.adapter import fuse_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@checked("lora.")
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Trains low-rank adapters instead of all weights.

    Args:
        rank: Rank of each update.
        alpha: Scale; the update is multiplied by `alpha / rank`.
        target_modules: Names of the linear layers to adapt; `all-linear` adapts every one but the head, and routers of
            experts that are more than a linear layer. A head and an embedding that are one tensor
            (`tie_word_embeddings`) cannot be adapted.
        base_dtype: Type of the frozen weights. `bfloat16` halves their memory and is what vLLM runs anyway.
    """

    rank: Annotated[Count, "Drop `lora` for full fine-tuning."] = 16
    alpha: Annotated[Count, "The usual one is twice the rank."] = 32
    target_modules: str | list[str] = "all-linear"
    base_dtype: Literal["float32", "bfloat16"] = "float32"


def with_adapters(model: "PreTrainedModel", lora: LoRA | None) -> "PreTrainedModel":
    """Return the model as a `peft.PeftModel` with fresh adapters; the model itself without `lora`."""
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")
    # Routers of Llama 4 and PhiMoE return two tensors, to which PEFT adds none; others, as Jamba's, are plain layers.
    named = model.named_modules()
    config.exclude_modules = [n for n, m in named if n.endswith(".router") and type(m) is not torch.nn.Linear] or None
    asked = [] if isinstance(lora.target_modules, str) else lora.target_modules
    unknown = [each for each in asked if not any(f".{name}".endswith(f".{each}") for name, _ in model.named_modules())]
    try:
        if unknown:  # over some of several PEFT passes
            raise ValueError(f"no layer is called {', '.join(unknown)}.")
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(
            f"`lora.target_modules` {lora.target_modules!r} cannot be adapted: {error} Give the ends of layers' names "
            "in a list, as [q_proj, v_proj], or 'all-linear'; another text is a pattern of whole names."
        ) from error
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    if shared := [name for name, layer in adapters_of(adapted).items() if uses[id(_adapted_weight(layer))] > 1]:
        raise ValueError(
            f"`lora.target_modules` {lora.target_modules!r} adapts {shared[0]}, but the policy's embedding and head "
            "are one tensor (`tie_word_embeddings`): engine and export have one weight where training would have two. "
            "Adapt other layers, as 'all-linear' does, or save the policy with a head of its own "
            "(`model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())`, `model.config.tie_word_embeddings = "
            "False`)."
        )
    fuse_adapters(adapted)
    return adapted


def adapters_of(model: Any) -> dict[str, Any]:
    """Return the layers with an adapter, by the Hugging Face name of the adapted tensor."""
    if not hasattr(model, "get_base_model"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {
        f"{streamed_name(name)}.{getattr(module, 'parameter_name', 'weight')}": module
        for name, module in model.get_base_model().named_modules()
        if isinstance(module, LoraLayer)
    }


def _adapted_weight(layer: Any) -> Tensor:
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def streamed_name(name: str) -> str:
    """Return the Hugging Face name of a tensor of a model with adapters."""
    return name.replace(".base_layer", "")


@torch.no_grad()
def merged_weight(layer: Any, weight: Tensor) -> Tensor:
    """Return a copy of the weight that an adapted layer computes with, added up in float32."""
    return layer.get_delta_weight("default").float().add_(weight).to(weight.dtype)  # in place: these are large


def computed_weight(layer: Any) -> Tensor:
    """Return the weight that a layer computes with: a copy if the layer is adapted, otherwise the layer's own."""
    return merged_weight(layer, layer.base_layer.weight) if hasattr(layer, "base_layer") else layer.weight.detach()
