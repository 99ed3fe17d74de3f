"""How a head is taught to draft several tokens in a row.

All three strategies train the same EAGLE-3-shaped head, fused layers included, so that vLLM serves what any of them
leaves behind. They differ in what the head sees beyond its first drafted token:

- `EAGLE` trains the first token only and pulls the head's own output towards the fused features of the next position,
  so that it can be fed back although that was never trained (Li et al., 2024, arXiv 2401.15077).
- `HASS` also trains the tokens after it, on the head's own features, and keeps the pull (Zhang et al., 2025,
  arXiv 2408.15766).
- `EAGLE3` trains on its own features without any pull, "training-time test" (Li et al., 2025, arXiv 2503.01840).

What we do differently: EAGLE and HASS as published read the target's last layer and regress on it; here every strategy
reads the same three layers, and the regression's goal is the head's own projection of them, which it pulls on as well.
HASS's ranking loss over the likeliest tokens is left to the choice of loss.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar


class DraftStrategy(ABC):
    """What a strategy says; the loss is `sum over steps k of decay**k * (loss_k + regression_weight * regression_k)`.

    Attributes:
        num_steps: Tokens drafted in training, each but the first from the head's own features of the one before.
        decay: Weight of a drafted token relative to the one before.
        regression_weight: Weight of the distance (smooth L1, mean over features, relative to their size) between the
            head's features and the fused features of the next position.
    """

    num_steps: int
    decay: float
    regression_weight: float


@dataclass(frozen=True, kw_only=True)
class EAGLE(DraftStrategy):
    """One drafted token and the regression of features: the cheapest step.

    Args:
        regression_weight: Weight of the regression against the loss of the drafted token.
    """

    num_steps: ClassVar[int] = 1  # type: ignore[misc]
    decay: ClassVar[float] = 1.0  # type: ignore[misc]
    regression_weight: float = 1.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class HASS(DraftStrategy):
    """Several drafted tokens on the head's own features, and the regression of features.

    Args:
        num_steps: Tokens drafted in training.
        decay: Weight of a drafted token relative to the one before.
        regression_weight: Weight of the regression against the loss of the drafted tokens.
    """

    num_steps: int = 3
    decay: float = 1.0
    regression_weight: float = 1.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class EAGLE3(DraftStrategy):
    """Several drafted tokens on the head's own features, nothing else: training-time test.

    Args:
        num_steps: Tokens drafted in training.
        decay: Weight of a drafted token relative to the one before.
    """

    num_steps: int = 3
    decay: float = 1.0
    regression_weight: ClassVar[float] = 0.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        _check(self)


def _check(strategy: DraftStrategy) -> None:
    name = type(strategy).__name__
    if strategy.num_steps < 1:
        raise ValueError(f"`num_steps` of {name} must be at least 1, got {strategy.num_steps}.")
    if not 0 < strategy.decay <= 1:
        raise ValueError(f"`decay` of {name} must be in (0, 1], got {strategy.decay}; 1 weighs all tokens alike.")
    if strategy.regression_weight < 0:
        raise ValueError(f"`regression_weight` of {name} must be 0 or positive, got {strategy.regression_weight}.")
