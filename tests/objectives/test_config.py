"""Objectives as a recipe names them, a researcher's own one included."""

import subprocess
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from tlt_lightning import objectives
from tlt_lightning.objectives import (
    CISPO,
    DAPO,
    GAE,
    GRPO,
    GSPO,
    K1,
    PPO,
    RLOO,
    SAPO,
    AdvantageEstimator,
    Aggregation,
    BehaviourPolicy,
    CappedRatio,
    DrGRPO,
    KLEstimator,
    KLPenalty,
    MismatchCorrection,
    OverlongPunishment,
    PolicyObjective,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    SequenceMeanTokenSumNorm,
    SequenceRatio,
    Surrogate,
)
from tlt_lightning.objectives.advantages import GroupCentred

PLUGINS = Path(__file__).parents[2] / "docs/your_plugins.md"


def build(config: dict[str, Any]) -> PolicyObjective:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=PolicyObjective, required=True)
    parsed = parser.parse_object({"objective": config})
    saved = parser.parse_object(parsed.as_dict())  # a recipe as Lightning saves it is a recipe
    assert parser.instantiate(saved).objective == parser.instantiate(parsed).objective
    return parser.instantiate(parsed).objective


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("GRPO", {}, GRPO()),
        ("GRPO", {"correction": None, "loss_kl": {"coef": 0.01}}, GRPO(correction=None, loss_kl=KLPenalty(coef=0.01))),
        (
            "DAPO",
            {"overlong": {"max_tokens": 512, "buffer_tokens": 128}},
            DAPO(overlong=OverlongPunishment(max_tokens=512, buffer_tokens=128)),
        ),
        (
            "DrGRPO",
            {"aggregation": {"init_args": {"max_tokens": 64}}, "surrogate": "SequenceRatio"},
            DrGRPO(aggregation=SequenceMeanTokenSumNorm(max_tokens=64), surrogate=SequenceRatio()),
        ),
        ("GSPO", {}, GSPO()),
        ("GSPO", {"proximal": "BehaviourPolicy"}, GSPO(proximal=BehaviourPolicy())),
        (
            "CISPO",
            {"surrogate": {"class_path": "CappedRatio", "init_args": {"min_ratio": 0.8}}},
            CISPO(surrogate=CappedRatio(min_ratio=0.8)),
        ),
        ("SAPO", {}, SAPO()),
        (
            "RLOO",
            {"loss_kl": {"coef": 0.01, "estimator": "K1"}},
            RLOO(loss_kl=KLPenalty(coef=0.01, estimator=K1())),
        ),
        ("ReinforcePlusPlus", {}, ReinforcePlusPlus()),
        ("ReinforcePlusPlusBaseline", {}, ReinforcePlusPlusBaseline()),
        (
            "PPO",
            {"advantage": {"init_args": {"lam": 0.9}}, "value_clip": None, "target_kl": 0.02},
            PPO(advantage=GAE(lam=0.9), value_clip=None, target_kl=0.02),
        ),
    ],
)
def test_a_recipe_names_the_objective_and_its_pieces(
    name: str, arguments: dict[str, Any], expected: PolicyObjective
) -> None:
    assert build({"class_path": name, "init_args": arguments}) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"class_path": "DAPPO"},
        {"class_path": "GRPO", "init_args": {"entropy_coeff": 0.1}},
        {"class_path": "DAPO", "init_args": {"overlong": {"max_tokens": 512, "bufer_tokens": 128}}},
        {"class_path": "DAPO"},
        {"class_path": "GRPO", "init_args": {"surrogate": "TokenMean"}},
    ],
    ids=["class", "argument", "nested argument", "missing argument", "wrong kind of piece"],
)
def test_a_typo_in_a_recipe_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="objective"):
        build(config)


@pytest.mark.parametrize("kind", [AdvantageEstimator, Aggregation, KLEstimator, MismatchCorrection, Surrogate])
def test_exchanging_a_piece_never_inherits_the_defaults_of_the_other(kind: type) -> None:
    """jsonargparse keeps the old piece's arguments, defaults included, that the new one takes by the same name."""
    pieces = [piece for piece in vars(objectives).values() if isinstance(piece, type) and issubclass(piece, kind)]
    pieces.remove(kind)
    assert len(pieces) > 1
    defaults: dict[str, Any] = {}
    for piece in pieces:
        for field in fields(piece):
            assert defaults.setdefault(field.name, field.default) == field.default, f"{piece.__name__}.{field.name}"


@pytest.mark.parametrize("habit", ["", "from __future__ import annotations\n"])
def test_the_example_of_a_custom_objective_works(
    habit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vectors: SimpleNamespace
) -> None:
    text = PLUGINS.read_text().split('title="my_objective.py"\n')[1].split("```")[0]
    assert len(text.splitlines()) < 25
    (tmp_path / "my_objective.py").write_text(habit + text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_objective", raising=False)

    arguments = {"positive_weight": 0.2, "surrogate": "SequenceRatio"}  # its own, and one that it inherits
    objective = build({"class_path": "my_objective.WeightedGRPO", "init_args": arguments})
    assert type(objective) is import_module("my_objective").WeightedGRPO
    assert isinstance(objective, GRPO)
    assert objective.surrogate == SequenceRatio()
    advantages, _ = objective.advantages(vectors.batch, lambda x: x)
    plain, _ = GRPO().advantages(vectors.batch, lambda x: x)
    torch.testing.assert_close(advantages, torch.where(plain > 0, 0.2 * plain, plain))
    vectors.batch.advantages = advantages
    assert objective.loss(vectors.batch, vectors.logps, vectors.entropy, None).loss.isfinite()


@dataclass(kw_only=True)
class Weighted(GRPO):
    weight: float = 0.5


def test_pieces_are_objects() -> None:
    Weighted(advantage=GroupCentred())
    with pytest.raises(
        TypeError, match=r"`advantage` must be an AdvantageEstimator, got the class GroupCentred itself"
    ):
        Weighted(advantage=GroupCentred)
    with pytest.raises(TypeError, match=r"`advantage` must be an AdvantageEstimator, got a function"):
        Weighted(advantage=lambda *_: None)
    with pytest.raises(TypeError, match="`surrogate` must be a Surrogate, got None"):
        Weighted(surrogate=None)


@pytest.mark.slow
def test_objectives_and_engines_that_load_nothing_need_torch_only() -> None:
    code = (
        "import sys, tlt_lightning.objectives, tlt_lightning.engine;"
        "names = ('lightning', 'transformers', 'vllm', 'jsonargparse', 'torch.distributed.fsdp');"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
