"""Check an objective on a small batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from tlt_lightning.objectives.base import ObjectiveOutput, PolicyObjective
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.rollout import Prompt, Response, Rollout, RolloutBatch, collate
from tlt_lightning.testing.methods import check_methods, named, shown


def check_objective(objective: PolicyObjective) -> None:
    """Check an objective: its advantages, and its loss of a batch in one piece and in two micro-batches.

    The tensors that it asks for, such as `ref_logps` by `needs_reference`, are there, and no others. Two groups have
    rewards to learn from, one has equal ones; one response is masked as a whole.
    """
    check_methods(objective)
    for piece in vars(objective).values() if isinstance(objective, ComposedObjective) else ():
        if any(map(inspect.isabstract, type(piece).__mro__)):
            check_methods(piece)
    batch = _scored_batch(objective)
    (batch.advantages, batch.returns), again = (_advantages(objective, batch) for _ in range(2))
    is_same, who = torch.equal(batch.advantages, again[0]), named(objective, "advantages")
    assert is_same, f"{who} returned others in the second call: keep nothing between calls."
    batch.old_logps = _policy_logps(batch)
    if isinstance(objective, ComposedObjective):
        _check_pieces(objective, batch)
    whole = _loss(objective, batch, range(len(batch)))
    masked = _loss(objective, batch, range(len(batch)), shift=-3.0)
    halves = [_loss(objective, batch, range(start, len(batch), 2)) for start in (0, 1)]
    is_masked, who = torch.allclose(masked["loss"], whole["loss"], rtol=1e-4), named(objective, "loss")
    assert is_masked, f"{who} counts tokens where `batch.response_mask` is 0: take `token_mean` or an aggregation."
    for name, value in whole.items():
        parts = torch.stack([half[name].float() for half in halves if name in half])
        total = parts.max() if name.endswith("_max") else parts.sum()
        assert torch.allclose(total, value.float(), rtol=1e-4, atol=1e-6), (
            f"{who} returned `{name}` {value:.4g} of a batch, and {total:.4g} in its two micro-batches: divide by the "
            "counts of the whole step, `batch.num_loss_tokens` or `batch.num_loss_sequences`."
        )


def _noise(like: RolloutBatch, seed: int) -> Tensor:
    return torch.randn(like.response_mask.shape, generator=torch.Generator().manual_seed(seed))


def _policy_logps(batch: RolloutBatch) -> Tensor:
    """Return the log-probs of the policy, in its first update, which are not quite the engine's."""
    return batch.rollout_logps + batch.response_mask * _noise(batch, 4) / 50


