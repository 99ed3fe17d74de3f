"""Set how a head learns to draft several tokens in a row.

Every setting trains the same EAGLE-3 head, fused layers included, so that vLLM serves any of them. The settings differ
in what the head sees beyond its first drafted token:

- `Teaching()` trains on the head's own features, the "training-time test" of EAGLE-3 (Li et al., 2025,
  arXiv 2503.01840).
- `Teaching(num_steps=1, regression_weight=1)` trains the first token only and pulls the head's own output towards the
  fused features of the next position, so that it can be fed back untrained, as in EAGLE (Li et al., 2024, arXiv
  2401.15077).
- `Teaching(regression_weight=1)` also trains the later tokens, as in HASS (Zhang et al., 2025, arXiv 2408.15766).

The last two take ideas of EAGLE and HASS, which as published read the target's last layer and regress on it; here the
goal is the head's own projection of three layers, which the regression pulls on as well. HASS's ranking loss over the
likeliest tokens is left to the choice of loss.
"""

from dataclasses import dataclass
from typing import Annotated

from tlt_lightning.arguments import Bound, Count, checked


@checked("teaching.")
@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Weighs `sum over steps k of decay**k * (loss_k + regression_weight * regression_k)`.

    Args:
        num_steps: Tokens drafted in training, each but the first from the head's own features of the one before; None
            is as many as quality is measured at (`DrafterModule.num_draft_tokens`).
        decay: Weight of a drafted token relative to the one before.
        regression_weight: Weight of the distance (smooth L1, mean over features, relative to their size) between the
            head's features and the fused features of the next position.
    """

    num_steps: Count | None = None
    decay: Annotated[float, Bound(0, 1, excludes=(0,)), "1 weighs all tokens alike."] = 1.0
    regression_weight: Annotated[float, Bound(0)] = 0.0
