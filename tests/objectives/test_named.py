"""Objectives by name: their pieces, and the length that some have to know."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tlt_lightning import objectives
from tlt_lightning.objectives import (
    DAPO,
    GRPO,
    ComposedObjective,
    DrGRPO,
    OverlongPunishment,
    SequenceMeanTokenSumNorm,
    TruncatedImportance,
)

RandomVectors = Callable[..., SimpleNamespace]


def test_overlong_punishment_falls_from_zero_to_minus_one_and_no_further(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0, num_groups=1, group_size=6, num_tokens=250).batch
    batch.response_lengths = torch.tensor([0, 80, 81, 90, 100, 250])
    torch.testing.assert_close(
        OverlongPunishment(max_tokens=100, buffer_tokens=20)(batch),
        torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0]),
    )


def test_dapo_punishes_truncated_responses_also_when_they_are_masked(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0).batch
    batch.truncated[2] = True  # this one's mask is empty
    shaped = DAPO(overlong=OverlongPunishment(max_tokens=9, buffer_tokens=3)).shape_rewards(batch)
    assert shaped[2] == batch.rewards[2] - 1
    assert shaped[1] == pytest.approx(batch.rewards[1] - 1 / 3)  # 9 tokens less 2 masked
    assert shaped[0] == batch.rewards[0]


PIECES = {
    "GRPO": ("GroupNormalized", "ClippedRatio", "TokenMean"),
    "DrGRPO": ("GroupCentred", "ClippedRatio", "SequenceMeanTokenSumNorm"),
    "DAPO": ("GroupNormalized", "ClippedRatio", "TokenMean"),
    "GSPO": ("GroupNormalized", "SequenceRatio", "SequenceMeanTokenMean"),
    "CISPO": ("GroupNormalized", "CappedRatio", "TokenMean"),
    "SAPO": ("GroupNormalized", "SoftGate", "SequenceMeanTokenMean"),
    "RLOO": ("LeaveOneOut", "ClippedRatio", "TokenMean"),
    "ReinforcePlusPlus": ("WhitenedRewardToGo", "ClippedRatio", "TokenMean"),
    "ReinforcePlusPlusBaseline": ("WhitenedGroupBaseline", "ClippedRatio", "TokenMean"),
    "PPO": ("GAE", "ClippedRatio", "TokenMean"),
    "Distillation": ("GroupNormalized", "ClippedRatio", "TokenMean"),
}
"""Advantage, surrogate and aggregation, as in docs/objectives.md."""


def test_every_named_objective_has_the_pieces_of_its_paper() -> None:
    named = [x for x in vars(objectives).values() if isinstance(x, type) and issubclass(x, ComposedObjective)]
    named.remove(ComposedObjective)
    assert {each.__name__ for each in named} == PIECES.keys()
    for each in named:
        made = each(overlong=OverlongPunishment(max_tokens=9, buffer_tokens=3)) if each is DAPO else each()
        found = tuple(type(piece).__name__ for piece in (made.advantage, made.surrogate, made.aggregation))
        assert found == PIECES[each.__name__], each.__name__
        assert made.correction == TruncatedImportance(level="token", max_weight=2.0)


def test_an_objective_says_which_settings_are_the_longest_response() -> None:
    overlong, norm = OverlongPunishment(max_tokens=9, buffer_tokens=3), SequenceMeanTokenSumNorm(max_tokens=7)
    assert GRPO().length_limits == {}
    assert DrGRPO(aggregation=norm).length_limits == {"aggregation.max_tokens": 7}
    assert DAPO(overlong=overlong).length_limits == {"overlong.max_tokens": 9}
    both = {"aggregation.max_tokens": 7, "overlong.max_tokens": 9}
    assert DAPO(overlong=overlong, aggregation=norm).length_limits == both
