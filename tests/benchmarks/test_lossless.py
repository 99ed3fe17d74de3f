"""`python -m benchmarks lossless`: every arm is checked, one that fails takes no other with it, and a bias is found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.lossless import run as lossless
from benchmarks.lossless.checks import agreement, score
from benchmarks.rollout.process import EngineError
from tlt_lightning.policy import load_policy

PROMPTS = [[12, 13, 3], [14, 15, 3, 4]] * 32
alive: list[list[str]] = []


class FakeEngines:
    """Engines that write the same text for each prompt; those of one arm fail."""

    def __init__(self, setup: Any) -> None:
        self.num_requests = setup.num_requests

    def need(self, kinds: Any) -> None:
        alive.append(list(kinds))

    def get(self, kind: str) -> "FakeEngines":
        return self

    def call(self, name: str, arm: str) -> Any:
        assert name == "write"
        if arm == "K=7":
            raise EngineError("RuntimeError: out of luck")
        return [([20, 21, 22, 23], [-1.0] * 4)] * self.num_requests

    def close(self) -> None:
        pass


def test_every_arm_is_checked_and_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lossless, "Engines", FakeEngines)
    lossless.main(["--tiny", "--head", "some", "--out", str(tmp_path)])
    assert [kind for (kind,) in alive] == ["plain", "head", "head", "head", "mixed", "sampled", "sampled"]
    results = json.loads((tmp_path / "lossless_tiny.json").read_text())
    assert [row["arm"] for row in results["arms"]] == [arm for arm in lossless.ARMS if arm != "K=7"]
    assert {row["tokens"] for row in results["arms"]} == {4 * 4 * 4}
    report = (tmp_path / "lossless_tiny.md").read_text()
    assert "K=7 failed: `RuntimeError: out of luck`" in report


def test_nothing_is_written_beyond_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lossless, "Engines", FakeEngines)
    lossless.main(["--tiny", "--head", "some", "--out", str(tmp_path), "--seconds", "-1"])
    results = json.loads((tmp_path / "lossless_tiny.json").read_text())
    assert results["arms"] == []
    assert results["left_out"] == list(lossless.ARMS)


def sample(model: torch.nn.Module, temperature: float, num: int = 12) -> list[tuple[list[int], list[float]]]:
    """Texts drawn at a temperature, with the log-probs of temperature 1."""
    written = []
    generator = torch.Generator().manual_seed(0)
    for prompts in (PROMPTS[::2], PROMPTS[1::2]):
        ids, logps = torch.tensor(prompts), []
        for _ in range(num):
            with torch.no_grad():
                logits = model(input_ids=ids).logits[:, -1].float()
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            logps.append(logits.log_softmax(-1).gather(-1, drawn))
            ids = torch.cat([ids, drawn], -1)
        texts: Tensor = ids[:, -num:]
        written.append(list(zip(texts.tolist(), torch.cat(logps, -1).tolist(), strict=True)))
    return [text for pair in zip(*written, strict=True) for text in pair]


@pytest.fixture(scope="module")
def model(policy_path: str) -> torch.nn.Module:
    return load_policy(policy_path).eval()


def test_exact_samples_agree_with_the_trainer(model: torch.nn.Module) -> None:
    engine, trainer, entropy = score(model, PROMPTS, sample(model, 1.0))
    assert len(engine) == 64 * 12
    found = agreement(engine, trainer, entropy)
    assert found["k3"] < 1e-9
    assert found["importance"] == pytest.approx(1, abs=1e-4)
    assert abs(found["surprise_z"]) < 3


def test_samples_from_another_distribution_are_found(model: torch.nn.Module) -> None:
    cold = agreement(*score(model, PROMPTS, sample(model, 0.6)))
    assert cold["k3"] < 1e-9  # their log-probs are right
    assert cold["surprise_z"] < -5


def test_wrong_log_probs_are_found(model: torch.nn.Module) -> None:
    engine, trainer, entropy = score(model, PROMPTS, sample(model, 1.0))
    noise = 0.1 * torch.randn(engine.shape, generator=torch.Generator().manual_seed(0))
    assert agreement(engine + noise, trainer, entropy)["k3"] == pytest.approx(0.005, rel=0.2)
