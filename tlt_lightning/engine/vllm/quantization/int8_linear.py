"""Quantize linear layers to int8 whenever weights arrive, which vLLM itself does for fp8 and for experts only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization.online import base
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt8StaticChannelSym
from vllm.model_executor.utils import replace_parameter

_DONE = "_already_called_process_weights_after_loading"  # vLLM's mark, which a reload takes away


class Int8Linear(OnlineLinearBase):
    """Multiplies int8 activations, a scale a token, by int8 weights, a scale an output channel."""

    activation_quant_key = None

    @override
    def create_weights(self, layer: nn.Module, *args: object, **extra_weight_attrs: object) -> None:
        super().create_weights(layer, *args, **extra_weight_attrs)  # type: ignore[arg-type]
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
        )

    @override
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, _DONE, False):
            return
        weight = self.get_weight_for_quantization(layer)
        # A CPU without VNNI adds two products of 8 bits in 16, which holds weights of 7 bits.
        levels = 63 if weight.is_cpu else 127
        quantized, self.scale = quantized_by_channel(weight, levels)  # kept: a CPU's kernel reads it in place
        replace_parameter(layer, "weight", quantized)
        replace_parameter(layer, "weight_scale", self.scale)
        for name in ("input_scale", "input_zero_point", "azp_adj"):  # of activations with fixed scales
            setattr(layer, name, None)
        self.kernel.process_weights_after_loading(layer)
        setattr(layer, _DONE, True)

    @override
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)


def quantized_by_channel(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return `weight` (N, K) in int8, at most `levels` in size, and the scale of each channel, (N, 1) in float32."""
    scale = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / levels
    rows = max(1, 2**24 // weight.shape[1])  # at a time: the quotients in float32 take little memory beside the weight
    parts = zip(weight.split(rows), scale.split(rows), strict=True)
    return torch.cat([(part / s).round().to(torch.int8) for part, s in parts]), scale


def install() -> None:
    """Enter the method into vLLM's table of those that quantize while weights arrive."""
    base._ONLINE_LINEAR_METHODS.setdefault(kInt8StaticChannelSym, Int8Linear)
