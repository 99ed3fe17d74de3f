"""Compute how far two distributions over a vocabulary are apart, from their logits, of which nothing else is kept.

With p = softmax(z / temperature) of the logits z that are learned, q likewise of those that are not, and the mixture
m = (1 - beta) p + beta q, the generalized Jensen-Shannon divergence (GKD, arXiv 2306.13649, Eq. 1) and its gradient are

    0 < beta < 1     D = beta KL(q || m) + (1 - beta) KL(p || m)     dD/dz = (1 - beta) p (log p/m - KL(p || m))
    beta = 0         D = KL(q || p)                                  dD/dz = p - q
    beta = 1         D = KL(p || q)                                  dD/dz = p (log p/q - KL(p || q))

each gradient over the temperature. Between 0 and 1 it vanishes towards both ends, at which it is a KL by definition.
"""

from math import log
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from tlt_lightning.fused.compiled import compiled_on_gpu


def generalized_jsd(logits: Tensor, others: Tensor, temperature: float, beta: float) -> Tensor:
    """Return the divergence of each row, (N,) in float32, or in float64 if the logits are that.

    Args:
        logits: Logits of the distribution that is learned. (N, V), with gradient
        others: Logits of the one that it is compared with. (N, V), without
        temperature: Positive.
        beta: Between 0 and 1.
    """
    return _GeneralizedJSD.apply(logits, others, temperature, beta)


def _logps(logits: Tensor, temperature: float) -> Tensor:
    upcast = logits if logits.dtype == torch.float64 else logits.float()
    return (upcast / temperature).log_softmax(-1)


def _log_mixture(logps: Tensor, other_logps: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(logps + log(1 - beta), other_logps + log(beta))


@compiled_on_gpu
def _divergences(logits: Tensor, others: Tensor, temperature: float, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergences, and the KL of what is learned that the gradient needs, (N,) each."""
    logps, other_logps = _logps(logits, temperature), _logps(others, temperature)
    if beta == 0:
        divergence = (other_logps.exp() * (other_logps - logps)).sum(-1)
        return divergence, divergence
    middle = other_logps if beta == 1 else _log_mixture(logps, other_logps, beta)
    own = (logps.exp() * (logps - middle)).sum(-1)
    if beta == 1:
        return own, own
    return beta * (other_logps.exp() * (other_logps - middle)).sum(-1) + (1 - beta) * own, own


@compiled_on_gpu
def _gradient(logits: Tensor, others: Tensor, temperature: float, beta: float, own: Tensor, grad: Tensor) -> Tensor:
    logps, other_logps = _logps(logits, temperature), _logps(others, temperature)
    if beta == 0:
        gradient = logps.exp() - other_logps.exp()
    else:
        middle = other_logps if beta == 1 else _log_mixture(logps, other_logps, beta)
        gradient = (1.0 if beta == 1 else 1 - beta) * logps.exp() * (logps - middle - own[:, None])
    return (gradient * (grad[:, None] / temperature)).to(logits.dtype)


class _GeneralizedJSD(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, others: Tensor, temperature: float, beta: float) -> Tensor:
        divergence, own = _divergences(logits, others, temperature, beta)
        ctx.save_for_backward(logits, others, own)
        ctx.settings = temperature, beta
        return divergence

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, others, own = ctx.saved_tensors
        return _gradient(logits, others, *ctx.settings, own, grad), None, None, None
