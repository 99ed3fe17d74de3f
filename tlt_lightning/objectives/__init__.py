"""What the policy maximises: objectives by name, and the pieces to compose new ones from. Imports torch only."""

from tlt_lightning.objectives.advantages import (
    GAE,
    AdvantageEstimator,
    GroupCentred,
    GroupNormalized,
    LeaveOneOut,
    WhitenedGroupBaseline,
    WhitenedRewardToGo,
    whiten,
)
from tlt_lightning.objectives.aggregation import (
    Aggregation,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    SequenceMeanTokenSumNorm,
    TokenMean,
    TokenSum,
    token_mean,
)
from tlt_lightning.objectives.base import ObjectiveOutput, PolicyObjective, Reduce
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.objectives.correction import MaskedImportance, MismatchCorrection, TruncatedImportance
from tlt_lightning.objectives.groups import group_statistics
from tlt_lightning.objectives.kl import K1, K2, K3, KLEstimator, KLPenalty, StraightThrough
from tlt_lightning.objectives.named import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    DrGRPO,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from tlt_lightning.objectives.overlong import OverlongPunishment, overlong_punishment
from tlt_lightning.objectives.ppo import PPO, explained_variance
from tlt_lightning.objectives.surrogates import (
    CappedRatio,
    ClippedRatio,
    PlainPolicyGradient,
    SequenceRatio,
    SoftGate,
    Surrogate,
)

__all__ = [
    "CISPO",
    "DAPO",
    "GAE",
    "GRPO",
    "GSPO",
    "K1",
    "K2",
    "K3",
    "PPO",
    "RLOO",
    "SAPO",
    "AdvantageEstimator",
    "Aggregation",
    "CappedRatio",
    "ClippedRatio",
    "ComposedObjective",
    "DrGRPO",
    "GroupCentred",
    "GroupNormalized",
    "KLEstimator",
    "KLPenalty",
    "LeaveOneOut",
    "MaskedImportance",
    "MismatchCorrection",
    "ObjectiveOutput",
    "OverlongPunishment",
    "PlainPolicyGradient",
    "PolicyObjective",
    "Reduce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "SequenceMeanTokenSumNorm",
    "SequenceRatio",
    "SoftGate",
    "StraightThrough",
    "Surrogate",
    "TokenMean",
    "TokenSum",
    "TruncatedImportance",
    "WhitenedGroupBaseline",
    "WhitenedRewardToGo",
    "explained_variance",
    "group_statistics",
    "overlong_punishment",
    "token_mean",
    "whiten",
]
