"""Hold the settings of a run's iterations, and check them."""

from dataclasses import dataclass, replace
from typing import Annotated

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.arguments import Bound, Count, checked
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.rollout import Sampling


@checked("dynamic_sampling.")
@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Draws prompts until enough groups have rewards that differ (DAPO, arXiv 2503.14476, section 3.2).

    Args:
        max_rounds: Most rollouts of one iteration. If groups with a signal are still lacking then, the iteration is
            filled up with groups without one, and `rollout/groups_without_signal_kept` says how many.
    """

    max_rounds: Annotated[int, Bound(2), "Drop `dynamic_sampling` to roll out once."] = 4


@checked()
@dataclass(frozen=True, kw_only=True)
class IterationSettings:
    """Holds the settings of all iterations of a run; see `RolloutDataModule`."""

    group_size: Count
    prompts_per_iteration: Count
    micro_batch_tokens: Count
    num_minibatches: Count
    inner_epochs: Count
    max_prompt_tokens: Count
    dynamic_sampling: DynamicSampling | None
    sampling: Sampling

    def of_dev_run(self, trainer: L.Trainer) -> "IterationSettings":
        """Return the settings of `fast_dev_run`: its number of prompts a rank, and one optimizer step a pass."""
        num_prompts = int(trainer.fast_dev_run) * trainer.world_size  # type: ignore[attr-defined]
        return replace(self, prompts_per_iteration=num_prompts, num_minibatches=1)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.num_minibatches * self.inner_epochs

    def check(self, objective: PolicyObjective, trainer: L.Trainer) -> None:
        """Raise MisconfigurationException unless ranks and steps divide an iteration, and a pass holds a sequence.

        Responses to a prompt have to differ, too (ValueError), and be as many and as long as the objective needs.
        """
        num_ranks = trainer.world_size
        num_prompts, group_size, num_steps = self.prompts_per_iteration, self.group_size, self.num_minibatches
        if num_prompts % num_ranks:
            nearest = max(1, round(num_prompts / num_ranks)) * num_ranks
            raise MisconfigurationException(
                f"`data.prompts_per_iteration` {num_prompts} is not divisible by {num_ranks} ranks, which share them; "
                f"give {nearest}, or another number of `trainer.devices`."
            )
        num_sequences = num_prompts // num_ranks * group_size
        if num_sequences % num_steps:
            raise MisconfigurationException(
                f"{num_sequences} responses per rank and iteration (`data.prompts_per_iteration` {num_prompts} / "
                f"{num_ranks} ranks * `data.group_size` {group_size}) are not divisible by `data.num_minibatches` "
                f"{num_steps}, the optimizer steps that share them; choose one that divides them."
            )
        if self.sampling.temperature == 0:
            raise ValueError("`sampling.temperature` 0 writes the same response to a prompt every time; use 1.0.")
        max_tokens = self.sampling.max_tokens
        if (longest := self.max_prompt_tokens + max_tokens) > self.micro_batch_tokens:
            raise MisconfigurationException(
                f"`data.micro_batch_tokens` {self.micro_batch_tokens} is less than the longest sequence, "
                f"`data.max_prompt_tokens` {self.max_prompt_tokens} plus `data.sampling.max_tokens` {max_tokens}; set "
                f"it to at least {longest}."
            )
        for name, limit in objective.length_limits.items():
            if limit != max_tokens:
                raise MisconfigurationException(
                    f"`objective.{name}` {limit} has to be the longest response, and `data.sampling.max_tokens` is "
                    f"{max_tokens}; make them equal."
                )
        if group_size < (least := max(objective.min_group_size, 1 if self.dynamic_sampling is None else 2)):
            who = "dynamic sampling" if objective.min_group_size < least else type(objective).__name__
            raise MisconfigurationException(
                f"`data.group_size` {group_size} is too small for {who}, which compares the responses to one prompt: "
                f"use at least {least}."
            )
