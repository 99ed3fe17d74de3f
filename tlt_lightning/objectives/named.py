"""Name the critic-free objectives, each by the pieces in which it differs from GRPO.

Where papers leave it open the pieces are the field's usual ones: token-level clip 0.2 / 0.28, mean over tokens,
mismatch weights truncated at 2, no KL penalty. Any piece can be exchanged (`DrGRPO` with `surrogate: SequenceRatio`).

In the equations p, p_old and p_engine are the probabilities of token t of response i under the policy, the policy
before the update and the engine; n is the number of responses, N that of their tokens, R_i a response's reward, and

    r_it = p / p_old           w_it = min(p_old / p_engine, 2)           sg: without gradient

With `proximal: BehaviourPolicy` p_engine stands for p_old, and w_it is 1.
"""

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from tlt_lightning.arguments import Bound, Count, check_argument, checked
from tlt_lightning.objectives.advantages import (
    AdvantageEstimator,
    GroupCentred,
    LeaveOneOut,
    WhitenedGroupBaseline,
    WhitenedRewardToGo,
)
from tlt_lightning.objectives.aggregation import Aggregation, SequenceMeanTokenMean, SequenceMeanTokenSumNorm
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.objectives.surrogates import CappedRatio, SequenceRatio, SoftGate, Surrogate
from tlt_lightning.rollout import RolloutBatch


@dataclass(kw_only=True)
class GRPO(ComposedObjective):
    """Optimizes relative to the group (GRPO, arXiv 2402.03300), as is usual now.

        A_i = (R_i - mean_G R) / (std_G R + 1e-6)                     over the responses G to the same prompt
        L = -1/N sum_it w_it min(r_it A_i, clip(r_it, 0.8, 1.28) A_i)

    The paper's own loss: `aggregation: SequenceMeanTokenMean`, `surrogate.clip_high: 0.2` and a `loss_kl`.
    """


@dataclass(kw_only=True)
class DrGRPO(ComposedObjective):
    """Divides by neither deviation nor length: GRPO done right (arXiv 2503.20783).

        A_i = R_i - mean_G R
        L = -1/n sum_i 1/max_tokens sum_t w_it min(r_it A_i, clip(r_it, 0.8, 1.28) A_i)

    Set `aggregation.max_tokens` to the sampling's `max_tokens`.
    """

    advantage: AdvantageEstimator = field(default_factory=GroupCentred)
    aggregation: Aggregation = field(default_factory=SequenceMeanTokenSumNorm)


@checked("overlong.")
@dataclass(frozen=True, kw_only=True)
class OverlongPunishment:
    """Lowers the reward of responses that come close to the length limit.

    Zero up to `max_tokens - buffer_tokens`, falling linearly to -1 at `max_tokens` (DAPO, arXiv 2503.14476, Eq. 13).
    verl lets it fall on below -1; we follow the paper and TRL.

    Args:
        max_tokens: Longest response; the same number as the sampling's `max_tokens`.
        buffer_tokens: Width of the ramp in tokens; DAPO uses a fifth of the limit (4096 of 20480).
    """

    max_tokens: Count
    buffer_tokens: Count

    def __post_init__(self) -> None:
        check_argument("overlong.buffer_tokens", self.buffer_tokens, Annotated[int, Bound(1, self.max_tokens)])

    def __call__(self, batch: RolloutBatch) -> Tensor:
        """Return what to add to each sequence's reward, between -1 and 0, (B,) in float32.

        A truncated sequence is at the limit, also where its tokens are masked out of the loss and cannot be counted.
        """
        lengths = torch.where(batch.truncated, self.max_tokens, batch.response_lengths)
        return ((self.max_tokens - self.buffer_tokens - lengths.float()) / self.buffer_tokens).clamp(-1.0, 0.0)


@dataclass(kw_only=True)
class DAPO(ComposedObjective):
    """Clips higher, averages tokens, punishes overlong responses: DAPO (arXiv 2503.14476).

        R'_i = R_i + overlong(length_i)                               the rest is GRPO's, with R' for R

    Dynamic sampling is `data.dynamic_sampling`. Without the punishment DAPO is GRPO with our defaults: use that.

    Args:
        overlong: The punishment; required, because it has to know the length limit.
    """

    overlong: OverlongPunishment

    @property
    def length_limits(self) -> dict[str, int]:
        """The limit that the punishment assumes, beside the aggregation's."""
        return {**super().length_limits, "overlong.max_tokens": self.overlong.max_tokens}

    def shape_rewards(self, batch: RolloutBatch) -> Tensor:
        return batch.rewards + self.overlong(batch)


@dataclass(kw_only=True)
class GSPO(ComposedObjective):
    """Clips one ratio per response: group sequence policy optimization (arXiv 2507.18071).

        s_i = exp(mean_t log r_it)                                    A_i is GRPO's
        L = -1/n sum_i mean_t w_it min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)

    Suits mixtures of experts. Clips 3e-4 / 4e-4 as in the paper; the mean log-ratio is clamped at +-20 (verl: +10).
    """

    surrogate: Surrogate = field(default_factory=SequenceRatio)
    aggregation: Aggregation = field(default_factory=SequenceMeanTokenMean)


@dataclass(kw_only=True)
class CISPO(ComposedObjective):
    """Clips the weight and keeps every token's gradient: CISPO (arXiv 2506.13585).

        L = -1/N sum_it w_it sg(min(r_it, 5)) A_i log p               A_i is GRPO's

    Steady far off-policy. The ratio is capped at 5 without a lower bound, as in ScaleRL.
    """

    surrogate: Surrogate = field(default_factory=CappedRatio)


@dataclass(kw_only=True)
class SAPO(ComposedObjective):
    """Fades gradients out by a gate: soft adaptive policy optimization (arXiv 2511.20347).

    L = -1/n sum_i mean_t w_it A_i 4/k sigmoid(k (r_it - 1))      k is 1 where A_i > 0, 1.05 elsewhere; A_i is GRPO's
    """

    surrogate: Surrogate = field(default_factory=SoftGate)
    aggregation: Aggregation = field(default_factory=SequenceMeanTokenMean)


@dataclass(kw_only=True)
class RLOO(ComposedObjective):
    """Compares with the group's others: REINFORCE leave-one-out (arXiv 2402.14740).

        A_i = R_i - mean of R_j over the others j in G                L is GRPO's

    Token-level ratios, as in verl. TRL's ratio of the whole sequence leaves the clip range within a few dozen tokens.
    """

    advantage: AdvantageEstimator = field(default_factory=LeaveOneOut)


@dataclass(kw_only=True)
class ReinforcePlusPlus(ComposedObjective):
    """Needs no critic and no groups: REINFORCE++ (arXiv 2501.03262).

        A_it = whiten(sum_{s >= t} gamma^(s - t) R_is)                R_is is R_i at the last token; L is GRPO's

    Whitened are the tokens of the iteration, to mean 0 and variance 1.
    Works with one response per prompt. The paper's KL penalty is `reward_kl` with K1.
    """

    advantage: AdvantageEstimator = field(default_factory=WhitenedRewardToGo)


@dataclass(kw_only=True)
class ReinforcePlusPlusBaseline(ComposedObjective):
    """Takes the group's mean as baseline of REINFORCE++ (arXiv 2501.03262).

        A_it = whiten(R_i - mean_G R)                                 L is GRPO's

    The paper's KL penalty is `loss_kl` with K2.
    """

    advantage: AdvantageEstimator = field(default_factory=WhitenedGroupBaseline)
