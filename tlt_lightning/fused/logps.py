"""Compute log-probs of chosen tokens and entropies from logits, of which nothing else of their size is kept.

From the hidden states before a frozen head they need no logits in the backward pass: a log-prob's gradient in its state
is known with the log-prob, and what the loss makes of the log-prob is one number a row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from tlt_lightning.fused.compiled import compiled_on_gpu

_FEWEST = 1024
_LOGITS = 160_000_000  # at a time: 305 MiB in 16 bit


def rows_per_chunk(vocab_size: int, num_heads: int = 1) -> int:
    """Return how many hidden states meet a vocabulary at a time.

    A large vocabulary limits them by the memory of logits, of two heads together where a teacher's are compared. Each
    chunk launches all kernels once, so that a small one has few chunks.
    """
    return max(_FEWEST, _LOGITS // (vocab_size * num_heads) // _FEWEST * _FEWEST)


def chosen_logps(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (N,) log-probs of `targets` and entropies of softmax(logits / temperature), in float32.

    Args:
        logits: Logits in any floating-point type. (N, V)
        targets: Token ids. (N,)
        temperature: Positive.
    """
    return _ChosenLogps.apply(logits, targets, temperature)


def is_frozen_linear(head: nn.Module) -> bool:
    """Return True if `chosen_logps_of_states` knows a head: a linear layer neither trained nor adapted."""
    return type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters())


def chosen_logps_of_states(
    head: nn.Linear, states: Tensor, targets: Tensor, temperature: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return (N,) log-probs of `targets` and entropies of softmax(head(states) / temperature), in float32.

    Entropies carry no gradient, and neither does the head.

    Args:
        head: A linear layer from H to V.
        states: Hidden states. (N, H)
        targets: Token ids. (N,)
        temperature: Positive.
        chunk_size: Rows that meet the head at a time.
    """
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    return _StatesLogps.apply(states.to(dtype), head.weight.to(dtype), bias, targets, temperature, chunk_size)


def joined(*outputs: Tensor) -> tuple[Tensor, ...]:
    """Return tensors that are differentiated together, with zeros where only some of them are in the loss.

    A checkpointed chunk computes the logits behind all of them again, and a backward pass that left one out would keep
    these: of all chunks, to the end.
    """
    return _Joined.apply(*outputs)


@compiled_on_gpu
def _statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and log-normalizers, (N,) each."""
    scaled = logits.float() / temperature
    top = scaled.amax(-1)
    scaled = scaled - top[:, None]
    weights = scaled.exp()
    total = weights.sum(-1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1).float() / temperature
    return chosen - top - total.log(), total.log() - (weights * scaled).sum(-1) / total, top + total.log()


@compiled_on_gpu
def _gradient(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    temperature: float,
    grad_logps: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return dL/dz / temperature with z = logits / temperature and p = softmax(z).

    dlogp/dz = onehot(target) - p, and of the entropy H dH/dz = -p (log p + H).
    """
    logps = logits.float() / temperature - normalizer[:, None]
    gradient = -grad_logps[:, None] * logps.exp()
    if entropy is not None and grad_entropy is not None:
        gradient = gradient - grad_entropy[:, None] * logps.exp() * (logps + entropy[:, None])
    del logps
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    gradient = torch.where(is_target, gradient + grad_logps[:, None], gradient)
    return (gradient / temperature).to(logits.dtype)


class _ChosenLogps(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logps, entropy, normalizer = _statistics(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # none comes from an entropy that no loss has
        return logps, entropy

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        grad_logps = torch.zeros_like(entropy) if grad_logps is None else grad_logps
        entropy = None if grad_entropy is None else entropy
        grad = _gradient(logits, targets, normalizer, ctx.temperature, grad_logps, entropy, grad_entropy)
        return grad, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _StatesLogps(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Take states (N, H), weight (V, H) and bias (V,) or None of one type."""
        results, gradients = [], torch.empty_like(states)
        rows = zip(states.split(chunk_size), targets.split(chunk_size), gradients.split(chunk_size), strict=True)
        for part, chosen, gradient in rows:
            logits = nn.functional.linear(part, weight, bias)
            logps, entropy, normalizer = _statistics(logits, chosen, temperature)
            grad = _gradient(logits, chosen, normalizer, temperature, torch.ones_like(logps), None, None)
            torch.mm(grad, weight, out=gradient)
            results.append((logps, entropy))
            del logits, grad  # before the next chunk's come
        ctx.save_for_backward(gradients)
        logps, entropies = (torch.cat(each) for each in zip(*results, strict=True))
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad_logps: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return (grad_logps[:, None] * gradients).to(gradients.dtype), None, None, None, None, None
