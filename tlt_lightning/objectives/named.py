"""The critic-free objectives by name: each is a ComposedObjective with the pieces of its paper.

Common defaults are what the field has settled on: token-level clip 0.2 / 0.28, no KL penalty, mismatch weights
truncated at 2. Any piece can be exchanged, so `DrGRPO` with `surrogate: SequenceRatio` is a valid recipe.
"""

from dataclasses import dataclass, field

from torch import Tensor

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.objectives.advantages import (
    AdvantageEstimator,
    GroupCentred,
    LeaveOneOut,
    WhitenedGroupBaseline,
    WhitenedRewardToGo,
)
from tlt_lightning.objectives.aggregation import Aggregation, SequenceMeanTokenMean, SequenceMeanTokenSumNorm
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.objectives.overlong import OverlongPunishment
from tlt_lightning.objectives.surrogates import CappedRatio, SequenceRatio, SoftGate, Surrogate


@dataclass(kw_only=True)
class GRPO(ComposedObjective):
    """Group relative policy optimization (arXiv 2402.03300), averaged over tokens and clipped higher as is usual now.

    For the paper's own loss set `aggregation: SequenceMeanTokenMean`, `surrogate.clip_high: 0.2` and a `loss_kl`.

    Example:
        >>> GRPO(entropy_coef=0.001).needs_entropy_grad
        True
    """


@dataclass(kw_only=True)
class DrGRPO(ComposedObjective):
    """GRPO done right (arXiv 2503.20783): no division by the group's deviation nor by the response's length.

    Args:
        advantage: Reward minus the group's mean.
        aggregation: Token sums over a constant; set its `max_tokens` to the sampling's.

    Example:
        >>> DrGRPO(aggregation=SequenceMeanTokenSumNorm(max_tokens=512)).aggregation.max_tokens
        512
    """

    advantage: AdvantageEstimator = field(default_factory=GroupCentred)
    aggregation: Aggregation = field(default_factory=SequenceMeanTokenSumNorm)


@dataclass(kw_only=True)
class DAPO(ComposedObjective):
    """DAPO (arXiv 2503.14476): clip-higher, token mean, soft overlong punishment.

    Its dynamic sampling happens before the objective, where prompts are drawn (`data.dynamic_sampling`). Without the
    punishment DAPO is GRPO with our defaults: use that.

    Args:
        overlong: The punishment; required, because it has to know the length limit.

    Example:
        >>> DAPO(overlong=OverlongPunishment(max_tokens=20480, buffer_tokens=4096)).surrogate.clip_high
        0.28
    """

    overlong: OverlongPunishment

    def shape_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards with the overlong punishment added, (B,)."""
        return batch.rewards + self.overlong(batch)


@dataclass(kw_only=True)
class GSPO(ComposedObjective):
    """Group sequence policy optimization (arXiv 2507.18071): one clipped ratio per response; suits mixtures of experts.

    Args:
        surrogate: The sequence's ratio, clipped at 3e-4 / 4e-4 as in the paper.
        aggregation: Mean per response, then over responses.

    Example:
        >>> GSPO().surrogate
        SequenceRatio(sequence_clip_low=0.0003, sequence_clip_high=0.0004)
    """

    surrogate: Surrogate = field(default_factory=SequenceRatio)
    aggregation: Aggregation = field(default_factory=SequenceMeanTokenMean)


@dataclass(kw_only=True)
class CISPO(ComposedObjective):
    """CISPO (arXiv 2506.13585): clips the weight and keeps every token's gradient; steady far off-policy.

    Args:
        surrogate: The ratio capped at 5 without a lower bound, as in ScaleRL.

    Example:
        >>> CISPO(surrogate=CappedRatio(max_ratio=1.2, min_ratio=0.8)).surrogate.min_ratio
        0.8
    """

    surrogate: Surrogate = field(default_factory=CappedRatio)


@dataclass(kw_only=True)
class SAPO(ComposedObjective):
    """Soft adaptive policy optimization (arXiv 2511.20347): a smooth gate instead of a clip.

    Args:
        surrogate: The gate, steeper for negative advantages.
        aggregation: Mean per response, then over responses.

    Example:
        >>> SAPO().surrogate.temperature_negative
        1.05
    """

    surrogate: Surrogate = field(default_factory=SoftGate)
    aggregation: Aggregation = field(default_factory=SequenceMeanTokenMean)


@dataclass(kw_only=True)
class RLOO(ComposedObjective):
    """REINFORCE leave-one-out (arXiv 2402.14740) with token-level ratios, as in verl.

    TRL takes the ratio of the whole sequence, a different objective, whose ratio leaves the clip range within a few
    dozen tokens.

    Args:
        advantage: Reward minus the mean of the siblings.

    Example:
        >>> RLOO().min_group_size
        2
    """

    advantage: AdvantageEstimator = field(default_factory=LeaveOneOut)


@dataclass(kw_only=True)
class ReinforcePlusPlus(ComposedObjective):
    """REINFORCE++ (arXiv 2501.03262): no critic and no groups; works with one response per prompt.

    Args:
        advantage: Rewards to go, whitened over the iteration. The paper's KL penalty is `reward_kl` with K1.

    Example:
        >>> ReinforcePlusPlus().min_group_size
        1
    """

    advantage: AdvantageEstimator = field(default_factory=WhitenedRewardToGo)


@dataclass(kw_only=True)
class ReinforcePlusPlusBaseline(ComposedObjective):
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262), for several responses per prompt.

    Args:
        advantage: Reward minus the group's mean, whitened over the iteration. The paper's KL penalty is `loss_kl`
            with K2.

    Example:
        >>> ReinforcePlusPlusBaseline().needs_reference
        False
    """

    advantage: AdvantageEstimator = field(default_factory=WhitenedGroupBaseline)
