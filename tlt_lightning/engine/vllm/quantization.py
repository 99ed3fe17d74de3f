"""Set which of the policy's layers vLLM computes in 8 bit."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from tlt_lightning.arguments import checked
from tlt_lightning.engine.vllm.internals import reach

log = logging.getLogger(__name__)


@checked("quantization.")
@dataclass(frozen=True)
class Quantization:
    """Rolls out in 8 bit: vLLM quantizes the linear layers itself whenever weights arrive.

    Weights have one scale for each output channel, activations one for each token, found anew in every pass. So no
    calibration is needed, and scales follow the weights. Embeddings, norms and the language model's head stay in 16
    bit, and so does the drafter's head.

    Args:
        weights: Type of weights and activations: `fp8` (e4m3) on GPUs from Ada on, and on CPUs for tests. None
            leaves both in 16 bit.
        layers_in_16_bit: Patterns of layers that stay in 16 bit, by their Hugging Face names: `model.layers.0.*`,
            `*.down_proj`. vLLM fuses `q_proj`, `k_proj`, `v_proj`; `gate_proj`, `up_proj`: name all of them or none.
    """

    weights: Literal["fp8"] | None = "fp8"
    layers_in_16_bit: Sequence[str] = ()

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_ranks: int = 1) -> None:
        """Check a policy, given the shapes of its tensors, and the number of ranks that are one engine.

        Raises:
            ValueError: Nobody has shown that this can be quantized rightly, or a pattern names nothing.
        """
        has_experts = any(".experts." in name for name in shapes)
        if self.weights and (has_experts or num_ranks > 1):
            raise ValueError(
                "`quantization` is not proven for experts, nor for `tensor_parallel` above 1: set it to null."
            )
        layers = linear_layers(shapes)
        for pattern in self.layers_in_16_bit:
            if not any(fnmatch(layer, pattern) for layer in layers):
                raise ValueError(
                    f"`quantization.layers_in_16_bit` has {pattern!r}, the name of no layer: {layers[:7]}."
                )

    def quantized_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the names of a policy's layers in 8 bit, given the shapes of the policy's tensors."""
        layers = linear_layers(shapes) if self.weights else []
        return [layer for layer in layers if not any(fnmatch(layer, kept) for kept in self.layers_in_16_bit)]

    def engine_args(self) -> dict[str, Any]:
        """Return vLLM's engine arguments."""
        if self.weights is None:
            return {}
        config = {"linear": {"weight": "fp8_per_channel_static"}, "ignore": list(self.layers_in_16_bit)}
        return {"quantization": "online", "quantization_config": config}

    def compute_dtype(self, engine: Any) -> str:
        """Return the type that bounds how closely a live engine's log-probs agree; log what is in 8 bit."""
        if self.weights is None:
            return str(reach(engine, "vllm_config.model_config.dtype")).split(".")[1]
        quantized = "; ".join(reach(engine, "vllm_config.quant_config.quantized_layer_summaries"))
        kept = "".join(f", {pattern}" for pattern in self.layers_in_16_bit)
        log.info("Layers in fp8: %s; in 16 bit: embedding, norms, head%s", quantized, kept)
        return self.weights


def linear_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of the linear layers that can be quantized, in the policy's order."""
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and ".layers." in name and name.endswith(".weight")
    ]
