"""Names the objectives, and the pieces to compose new ones from. Imports torch only."""

from tlt_lightning.objectives.advantages import (
    GAE,
    AdvantageEstimator,
    BestOfGroup,
    GroupCentred,
    GroupNormalized,
    LeaveOneOut,
    WhitenedGroupBaseline,
    WhitenedRewardToGo,
    group_statistics,
    whiten,
)
from tlt_lightning.objectives.aggregation import (
    Aggregation,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    TokenMean,
    token_mean,
)
from tlt_lightning.objectives.base import ObjectiveOutput, PolicyObjective, Reduce
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.objectives.correction import MaskedImportance, MismatchCorrection, TruncatedImportance
from tlt_lightning.objectives.distillation import Distillation
from tlt_lightning.objectives.divergence import Divergence
from tlt_lightning.objectives.kl import K1, K2, K3, KLEstimator, KLPenalty
from tlt_lightning.objectives.named import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    DrGRPO,
    OverlongPunishment,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from tlt_lightning.objectives.ppo import PPO, explained_variance
from tlt_lightning.objectives.proximal import BehaviourPolicy, OldPolicy, ProximalPolicy
from tlt_lightning.objectives.sft import SFT
from tlt_lightning.objectives.surrogates import (
    CappedRatio,
    ClippedRatio,
    PlainPolicyGradient,
    SequenceRatio,
    SoftGate,
    Surrogate,
)
