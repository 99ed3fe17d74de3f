"""Replace and keep the head's weights in a live engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tlt_lightning.engine.base import NamedTensors
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.kv_catch_up import is_block_head
from tlt_lightning.engine.vllm.policy_weights import faults_of
from tlt_lightning.host_copy import HostCopy
from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.speculation.head_files import canonical_name

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_MAP, _OUTPUT = "d2t", "lm_head.weight"
_FUSED = ("_fused_kv_weight", "_k_norm_weights")  # of a block head: those of its layers, beside each other


class HeadWeights:
    """Replaces the head's weights in a live engine, and keeps a copy while the engine sleeps.

    Args:
        engine: The live engine.
        head: The head's module in it.
        shapes: Names and shapes of the tensors the head was saved with.
        engine_ranks: The ranks that are the engine.
    """

    def __init__(
        self, engine: LLMEngine, head: Any, shapes: Mapping[str, tuple[int, ...]], engine_ranks: EngineRanks
    ) -> None:
        self.engine, self.head, self.shapes, self.engine_ranks = engine, head, shapes, engine_ranks
        self._kept, self._is_kept = HostCopy(), False

    @property
    def _policy(self) -> nn.Module:
        return internals.live_model(self.engine)

    def update(self, named_tensors: NamedTensors) -> None:
        """Replace the trainable weights in place.

        Args:
            named_tensors: All trainable tensors, by the names of the saved head; the output layer may be left out. With
                a reduced vocabulary also `d2t`, of the tokens that are drafted from now on.

        Raises:
            ValueError: Nothing was touched: a tensor belongs to the policy, is unknown, missing or of the wrong shape.
        """
        device = next(self._policy.parameters()).device  # where checks of hundreds of millions of numbers take no time
        tensors = {canonical_name(name): tensor.detach().to(device) for name, tensor in named_tensors}
        # The first rank says whether the output layer is the policy's own: one that holds padding alone cannot tell.
        shares_head = self.engine_ranks.decide(lambda: self.head.lm_head is getattr(self._policy, "lm_head", None))
        check_tensors(tensors, self.shapes, shares_head=shares_head)
        drafted = tensors.pop(_MAP, None)
        if drafted is not None:
            self._draft(drafted)
        _load(self.engine, self.head, tensors)
        self._is_kept = False

    @torch.no_grad()
    def _draft(self, d2t: Tensor) -> None:
        """Let a reduced head draft other tokens: in place, for CUDA graphs read the maps where they lie."""
        self.head.draft_id_to_target_id.copy_(d2t)
        self._fill_scatter_index()

    def _fill_scatter_index(self) -> None:
        speculator = getattr(internals.live_model_runner(self.engine), "speculator", None)
        index = getattr(speculator, "_d2t_scatter_index", None)  # of a block head whose drafts are sampled
        if speculator is not None and index is not None:
            index.copy_(torch.arange(len(index), device=index.device) + self.head.draft_id_to_target_id)
            speculator._draft_scatter_buf.fill_(-torch.inf)

    def keep(self) -> None:
        """Copy the head's own weights to the host, before a sleeping engine drops all weights.

        vLLM could keep them itself (`sleep_preserve_parameter_names`), in pageable memory, at a tenth of the speed.
        """
        if not self._is_kept:
            self._kept.fill(self._own_parameters())
            self._is_kept = True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the kept weights back, once the engine is awake again."""
        if self._is_kept:
            for name, parameter in self._own_parameters():
                parameter.copy_(self._kept.tensors[name], non_blocking=True)
            if is_block_head(self.head):
                with fused_in_place(self.head.model):
                    self.head.model._build_fused_kv_buffers()
            self._fill_scatter_index()

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the head's parameters but the policy's, which `update_weights` brings."""
        shared = {id(parameter) for parameter in self._policy.parameters()}
        return ((name, parameter) for name, parameter in self.head.named_parameters() if id(parameter) not in shared)


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, shares_head: bool) -> None:
    """Raise ValueError unless `tensors` are all trainable ones of the head, in the right shapes.

    Args:
        tensors: What was sent, under canonical names.
        shapes: What the head was saved with.
        shares_head: True if the head's output layer is the policy's own.
    """
    known = {canonical_name(name): tuple(shape) for name, shape in shapes.items()}
    policys = {name for name in known if "embed_tokens" in name or name == "t2d" or (shares_head and name == _OUTPUT)}
    trainable = {name: known[name] for name in known.keys() - policys}
    faults = faults_of({name: each.shape for name, each in tensors.items()}, trainable, optional=(_OUTPUT, _MAP))
    faults["not finite"] = sorted(name for name, tensor in tensors.items() if not torch.isfinite(tensor).all())
    if found := "; ".join(f"{what}: {', '.join(names)}" for what, names in faults.items() if names):
        raise ValueError(f"`update_drafter` changed nothing: {found}.")


def _load(engine: LLMEngine, drafter: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    config = internals.reach(internals.live_worker(engine), "vllm_config")
    with set_current_vllm_config(config):
        if is_block_head(drafter):  # on a GPU, where weights lie as they were saved
            tokens = getattr(drafter, "draft_id_to_target_id", None)
            with fused_in_place(drafter.model):
                drafter.load_weights([*tensors.items(), *([] if tokens is None else [(_MAP, tokens)])])  # type: ignore[operator]
            return
        reload.initialize_layerwise_reload(drafter)
        drafter.load_weights(iter(tensors.items()))  # type: ignore[operator]
        reload.finalize_layerwise_reload(drafter, config.speculative_config.draft_model_config)


@contextmanager
def fused_in_place(model: Any) -> Iterator[None]:
    """Let a block head's fused weights, which vLLM makes anew in the block, stay where CUDA graphs read them."""
    held = {name: internals.reach(model, name) for name in _FUSED}
    yield
    for name, tensor in held.items():
        if tensor is not None:
            tensor.copy_(getattr(model, name))
            setattr(model, name, tensor)
