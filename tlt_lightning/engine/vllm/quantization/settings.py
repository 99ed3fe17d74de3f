"""Set which of the policy's layers vLLM computes in 8 bit, and check that it can."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from tlt_lightning.arguments import checked
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.internals import reach
from tlt_lightning.engine.vllm.quantization.cache_scales import unbounded, unknown_norms

log = logging.getLogger(__name__)

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM makes one of, and computes in one type."""

_SPECS = {"fp8": "fp8_per_channel_static", "int8": "int8_per_channel_static"}  # vLLM's names


@checked("quantization.")
@dataclass(frozen=True)
class Quantization:
    """Rolls out in 8 bit: vLLM quantizes the linear layers itself whenever weights arrive.

    Weights have one scale for each output channel, activations one for each token, found anew in every pass. So no
    calibration is needed, and scales follow the weights. Embeddings, norms and the language model's head stay in 16
    bit, and so does the drafter's head.

    Args:
        weights: Type of weights and activations: `fp8` (e4m3; GPUs from Ada and Hopper on have the kernels), or `int8`,
            which older GPUs and CPUs run as well. None leaves both in 16 bit.
        layers_in_16_bit: Patterns of layers that stay in 16 bit, by their Hugging Face names: `model.layers.0.*`,
            `*.down_proj`. vLLM fuses `q_proj`, `k_proj`, `v_proj`; `gate_proj`, `up_proj`: name all of them or none.
        kv_cache: `fp8` halves the bytes of a token's keys and values. A layer's scales are the largest that its weights
            allow, found anew when weights arrive. Hopper GPUs, and CPUs for tests.
    """

    weights: Literal["fp8", "int8"] | None = "fp8"
    layers_in_16_bit: Sequence[str] = ()
    kv_cache: Literal["auto", "fp8"] = "auto"

    def __post_init__(self) -> None:
        if self.weights is None and self.layers_in_16_bit:
            raise ValueError(
                f"`quantization.layers_in_16_bit` is {list(self.layers_in_16_bit)}, but `quantization.weights` is "
                "None, which leaves all layers in 16 bit; drop the patterns, or set `weights`."
            )

    @classmethod
    def of(cls, given: "Literal['fp8', 'int8'] | Quantization | None", dtype: str) -> "Quantization":
        """Return the settings of an engine with weights of type `dtype`, given by a short name or whole.

        Raises ValueError for a type that has no layers in 8 bit beside it.
        """
        found = given if isinstance(given, Quantization) else cls(given)
        if found != cls(None) and dtype == "float32":
            raise ValueError("`dtype` must be `bfloat16` or `float16` beside `quantization`, got 'float32'.")
        return found

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_ranks: int = 1) -> None:
        """Raise ValueError for a policy or a machine that cannot be quantized so.

        Args:
            shapes: Of the policy's tensors, by their Hugging Face names.
            num_ranks: Ranks that are one engine.
        """
        if self != Quantization(None) and num_ranks > 1:
            raise ValueError(
                "`quantization` is not proven for engines over several ranks, and `tensor_parallel` is "
                f"{num_ranks}; set `quantization: null` or `tensor_parallel: 1`."
            )
        if self.kv_cache == "fp8":
            self._check_cache(shapes)
        if self.weights is None:
            return
        if any(".experts." in name for name in shapes):
            raise ValueError(
                "`quantization` is not proven for a mixture of experts, as this policy is; set `quantization: null`."
            )
        layers = linear_layers(shapes)
        for pattern in self.layers_in_16_bit:
            if not any(fnmatch(layer, pattern) for layer in layers):
                raise ValueError(
                    f"`quantization.layers_in_16_bit` has {pattern!r}, which is the name of no linear layer; they "
                    f"are called like {', '.join(layers[:7])}."
                )
        self._check_fused(layers)
        self._check_kernels()

    def quantized_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the names of a policy's layers in 8 bit, given the shapes of the policy's tensors."""
        return [layer for layer in linear_layers(shapes) if self.weights and not self._keeps(layer)]

    def _keeps(self, layer: str) -> bool:
        return any(fnmatch(layer, pattern) for pattern in self.layers_in_16_bit)

    def _check_fused(self, layers: Sequence[str]) -> None:
        """Raise ValueError for patterns that keep a part of what vLLM makes one layer of."""
        for parent in dict.fromkeys(layer.rpartition(".")[0] for layer in layers):
            for group in FUSED:
                parts = [f"{parent}.{kind}" for kind in group if f"{parent}.{kind}" in layers]
                kept = [part for part in parts if self._keeps(part)]
                if 0 < len(kept) < len(parts):
                    raise ValueError(
                        f"`quantization.layers_in_16_bit` keeps {', '.join(kept)} alone, but vLLM computes "
                        f"{', '.join(parts)} as one layer; name all of them or none."
                    )

    def _check_cache(self, names: Collection[str]) -> None:
        """Raise ValueError unless weights tell the scales, and this is a CPU or a Hopper GPU with FlashAttention 3."""
        import torch
        from vllm.platforms import current_platform

        if lacks := unbounded(names):
            raise ValueError(
                "`quantization.kv_cache` 'fp8' takes its scales from the weights of each layer, and this policy's have "
                f"no {', '.join(lacks)}; set 'auto'."
            )
        if unknown := unknown_norms(names):
            raise ValueError(
                "`quantization.kv_cache` 'fp8' takes its scales from the weights of each layer, and does not know what "
                f"{', '.join(unknown)} of this policy do to queries and keys; set 'auto'."
            )
        if internals.is_cpu_build() and not torch.cpu._is_avx512_supported():
            raise ValueError("`quantization.kv_cache` 'fp8' needs AVX-512 on a CPU, and this one has none; set 'auto'.")
        if not (internals.is_cpu_build() or current_platform.is_device_capability_family(90)):
            raise ValueError("`quantization.kv_cache` 'fp8' is proven on Hopper GPUs and CPUs alone; set 'auto'.")

    def _check_kernels(self) -> None:
        """Raise ValueError with the reasons unless this build has a kernel of 8 bits for this machine."""
        import torch
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.kernels import linear
        from vllm.model_executor.layers.quantization.utils import quant_utils
        from vllm.platforms import current_platform

        try:
            with set_current_vllm_config(VllmConfig()):
                if self.weights == "int8":
                    linear.init_int8_linear_kernel(
                        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="a check"
                    )
                    if current_platform.has_device_capability(100):  # vLLM finds out in the first product
                        raise ValueError("vLLM multiplies int8 on GPUs before Blackwell.")
                else:
                    kernel = linear.init_fp8_linear_kernel(
                        activation_quant_key=quant_utils.kFp8DynamicTokenSym,
                        weight_quant_key=quant_utils.kFp8StaticChannelSym,
                        weight_shape=(1024, 1024),
                        input_dtype=torch.bfloat16,
                        out_dtype=torch.bfloat16,
                    )
                    if isinstance(kernel, linear.MarlinFP8ScaledMMLinearKernel):
                        raise ValueError("GPUs before Ada multiply no fp8; there vLLM keeps activations in 16 bit.")
        except ValueError as error:
            other = next(name for name in _SPECS if name != self.weights)
            raise ValueError(
                f"`quantization` {self.weights!r} cannot run here: {error} Take {other!r}, or null for 16 bit."
            ) from None

    def engine_args(self) -> dict[str, Any]:
        """Return vLLM's engine arguments."""
        if self.weights is None:
            return {"kv_cache_dtype": self.kv_cache}
        if self.weights == "int8":
            from tlt_lightning.engine.vllm.quantization.int8_linear import install

            install()
        config = {"linear": {"weight": _SPECS[self.weights]}, "ignore": list(self.layers_in_16_bit)}
        return {"quantization": "online", "quantization_config": config, "kv_cache_dtype": self.kv_cache}

    def compute_dtype(self, engine: Any) -> str:
        """Return the type that bounds how closely a live engine's log-probs agree; log what is in 8 bit."""
        if self.weights is None:
            return (
                "fp8" if self.kv_cache == "fp8" else str(reach(engine, "vllm_config.model_config.dtype")).split(".")[1]
            )
        quantized = "; ".join(reach(engine, "vllm_config.quant_config.quantized_layer_summaries"))
        kept = "".join(f", {pattern}" for pattern in self.layers_in_16_bit)
        log.info(
            "Layers in %s: %s, multiplied by %s; in 16 bit: embedding, norms, head%s",
            self.weights,
            quantized,
            ", ".join(_kernels(engine)),
            kept,
        )
        return self.weights


def _kernels(engine: Any) -> list[str]:
    """Return the names of vLLM's kernels in a live engine's layers of 8 bit."""
    modules = internals.model_of(engine).modules()
    methods = [getattr(module, "quant_method", None) for module in modules]
    kernels = [getattr(method, "kernel", getattr(method, "fp8_linear", None)) for method in methods]
    return sorted({type(kernel).__name__ for kernel in kernels if kernel is not None})


def linear_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of the linear layers that can be quantized, in the policy's order."""
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and ".layers." in name and name.endswith(".weight")
    ]
