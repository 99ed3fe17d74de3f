"""Objectives as a recipe names them, a researcher's own one included."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

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
    CappedRatio,
    DrGRPO,
    KLPenalty,
    OverlongPunishment,
    PolicyObjective,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    SequenceMeanTokenSumNorm,
    SequenceRatio,
    StraightThrough,
)

EXAMPLE = Path(__file__).parent / "custom_objective_example.txt"


def build(config: dict[str, Any]) -> PolicyObjective:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=PolicyObjective, required=True)
    parsed = parser.parse_object({"objective": config})
    again = parser.parse_string(parser.dump(parsed))  # a saved recipe is a recipe
    assert parser.instantiate(again).objective == parser.instantiate(parsed).objective
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
        (
            "CISPO",
            {"surrogate": {"class_path": "CappedRatio", "init_args": {"min_ratio": 0.8}}},
            CISPO(surrogate=CappedRatio(min_ratio=0.8)),
        ),
        ("SAPO", {}, SAPO()),
        (
            "RLOO",
            {"loss_kl": {"estimator": {"class_path": "StraightThrough", "init_args": {"value": "K1"}}}},
            RLOO(loss_kl=KLPenalty(estimator=StraightThrough(value=K1()))),
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


def test_the_example_of_a_custom_objective_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vectors: SimpleNamespace
) -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 25
    (tmp_path / "my_objective.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    objective = build({"class_path": "my_objective.WeightedGRPO", "init_args": {"positive_weight": 0.2}})
    assert type(objective) is import_module("my_objective").WeightedGRPO
    advantages, _ = objective.advantages(vectors.batch, lambda x: x)
    plain, _ = GRPO().advantages(vectors.batch, lambda x: x)
    torch.testing.assert_close(advantages, torch.where(plain > 0, 0.2 * plain, plain))
    vectors.batch.advantages = advantages
    assert objective.loss(vectors.batch, vectors.logps, vectors.entropy, None).loss.isfinite()


def test_the_package_of_objectives_needs_torch_only() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tlt_lightning.objectives as o; assert all(hasattr(o, name) for name in o.__all__);"
        "print([name for name in ('lightning', 'transformers', 'vllm', 'jsonargparse') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
