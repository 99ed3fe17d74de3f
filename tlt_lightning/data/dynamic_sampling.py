"""Replace the prompts that teach nothing (DAPO, arXiv 2503.14476, section 3.2)."""

from dataclasses import dataclass
from typing import Annotated

from tlt_lightning.arguments import Bound, checked


@checked("dynamic_sampling.")
@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Draws prompts until enough groups have rewards that differ.

    Args:
        max_rounds: Most rollouts of one iteration. If groups with a signal are still lacking then, the iteration is
            filled up with groups without one, and `rollout/groups_without_signal_kept` says how many.
    """

    max_rounds: Annotated[int, Bound(2), "Drop `dynamic_sampling` to roll out once."] = 4
