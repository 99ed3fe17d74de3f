"""Keep hidden states of the policy from forward passes that happen anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tlt_lightning.packed_pass import can_pack
from tlt_lightning.policy import causal_lm
from tlt_lightning.rollout import RolloutBatch

_NUM_STRATA = 4  # classes of length that `choose_rows` serves alike; each holds as many tokens as any other


@dataclass(slots=True)
class PolicyText:
    """Holds a prompt with its response, `n` tokens together, as the policy saw it.

    Args:
        input_ids: Prompt, then response. (n,), int64
        states: Hidden states of the policy at the layers asked for, side by side. (n, number of layers * H), bfloat16
        last_states: Input of the policy's final norm; what the policy predicts follows from it. (n, H), bfloat16
        prompt_length: Tokens of the prompt.
        policy_version: Version of the weights that the states come from.
        others: Spans of tokens behind the prompt, `start` to `stop`, that the policy did not write.
    """

    input_ids: Tensor
    states: Tensor
    last_states: Tensor
    prompt_length: int
    policy_version: int = 0
    others: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def nbytes(self) -> int:
        """Memory of the three tensors."""
        return self.input_ids.nbytes + self.states.nbytes + self.last_states.nbytes


@dataclass(frozen=True, slots=True)
class HiddenStateRequest:
    """Tells `RLModule` which hidden states of an iteration to keep.

    Set `RLModule.hidden_state_request`; callbacks get the states in `on_hidden_states`.

    Args:
        layer_ids: Layers as EAGLE-3 heads and vLLM count them: `i` is the input of decoder layer `i`, from 0, which is
            `hidden_states[i]` of Hugging Face; the number of layers is the output of the last one.
        max_tokens: Most tokens of one rank and iteration whose states are kept.
        share: The same as a share of the iteration's tokens; room for two of its longest texts is left either way.
        seed: Chooses among the rows.
    """

    layer_ids: tuple[int, ...]
    max_tokens: int
    share: float = 1.0
    seed: int = 0

    def rows(self, lengths: Sequence[int]) -> list[int]:
        """Return the rows whose states are kept, ascending, from the texts' numbers of tokens."""
        wanted = max(int(self.share * sum(lengths)), 2 * max(lengths, default=0))
        return choose_rows(lengths, min(self.max_tokens, wanted), torch.Generator().manual_seed(self.seed))


