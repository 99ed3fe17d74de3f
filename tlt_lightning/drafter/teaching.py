"""Set how a head learns to draft several tokens in a row."""

from dataclasses import dataclass
from typing import Annotated

from tlt_lightning.arguments import Bound, Count, checked


@checked("teaching.")
@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Weighs the loss of each drafted token, `sum over steps k of decay**k * loss_k`.

    This is the "training-time test" of EAGLE-3 (Li et al., 2025, arXiv 2503.01840): each token but the first is
    drafted from the head's own features of the one before.

    Args:
        num_steps: Tokens drafted in training; None is as many as quality is measured at
            (`DrafterModule.num_draft_tokens`).
        decay: Weight of a drafted token relative to the one before.
    """

    num_steps: Count | None = None
    decay: Annotated[float, Bound(0, 1, excludes=(0,)), "1 weighs all tokens alike."] = 1.0
