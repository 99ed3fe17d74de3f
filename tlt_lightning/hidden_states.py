"""Hidden states of the policy out of forward passes that happen anyway: what a drafter learns from, for free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.policy import causal_lm


@dataclass(slots=True)
class HiddenStates:
    """Hidden states of one sequence of `n` tokens, prompt and response, on the CPU in bfloat16.

    Args:
        layers: Those of the layers asked for, side by side in their order. (n, number of layers * H)
        last: The input of the policy's final norm, which its head's input is the norm of. (n, H)
    """

    layers: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class HiddenStateRequest:
    """What `RLModule` is to keep of a pass over all rollouts; set it as `RLModule.hidden_state_request`.

    Callbacks get the states in `on_hidden_states`.

    Args:
        layer_ids: Layers as EAGLE-3 heads and vLLM count them: `i` is the input of decoder layer `i`, counted from 0,
            and the number of layers is the output of the last one. For all but that one these are
            `hidden_states[i]` of Hugging Face.
        choose: Given the whole batch of a rank, the rows to keep the states of; called once per iteration.
    """

    layer_ids: tuple[int, ...]
    choose: Callable[[RolloutBatch], Sequence[int]]


class HiddenStateTap:
    """Keeps the hidden states of some rows of one forward pass of a policy; works around any forward of its trunk.

    Args:
        model: The policy; PEFT's wrapper may be around it.
        layer_ids: As in `HiddenStateRequest`.
        rows: Rows of the micro-batch to keep.

    Raises:
        ValueError: A layer is not one of the policy's.

    Example:
        >>> with HiddenStateTap(policy, (2, 14, 25), rows=[0]) as tap:  # doctest: +SKIP
        ...     policy(input_ids)
        >>> tap.read([length])[0].layers.shape  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], rows: Sequence[int]) -> None:
        trunk: Any = causal_lm(model).base_model
        num_layers = len(trunk.layers)
        if wrong := [layer for layer in layer_ids if not 0 <= layer <= num_layers]:
            raise ValueError(f"`layer_ids` names {wrong}, but the policy's layers are 0 to {num_layers}.")
        self.layer_ids = tuple(layer_ids)
        self.rows = list(rows)
        self._sources: dict[int, nn.Module] = {layer: _source(trunk, layer) for layer in (*layer_ids, num_layers)}
        self._last = num_layers
        self._states: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> HiddenStateTap:
        """Start keeping."""
        for layer, module in self._sources.items():
            self._handles.append(module.register_forward_pre_hook(self._keeper(layer), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop keeping."""
        while self._handles:
            self._handles.pop().remove()

    def _keeper(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]  # (B, S, H)
            # Not `states[self.rows]`: the list would have to reach the device, for which the host waits.
            self._states[layer] = torch.stack([states.detach()[row] for row in self.rows]).bfloat16()

        return keep

    def read(self, lengths: Sequence[int]) -> list[HiddenStates]:
        """What was kept of each of `rows`, cut to its length and moved to the CPU; the tap is empty afterwards."""
        if self._last not in self._states:
            raise RuntimeError("The tap saw no forward pass of the policy's trunk.")
        results = []
        for number, length in enumerate(lengths):
            layers = torch.cat([self._states[layer][number, :length] for layer in self.layer_ids], -1)
            last = self._states[self._last][number, :length].to("cpu", copy=True)  # not a view of all rows' states
            results.append(HiddenStates(layers.cpu(), last))
        self._states.clear()
        return results


def _source(trunk: Any, layer: int) -> nn.Module:
    """The module whose input is the output of the layer before `layer`."""
    return trunk.layers[layer] if layer < len(trunk.layers) else trunk.norm


class BatchTap:
    """Gathers the hidden states that were asked for while a batch runs through the policy in micro-batches.

    Args:
        model: The policy.
        request: What is wanted.
        batch: All sequences of a rank.
    """

    def __init__(self, model: nn.Module, request: HiddenStateRequest, batch: RolloutBatch) -> None:
        self.model = model
        self.request = request
        self.batch = batch
        self.chosen = set(request.choose(batch))
        self.lengths: list[int] = batch.lengths.tolist()
        self.hidden_states: dict[int, HiddenStates] = {}

    @contextmanager
    def over(self, rows: Sequence[int]) -> Iterator[None]:
        """Wraps the policy's forward pass over the micro-batch of these rows of the batch."""
        kept = [(place, row) for place, row in enumerate(rows) if row in self.chosen]
        if not kept:
            yield
            return
        with HiddenStateTap(self.model, self.request.layer_ids, [place for place, _ in kept]) as tap:
            yield
        states = tap.read([self.lengths[row] for _, row in kept])
        self.hidden_states.update({row: state for (_, row), state in zip(kept, states, strict=True)})
