"""Orthogonalize the steps of a head's matrices: a new head then needs two fifths of the tokens that Adam needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.arguments import check_positive, check_share


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Steps matrices by torch's Muon, and vectors, such as the gains of norms, by its Adam.

    Muon replaces the running mean of a matrix's gradients by the nearest orthogonal matrix, so that directions which
    few tokens ask for move as far as common ones. Such a step has the same effect at every width, so `lr` needs no
    tuning by size, as Adam's does. It costs about 25 * (the matrix's short side) floating-point operations a weight,
    whatever the pack's size, in bfloat16. After Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
    networks".

    Args:
        params: Parameters, or groups of them without settings of their own.
        lr: Largest singular value of a matrix's step; a tall one's is that times the root of rows over columns.
        momentum: Weight of earlier gradients in the running mean.
        vector_lr: Adam's learning rate, of the vectors.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.03,
        momentum: float = 0.8,
        vector_lr: float = 3e-3,
    ) -> None:
        check_positive("lr", lr)
        check_share("momentum", momentum)
        check_positive("vector_lr", vector_lr)
        every = [p for each in params for p in (each["params"] if isinstance(each, dict) else [each])]
        matrices, vectors = [p for p in every if p.ndim == 2], [p for p in every if p.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=0.0))
        if vectors:
            self._parts.append(torch.optim.AdamW(vectors, lr=vector_lr, weight_decay=0.0))
        super().__init__([part.param_groups[0] for part in self._parts], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on the groups and states of the whole, which schedulers and checkpoints know."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()
