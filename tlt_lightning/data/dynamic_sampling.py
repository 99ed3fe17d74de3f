"""Replace the prompts that teach nothing (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_lightning.arguments import check_at_least


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Draws prompts until enough groups have rewards that differ.

    Args:
        max_rounds: Most rollouts of one iteration. If groups with a signal are still lacking then, the iteration is
            filled up with groups without one, and `rollout/groups_without_signal_kept` says how many.
    """

    max_rounds: int = 4

    def __post_init__(self) -> None:
        check_at_least("dynamic_sampling.max_rounds", self.max_rounds, 2, "Drop `dynamic_sampling` to roll out once.")
