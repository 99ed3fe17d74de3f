"""`lossless/run.py`: both checks are made with every arm, and one that fails takes no other with it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.sizes import FILES
from benchmarks.lossless import run as lossless
from benchmarks.rollout.process import EngineError

alive: list[list[str]] = []


class FakeEngines:
    """Engines that write the same text for each prompt; those of one arm part from it, and those of another fail."""

    def __init__(self, setup: Any) -> None:
        self.num_prompts = setup.num_prompts

    def need(self, kinds: Any, *, wait: bool) -> None:
        alive.append(list(kinds))
        assert not wait

    def get(self, kind: str) -> "FakeEngines":
        return self

    def call(self, name: str, seconds: float, arm: str, group_size: int, **arguments: Any) -> Any:
        assert name == "write"
        if arm == "K=7":
            raise EngineError("RuntimeError: out of luck")
        tokens = [20, 21, 22, 23] if arm != "adaptive" or arguments["sampling"].temperature else [20, 21, 30, 23]
        return [(tokens, [-1.0] * 4)] * (self.num_prompts * group_size)

    def close(self) -> None:
        pass


def test_every_arm_is_checked_and_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lossless, "Engines", FakeEngines)
    lossless.main(["--tiny", "--head", "some", "--out", str(tmp_path)])
    kinds = ["plain", "steered", "probabilistic"]
    assert alive[-4:] == [kinds[:2], kinds[:2], kinds[1:], kinds[2:]]  # the device holds two and the trainer
    results = json.loads((tmp_path / "lossless_tiny.json").read_text())
    parted = {row["arm"]: (row["parted"], row["first"]) for row in results["greedy"]}
    nothing = (0, None)
    assert parted == {
        "plain again": nothing,
        "plain, 2 at a time": nothing,
        "K=3": nothing,
        "adaptive": (4, 2),
        "adaptive, siblings too": nothing,
        "K=3, sampled drafts": nothing,
    }
    assert len(results["greedy"][3]["gaps"]) == 4
    assert [row["arm"] for row in results["logps"]] == ["plain", *lossless.SAMPLED_ARMS]
    assert {row["tokens"] for row in results["logps"]} == {4 * 4 * 4}
    assert [failure["arm"] for failure in results["failures"]] == ["greedy, K=7"]
    report = (tmp_path / "lossless_tiny.md").read_text()
    assert "4 of 4" in report
    assert "greedy, K=7 failed: `benchmarks.rollout.process.EngineError: RuntimeError: out of luck`" in report


def test_nothing_is_written_beyond_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lossless, "Engines", FakeEngines)
    lossless.main(["--tiny", "--head", "some", "--out", str(tmp_path), "--seconds", "-1"])
    results = json.loads((tmp_path / "lossless_tiny.json").read_text())
    assert results["greedy"] == results["logps"] == []
    assert results["left_out"][0] == "the plain texts"


def test_a_trainer_that_fails_takes_no_other_check_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def score(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lossless, "Engines", FakeEngines)
    monkeypatch.setattr(lossless, "score", score)
    lossless.main(["--tiny", "--head", "some", "--out", str(tmp_path)])
    report = (tmp_path / "lossless_tiny.md").read_text()
    assert "| K=3, sampled drafts |" in report
    assert "Log-probs: not compared." in report
    assert "log-probs, plain failed: `RuntimeError: out of memory`" in report


def test_results_of_a_padded_policy_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(FILES["tiny"].policy, policy)
    (policy / "padded.json").write_text(json.dumps({"what": "policy of 7 weights"}))
    monkeypatch.setattr(lossless, "Engines", FakeEngines)
    lossless.main(["--tiny", "--policy", str(policy), "--head", "some", "--out", str(tmp_path)])
    assert "**Padded: policy of 7 weights that know" in (tmp_path / "lossless_tiny.md").read_text()