class HiddenStateTap:
    """Keeps the hidden states of some rows of one forward pass of a policy.

    Args:
        model: The policy; PEFT's wrapper may be around it.
        layer_ids: As in `HiddenStateRequest`.
        rows: Rows of the micro-batch to keep.
        starts: First place of each row in a packed pass, and the number of all places; None for a padded pass.

    Raises:
        ValueError: A layer is not one of the policy's.

    Example:
        >>> with HiddenStateTap(policy, (2, 14, 25), rows=[0]) as tap:  # doctest: +SKIP
        ...     policy(input_ids)
        >>> tap.read([input_ids[0]], [prompt_length])[0].states.shape  # doctest: +SKIP
    """

    def __init__(
        self, model: nn.Module, layer_ids: Sequence[int], rows: Sequence[int], starts: Sequence[int] | None = None
    ) -> None:
        trunk: Any = causal_lm(model).base_model
        num_layers = len(trunk.layers)
        if wrong := [layer for layer in layer_ids if not 0 <= layer <= num_layers]:
            raise ValueError(f"`layer_ids` names {wrong}, but the policy's layers are 0 to {num_layers}.")
        self.layer_ids, self.rows, self.starts = tuple(layer_ids), list(rows), starts
        modules = [*trunk.layers, trunk.norm]  # the input of each is the output of the layer before
        self._sources: dict[int, nn.Module] = {layer: modules[layer] for layer in (*layer_ids, num_layers)}
        self._last = num_layers
        self._states: dict[int, Sequence[Tensor]] = {}  # of each row
        self._handles: list[Any] = []

    def __enter__(self) -> HiddenStateTap:
        for layer, module in self._sources.items():
            self._handles.append(module.register_forward_pre_hook(self._keeper(layer), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _keeper(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = (args[0] if args else kwargs["hidden_states"]).detach()  # (B, S, H), packed (1, N, H)
            # Not `states[self.rows]`: the list would have to reach the device, for which the host waits.
            if (starts := self.starts) is None:
                parts = [states[row] for row in self.rows]
            else:
                parts = [states[0, starts[row] : starts[row + 1]] for row in self.rows]
            self._states[layer] = torch.cat(parts).bfloat16().split([len(part) for part in parts])

        return keep

    def read(self, texts: Sequence[Tensor], prompt_lengths: Sequence[int], policy_version: int = 0) -> list[PolicyText]:
        """Move the kept states of each row to the CPU, and empty the tap.

        Args:
            texts: Tokens of each row without padding, on the CPU. (n,) each
            prompt_lengths: Tokens of each prompt.
            policy_version: Version of the policy's weights.
        """
        results = []
        for number, (ids, prompt_length) in enumerate(zip(texts, prompt_lengths, strict=True)):
            states = torch.cat([self._states[layer][number][: len(ids)] for layer in self.layer_ids], -1)
            last = self._states[self._last][number][: len(ids)].to("cpu", copy=True)  # no view of all rows' states
            results.append(PolicyText(ids.clone(), states.cpu(), last, prompt_length, policy_version))
        self._states.clear()
        return results


class BatchTap:
    """Gathers an iteration's texts from its micro-batches' forward passes, each row once.

    The first pass over a row gives its states: the log-prob pass, or the update's own where there is none. That sees
    the policy from before the update, but under an asynchronous schedule the later steps' rows amid it.

    Args:
        model: The policy.
        request: What to keep.
        batch: All sequences of a rank.
        policy_version: Version of the policy's weights.
    """

    def __init__(self, model: nn.Module, request: HiddenStateRequest, batch: RolloutBatch, policy_version: int) -> None:
        self.model, self.request, self.batch, self.policy_version = model, request, batch, policy_version
        self._lengths: list[int] = batch.lengths.tolist()
        self._missing = set(request.rows(self._lengths))
        self._texts: dict[int, PolicyText] = {}

    @property
    def texts(self) -> list[PolicyText]:
        """Texts gathered so far, in the order of the batch."""
        return [self._texts[row] for row in sorted(self._texts)]

    @contextmanager
    def over(self, rows: Sequence[int]) -> Iterator[None]:
        """Wrap the policy's forward pass over the micro-batch of these rows of the batch."""
        kept = {row: place for place, row in enumerate(rows) if row in self._missing}
        if not kept:
            yield
            return
        is_packed = can_pack(causal_lm(self.model).base_model)
        starts = [0, *accumulate(self._lengths[row] for row in rows)] if is_packed else None
        with HiddenStateTap(self.model, self.request.layer_ids, list(kept.values()), starts) as tap:
            yield
        texts = [self.batch.input_ids[row, : self._lengths[row]] for row in kept]
        prompt_lengths = [int(self.batch.prompt_lengths[row]) for row in kept]
        self._texts |= zip(kept, tap.read(texts, prompt_lengths, self.policy_version), strict=True)
        if self.batch.observed is not None:
            for row, start in zip(kept, prompt_lengths, strict=True):
                self._texts[row].others = true_spans(self.batch.observed[row], start)
        self._missing -= set(kept)


def true_spans(mask: Tensor, shift: int = 0) -> tuple[tuple[int, int], ...]:
    """Return the spans of a mask (T,) that are true, `start` to `stop`, moved by `shift`."""
    edges = torch.diff(mask.int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int()).nonzero() + shift
    starts, stops = edges.view(-1, 2).T.tolist()
    return tuple(zip(starts, stops, strict=True))


def choose_rows(lengths: Sequence[int], max_tokens: int, generator: torch.Generator) -> list[int]:
    """Choose the rows whose hidden states are kept: some of every length.

    Rows are classed by length, a quarter of all tokens in each class: the few longest rows are one, the many short ones
    another. The class with the fewest chosen tokens gives the next row, at random; the longest class comes first. So
    the choice has the iteration's lengths, and a long row if any fits.

    Args:
        lengths: Tokens of each row.
        max_tokens: Most tokens of the chosen rows together.
        generator: Source of randomness; the same state gives the same choice.

    Returns:
        Row numbers, ascending. All rows if they fit, none if even the shortest does not.
    """
    strata: list[list[int]] = [[] for _ in range(_NUM_STRATA)]
    total, seen = sum(lengths), 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        strata[min(seen * _NUM_STRATA // max(total, 1), _NUM_STRATA - 1)].append(row)
        seen += lengths[row]
    for stratum in strata:
        stratum[:] = [stratum[index] for index in torch.randperm(len(stratum), generator=generator).tolist()]
    chosen: list[int] = []
    taken = [0] * _NUM_STRATA
    while any(strata):
        poorest = min((index for index in range(_NUM_STRATA) if strata[index]), key=lambda index: taken[index])
        row = strata[poorest].pop()
        if sum(taken) + lengths[row] <= max_tokens:
            chosen.append(row)
            taken[poorest] += lengths[row]
    return sorted(chosen)