def _scored_batch(objective: PolicyObjective) -> RolloutBatch:
    """Return a batch of three groups that waits for advantages."""
    size = max(4, objective.min_group_size)
    lengths, rewards = [6, 3, 5, 1] * size, [*[0.0, 0.5, 1.0] * size][: 2 * size] + [0.1] * size
    responses = [Response(i, [5] * lengths[i], [0.0] * lengths[i], "stop", (0,)) for i in range(3 * size)]
    rollouts = [
        Rollout(Prompt("", [3, 4]), response, "", group=i // size, reward=rewards[i])
        for i, response in enumerate(responses)
    ]
    batch = collate(rollouts, pad_id=0, temperature=1.0)
    batch.response_mask[1] = 0  # by a callback
    mask = batch.response_mask
    batch.num_loss_tokens, batch.num_loss_sequences = batch.count_loss(range(len(batch)))
    batch.rollout_logps = -mask * _noise(batch, 1).abs()
    batch.old_logps = _policy_logps(batch) if objective.needs_old_logps else None
    batch.ref_logps = batch.rollout_logps - mask * _noise(batch, 2) / 10 if objective.needs_reference else None
    batch.values = mask * _noise(batch, 3) if objective.needs_critic else None
    return batch


def _called(objective: PolicyObjective, method: str, batch: RolloutBatch, *inputs: Any) -> Any:
    """Call a method; it has to leave the batch as it is, and to do with the tensors that it has asked for."""
    who, before = named(objective, method), deepcopy(batch)
    absent = [f"`batch.{item.name}`" for item in fields(batch) if getattr(batch, item.name) is None]
    try:
        found = getattr(objective, method)(batch, *inputs)
    except Exception as error:
        remedy = f"what `PolicyObjective` has a property for is there if that is true; None here: {', '.join(absent)}"
        raise AssertionError(f"{who} raised {error!r}: {remedy}.") from error
    for item in fields(batch):
        value = getattr(before, item.name)
        is_same = not isinstance(value, Tensor) or torch.equal(value, getattr(batch, item.name))
        assert is_same, f"{who} changed `batch.{item.name}` in place, and others read it: change a `clone()`."
    return found


def _check_per_token(found: Any, mask: Tensor, who: str, what: str) -> None:
    got = tuple(found.shape) if isinstance(found, Tensor) else f"{shown(found)}"
    is_shaped = isinstance(found, Tensor) and found.shape == mask.shape
    assert is_shaped, f"{who} returned {what} {got}: return one for each token, {tuple(mask.shape)} as `response_mask`."
    assert found.isfinite().all(), f"{who} returned {what} with NaN or infinite values: keep them finite."


def _advantages(objective: PolicyObjective, batch: RolloutBatch) -> tuple[Tensor, Tensor | None]:
    found, who = _called(objective, "advantages", batch, lambda x: x), named(objective, "advantages")
    is_pair = isinstance(found, tuple) and len(found) == 2
    assert is_pair, f"{who} returned {shown(found)}: return a pair, advantages and the critic's targets or None."
    for what, tensor in zip(("advantages", "targets"), found, strict=True):
        if what == "advantages" or objective.needs_critic or tensor is not None:
            _check_per_token(tensor, batch.response_mask, who, what)
    is_zero = not found[0][batch.response_mask == 0].any()
    assert is_zero, f"{who} returned others than 0 where `batch.response_mask` is 0: multiply them by it."
    return found[0].detach(), None if found[1] is None else found[1].detach()


def _check_pieces(objective: ComposedObjective, batch: RolloutBatch) -> None:
    """Check what surrogate and correction return: one number for all would be spread over the tokens."""
    mask, old_logps, advantages = batch.response_mask.bool(), cast("Tensor", batch.old_logps), batch.advantages
    found: Any = objective.surrogate(old_logps, old_logps, cast("Tensor", advantages), mask)
    who = f"`{type(objective.surrogate).__name__}`"
    is_pair = isinstance(found, tuple) and len(found) == 2
    assert is_pair, f"{who} returned {shown(found)}: return a pair, losses and which of them are clipped."
    _check_per_token(found[0], mask, who, "losses")
    _check_per_token(found[1], mask, who, "which losses are clipped")
    if (piece := objective.correction) is not None:
        _check_per_token(piece(old_logps, batch.rollout_logps, mask), mask, f"`{type(piece).__name__}`", "weights")


def _loss(objective: PolicyObjective, batch: RolloutBatch, rows: Sequence[int], shift: float = 0) -> dict[str, Tensor]:
    """Return loss and metrics of some sequences, of which masked log-probs are shifted, with gradients checked."""
    who, part = named(objective, "loss"), batch.select(rows)
    logps = (cast("Tensor", part.old_logps) + shift * (1 - part.response_mask)).requires_grad_()
    entropy = (part.response_mask * 0.5).requires_grad_()
    values = None if part.values is None else (part.values * 1.1 + 0.01).detach().requires_grad_()
    output = _called(objective, "loss", part, logps, entropy, values)
    is_output = isinstance(output, ObjectiveOutput) and isinstance(output.loss, Tensor) and output.loss.ndim == 0
    is_output = is_output and isinstance(output.metrics, dict)
    remedy = "return an `ObjectiveOutput`, whose `loss` is a scalar and whose `metrics` are a dictionary"
    assert is_output, f"{who} returned {shown(output)}: {remedy}."
    metrics = {name: torch.as_tensor(value) for name, value in output.metrics.items()}
    for name, value in metrics.items():
        assert not (value.ndim or value.requires_grad), f"{who} returned `{name}` {shown(value)}: `detach()` a scalar."
    assert output.loss.isfinite(), f"{who} returned a loss of {output.loss}: keep it finite."
    if output.loss.requires_grad:
        output.loss.backward()
    is_learned, is_entropy_learned = (each.grad is not None and bool(each.grad.any()) for each in (logps, entropy))
    remedy = "compute it from `logps`, without `detach`, `item` or `no_grad`"
    assert is_learned, f"{who} returned a loss without gradient, from which nothing is learned: {remedy}."
    remedy = "which has a gradient only where `needs_entropy_grad` is True: set it in the class, or use `entropy_coef`"
    assert objective.needs_entropy_grad or not is_entropy_learned, f"{who} learns from `entropy`, {remedy}."
    return {"loss": output.loss.detach(), **metrics}
