"""Orthogonalize the steps of a head's matrices: a new head then needs two fifths of the tokens that Adam needs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.arguments import Positive, Share, checked


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

    @checked()
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: Positive = 0.03,
        momentum: Share = 0.8,
        vector_lr: Positive = 3e-3,
    ) -> None:
        groups = [each if isinstance(each, dict) else {"params": [each]} for each in params]
        if own := sorted({name for group in groups for name in group} - {"params"}):
            raise ValueError(
                f"`params` has groups with {', '.join(own)} of their own, but matrices share `lr` and `momentum`, and "
                "vectors `vector_lr`: give groups of `params` alone, or take another optimizer."
            )
        every = [p for group in groups for p in group["params"]]
        matrices, vectors = [p for p in every if p.ndim == 2], [p for p in every if p.ndim != 2]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=0.0))
        if vectors:
            parts.append(torch.optim.AdamW(vectors, lr=vector_lr, weight_decay=0.0))
        super().__init__([part.param_groups[0] for part in parts], {})
        self.defaults = {name: value for name, value in self.param_groups[0].items() if name != "params"}

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kind = torch.optim.Muon if any(p.ndim == 2 for p in group["params"]) else torch.optim.AdamW
            part = kind([group])  # works on this very group, and adds settings that another version's checkpoint lacks
            part.state = self.state
            part.step()
        return loss
