"""Check an objective on a small batch."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor

from tlt_lightning.objectives.base import ObjectiveOutput, PolicyObjective
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.objectives.surrogates import Surrogate
from tlt_lightning.rollout import Prompt, Response, Rollout, RolloutBatch, collate
from tlt_lightning.testing.plugin import named, shown


def check_objective(objective: PolicyObjective) -> None:
    """Check an objective: its advantages, and its loss of a batch in one piece and in two micro-batches.

    The tensors that it asks for, such as `ref_logps` by `needs_reference`, are there, and no others. Two groups have
    rewards to learn from, one has equal ones; one response is masked as a whole.
    """
    for name in (name for name, declared in vars(PolicyObjective).items() if isinstance(declared, property)):
        is_method = callable(getattr(objective, name))
        assert not is_method, f"{named(objective, name)} is a method, and is read as a value: add `@property`."
    batch, who = _scored_batch(objective), named(objective, "advantages")
    found = _called(objective, "advantages", batch, lambda x: x)
    is_pair = isinstance(found, tuple) and len(found) == 2
    assert is_pair, f"{who} returned {shown(found)}: return advantages and a critic's targets, or None for these."
    batch.advantages, batch.returns = found
    mask, targets = batch.response_mask, batch.returns if objective.needs_critic else batch.advantages
    for what, tensor in (("advantages", batch.advantages), ("targets", targets)):
        is_whole = isinstance(tensor, Tensor) and tensor.shape == mask.shape and bool(tensor.isfinite().all())
        remedy = f"return a finite number for each token, {tuple(mask.shape)} as `response_mask`"
        assert is_whole, f"{who} returned {what} {shown(tensor)}: {remedy}."
    is_zero = not batch.advantages[mask == 0].any()
    assert is_zero, f"{who} returned others than 0 where `batch.response_mask` is 0: multiply them by it."
    batch.old_logps, who = _policy_logps(batch), named(objective, "loss")
    if isinstance(objective, ComposedObjective):
        _check_ratio(objective.surrogate, batch.old_logps, mask * _noise(batch, 6), mask.bool())
    whole = _loss(objective, batch, range(len(batch)))
    masked = _loss(objective, batch, range(len(batch)), shift=-3.0)
    halves = [_loss(objective, batch, range(start, len(batch), 2)) for start in (0, 1)]
    is_masked = torch.allclose(masked["loss"], whole["loss"], rtol=1e-4)
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
    batch.divergence = mask * _noise(batch, 5).abs() if objective.divergence is not None else None
    batch.values = mask * _noise(batch, 3) if objective.needs_critic else None
    return batch


def _called(objective: PolicyObjective, method: str, batch: RolloutBatch, *inputs: Any) -> Any:
    """Call a method, which has to leave the batch as it is."""
    who, before = named(objective, method), deepcopy(batch)
    found = getattr(objective, method)(batch, *inputs)
    for name in RolloutBatch.__slots__:
        value = getattr(before, name)
        is_same = not isinstance(value, Tensor) or torch.equal(value, getattr(batch, name))
        assert is_same, f"{who} changed `batch.{name}` in place, and others read it: change a `clone()`."
    return found


def _check_ratio(surrogate: Surrogate, logps: Tensor, advantages: Tensor, mask: Tensor) -> None:
    """Check that a surrogate holds the ratio if it says so: else text of older weights is weighed twice, or not."""
    losses = [surrogate(logps, logps - shift * mask, advantages, mask)[0] for shift in (0, 0.1)]
    assert surrogate.has_ratio != torch.equal(*losses), (
        f"`{type(surrogate).__name__}.has_ratio` is {surrogate.has_ratio}, and with other `old_logps` its loss is "
        f"{'the same' if surrogate.has_ratio else 'another'}: set it to {not surrogate.has_ratio}."
    )


def _loss(objective: PolicyObjective, batch: RolloutBatch, rows: Sequence[int], shift: float = 0) -> dict[str, Tensor]:
    """Return loss and metrics of some sequences, of which masked log-probs are shifted, with gradients checked."""
    who, part = named(objective, "loss"), batch.select(rows)
    logps = (cast("Tensor", part.old_logps) + shift * (1 - part.response_mask)).requires_grad_()
    entropy = (part.response_mask * 0.5).requires_grad_()
    values = None if part.values is None else (part.values * 1.1 + 0.01).detach().requires_grad_()
    if part.divergence is not None:
        part.divergence = (part.divergence + shift * (1 - part.response_mask)).requires_grad_()
    output = _called(objective, "loss", part, logps, entropy, values)
    is_output = isinstance(output, ObjectiveOutput)
    assert is_output, f"{who} returned {shown(output)}: return `ObjectiveOutput(loss, metrics)`."
    metrics = {"loss": output.loss.detach(), **{name: torch.as_tensor(each) for name, each in output.metrics.items()}}
    for name, value in metrics.items():
        is_number = not (value.ndim or value.requires_grad) and bool(value.isfinite())
        assert is_number, f"{who} returned `{name}` {shown(value)}: return a finite scalar, metrics by `detach()`."
    if output.loss.requires_grad:
        output.loss.backward()
    *learned, is_entropy_learned = (
        each is not None and each.grad is not None and bool(each.grad.any())
        for each in (logps, part.divergence, entropy)
    )
    remedy = "compute it from `logps`, without `detach`, `item` or `no_grad`"
    assert any(learned), f"{who} returned a loss without gradient, from which nothing is learned: {remedy}."
    remedy = "which has a gradient only where `needs_entropy_grad` is True: set it in the class, or use `entropy_coef`"
    assert objective.needs_entropy_grad or not is_entropy_learned, f"{who} learns from `entropy`, {remedy}."
    return metrics
