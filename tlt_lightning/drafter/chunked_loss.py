"""Compute losses and agreement over the vocabulary in chunks of entries.

The output head is frozen, so the backward pass needs only the gradient with respect to the features, and to what a head
adds to its logits. It is taken while a chunk's logits exist: they are computed once and never kept.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_lightning.arguments import NotNegative, check_argument
from tlt_lightning.fused.compiled import compiled_on_gpu

_LOGITS = 2**27  # of a chunk: 0.25 GiB in bfloat16, 768 entries over 152k tokens
_TILE = 128  # rows of a product that a multiprocessor takes at once; the last tile costs as much as a full one

Watcher = Callable[[int, slice, Tensor, Tensor], None]
LossTerms = Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], float]]
LOSSES = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")


def check_names(loss: str | Mapping[str, float]) -> None:
    """Raise ValueError for a name that `LOSSES` lacks, or a weight that is none."""
    weights = {loss: 1.0} if isinstance(loss, str) else loss
    if not weights or set(weights) - set(LOSSES):
        raise ValueError(f"`loss` names {', '.join(map(str, weights)) or 'nothing'}; choose from {', '.join(LOSSES)}.")
    for name, weight in weights.items():
        check_argument(f"loss.{name}", weight, NotNegative)


def terms_of(loss_spec: str, states: Tensor) -> LossTerms:
    """Return the losses that `loss_spec` names, a name or JSON with weights, in the kernels of the states' device."""
    from speculators.losses import resolve_loss_config

    return resolve_loss_config(loss_spec, "fused" if states.is_cuda else "eager")


@dataclass(slots=True)
class Predictions:
    """Compares the head with the target at each entry and step, (num_steps, T) each.

    `losses` is the weighted sum of the loss terms, float32; `top1` and `top3` tell whether the target's likeliest token
    is the head's, or among its three likeliest. Where no target exists they mean nothing.
    """

    losses: Tensor
    top1: Tensor
    top3: Tensor


def predict(
    head: Any,
    features: Tensor,
    last_states: Tensor,
    terms: LossTerms,
    weights: Tensor,
    watch: Watcher | None = None,
    *,
    compares: bool = True,
    bias: tuple[Tensor, Tensor] | None = None,
) -> tuple[Predictions, Tensor]:
    """Return the comparison of `features` with the target, and the weighted sum of losses.

    Args:
        head: Head with its target's weights.
        features: Features of the head before its norm. (num_steps, T, H)
        last_states: Input of the target's final norm; entry `i` of step `k` is compared with entry `i + k`. (T, H)
        terms: Losses of `speculators` with their weights.
        weights: Weight of each loss. (num_steps, T)
        watch: Called with each chunk's step, its rows, and the logits of head and target over the head's tokens.
        compares: Tell `top1` and `top3`, which takes three passes over the logits; else they are False.
        bias: Features (num_steps, T, R) and a trained weight (V, R), whose product is added to the head's logits.
    """
    normed = head.norm(features)
    num_steps, num_entries = weights.shape
    needs_grad = normed.requires_grad and torch.is_grad_enabled()
    learns = [normed, *(bias or ())]
    gradients = [torch.zeros_like(each) for each in learns]
    result = Predictions(
        losses=weights.new_zeros(weights.shape),
        top1=torch.zeros_like(weights, dtype=torch.bool),
        top3=torch.zeros_like(weights, dtype=torch.bool),
    )
    for at, pieces in _chunks(num_steps, num_entries, len(head.lm_head.weight)):
        with torch.no_grad():
            targets = _logits(head.verifier_lm_head.weight, head.verifier_norm(last_states[at]))
        for steps, rows in pieces:
            here, length = (slice(steps.start, steps.stop), rows), rows.stop - rows.start
            parts = [_from(targets, rows.start + step - at.start, length) for step in steps]
            theirs = torch.stack(parts) if len(parts) > 1 else parts[0][None]
            inputs = [each[here].detach().requires_grad_(needs_grad) for each in learns[:2]]
            with torch.set_grad_enabled(needs_grad):
                logits = _logits(head.lm_head.weight, inputs[0])
                if bias is not None:
                    inputs.append(bias[1].detach().requires_grad_(needs_grad))
                    logits = logits + F.linear(*inputs[1:])
                pair = logits.flatten(0, 1)[None], theirs.flatten(0, 1)[None]
                each = torch.stack([weight * term(*pair)[0] for term, weight in terms.values()])
                losses = each.sum(0).unflatten(0, (-1, length))
                if needs_grad:
                    found = torch.autograd.grad((losses * weights[here]).sum(), inputs)
                    for gradient, part in zip(gradients, found[:2], strict=False):
                        gradient[here] = part
                    if bias is not None:
                        gradients[2] += found[2]
            result.losses[here] = losses.detach()
            if compares:
                _compare(logits.detach(), theirs, result, here)
            if watch is not None:
                for step, mine, its in zip(steps, logits.detach(), theirs, strict=True):
                    known = min(length, num_entries - step - rows.start)
                    watch(step, slice(rows.start, rows.start + known), mine[:known], its[:known])
    total = (result.losses * weights).sum()
    return result, _WithGradient.apply(total, gradients, *learns) if needs_grad else total


def _chunks(num_steps: int, num_entries: int, vocab_size: int) -> Iterator[tuple[slice, list[tuple[range, slice]]]]:
    """Yield targets whose logits are held at once, with the steps compared together with them, and their entries."""
    chunk = max(1, _LOGITS // vocab_size)
    chunk = max(chunk - chunk % _TILE, min(chunk, _TILE))
    # Steps of a whole pack are compared together, as many as are a chunk: small heads are bound by their kernels.
    together = max(1, chunk // num_entries)
    groups = [range(first, min(first + together, num_steps)) for first in range(0, num_steps, together)]
    for start in range(0, num_entries, chunk):
        stop = min(start + chunk, num_entries)
        # Targets `start` to `stop` belong to the entries `step` before them; of steps together the last have none.
        of_groups = ((max(0, start - each[0]), stop if len(each) > 1 else max(0, stop - each[0])) for each in groups)
        pieces = [(steps, slice(*rows)) for steps, rows in zip(groups, of_groups, strict=True) if rows[0] < rows[1]]
        yield slice(start, stop), pieces


def _logits(weight: Tensor, states: Tensor) -> Tensor:
    return F.linear(states.to(weight.dtype), weight)


def _from(targets: Tensor, first: int, length: int) -> Tensor:
    """Return rows of `targets` from `first` on, `length` in all: with zeros behind the last, else a view."""
    behind = first + length - len(targets)
    return F.pad(targets[first:], (0, 0, 0, behind)) if behind else targets[first:]


def _compare(logits: Tensor, targets: Tensor, result: Predictions, index: Any) -> None:
    ranks = _rank(logits.flatten(0, 1), targets.flatten(0, 1)).view(logits.shape[:2])
    result.top1[index] = ranks < 1
    result.top3[index] = ranks < 3


@compiled_on_gpu
def _rank(logits: Tensor, targets: Tensor) -> Tensor:
    """Count the tokens that the head finds likelier than the target's likeliest: cheaper than sorting. (n,), int64."""
    goals = logits.gather(-1, targets.argmax(-1, keepdim=True))
    return (logits > goals).sum(-1)


class _WithGradient(torch.autograd.Function):
    """Returns a value whose gradients with respect to its last arguments are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad * gradient for gradient in ctx.saved_tensors)
