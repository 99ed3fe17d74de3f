"""The adaptive drafter in whole runs with the real engine, on one rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

from tests.support.drafters.drafter_runs import (
    POLICY,
    Greedy,
    Metrics,
    fixed,
    make_callback,
    make_data,
    make_engine,
    make_module,
    make_trainer,
)
from tlt_lightning import RLModule, RolloutCallback
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.policy import load_policy


@dataclass
class Run:
    root: Path
    module: RLModule
    callback: LongTailIdleCallback
    rows: list[dict[str, float]]
    greedy: Greedy
    served: torch.Tensor | None

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


def fit(root: Path, ckpt_path: str | None = None, max_epochs: int = 3, **callback: Any) -> Run:
    L.seed_everything(3)
    selector, metrics, checkpoints = fixed(), Metrics(), ModelCheckpoint(root, "{epoch}", save_top_k=-1)
    drafting = make_callback(**{"share": 8.0, **callback})
    greedy, module = Greedy(selector), make_module()
    trainer = make_trainer(root, drafting, metrics, checkpoints, greedy, max_epochs=max_epochs)
    trainer.fit(module, make_data(make_engine(selector)), ckpt_path=ckpt_path)
    return Run(root, module, drafting, metrics.rows, greedy, greedy.map)


NUM_DRAFTED = 40
"""Tokens that the head of these runs drafts, of the policy's 115."""


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit(tmp_path_factory.mktemp("adaptive"), draft_vocab_size=NUM_DRAFTED)


@pytest.mark.vllm
@pytest.mark.slow
def test_acceptance_rises_from_a_random_head_that_drafts_nothing_before_it_was_trained(adaptive: Run) -> None:
    lengths = adaptive.column("speculation/acceptance_length")
    assert max(lengths) >= lengths[0] + 0.5
    assert lengths[0] == adaptive.rows[0]["speculation/off_share"] == 1
    assert adaptive.column("speculation/off_share")[1:] == [0, 0]
    assert adaptive.column("speculation/alarms") == [0, 0, 0]
    # What is measured on held-out text is what the engine then achieves.
    assert adaptive.rows[1]["drafter/acceptance_after"] == pytest.approx(lengths[1], abs=0.25)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_books_of_a_run(adaptive: Run) -> None:
    assert adaptive.column("drafter/version")[:2] == [0, 1]
    assert "drafter/acceptance_after" not in adaptive.rows[0]
    for row in adaptive.rows[1:]:
        assert row["drafter/published"] == (row["drafter/acceptance_gain_bound"] > 0)
        assert 0 < row["drafter/top1_pos_1"] <= row["drafter/top3_pos_1"] <= 1
    assert adaptive.rows[1]["drafter/policy_lag"] == 1  # an optimizer step an iteration, and one iteration behind
    assert all(row["drafter/micro_steps"] > 20 and row["drafter/loss"] > 0 for row in adaptive.rows)
    assert adaptive.column("drafter/idle_seconds_available") == [0, 0, 0]
    for row in adaptive.rows:
        stages = [value for name, value in row.items() if name.startswith("time/") and name != "time/iteration"]
        assert row["time/drafter"] > 0
        assert sum(stages) == pytest.approx(row["time/iteration"])


@pytest.mark.vllm
@pytest.mark.slow
def test_greedy_text_stays_the_same_whatever_was_pushed(adaptive: Run) -> None:
    assert adaptive.callback.drafter is not None
    assert adaptive.greedy.texts[3] == adaptive.greedy.texts[0]
    assert len({tuple(text) for text in adaptive.greedy.texts[0]}) > 4


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_leaves_its_drafter(adaptive: Run) -> None:
    folder = adaptive.root / "drafter"
    assert "tokens per step" in (folder / "final" / "README.md").read_text()
    saved = load_file(folder / "final" / "model.safetensors")
    for name, tensor in adaptive.callback.publisher.published():
        assert torch.equal(saved[name], tensor)
    assert not any(name.startswith("embed_tokens") for name in saved)
    assert saved["t2d"].sum() == NUM_DRAFTED
    assert not saved["t2d"][:NUM_DRAFTED].all()  # not those that it drafted before there was text
    assert torch.equal(saved["d2t"], adaptive.served)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(adaptive: Run, tmp_path: Path) -> None:
    resumed = fit(tmp_path, ckpt_path=str(adaptive.root / "epoch=1.ckpt"), draft_vocab_size=NUM_DRAFTED)
    assert torch.equal(resumed.served, adaptive.served)
    theirs = dict(adaptive.callback.drafter.trainable_tensors())
    for name, tensor in resumed.callback.drafter.trainable_tensors():
        assert torch.equal(tensor, theirs[name]), name
    policy = dict(adaptive.module.policy_weights())
    for name, tensor in resumed.module.policy_weights():
        assert torch.equal(tensor, policy[name]), name
    # The engine drafted with the published head from the first step on.
    # A new engine begins with a step without drafts: a switch more.
    is_timed = ("time/", "drafter/seconds_not_hidden", "speculation/tokens_per_s", "speculation/switches", "rollout/")
    is_timed += ("train/tokens_per_s",)
    mine = {name: value for name, value in resumed.rows[-1].items() if not name.startswith(is_timed)}
    assert mine == {name: adaptive.rows[-1][name] for name in mine}


class SaveInRollout(RolloutCallback):
    """Saves in the second iteration's rollout."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_rollout_progress(self, trainer, pl_module, progress):  # type: ignore[no-untyped-def]
        if trainer.current_epoch == 1 and progress.tokens > 200 and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_saved_in_a_rollout_is_gone_on_with_bit_for_bit(tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None) -> tuple[list[torch.Tensor], dict[str, float]]:
        L.seed_everything(3)
        selector, metrics, drafting, module = fixed(), Metrics(), make_callback(share=1.0), make_module()
        saving = [] if ckpt_path else [SaveInRollout(tmp_path / "rollout.ckpt")]
        trainer = make_trainer(tmp_path, drafting, metrics, *saving, max_epochs=2)
        trainer.fit(module, make_data(make_engine(selector), num_minibatches=2), ckpt_path=ckpt_path)
        tensors = [*drafting.drafter.trainable_tensors(), *module.policy_weights()]
        clocks = ("time/", "speculation/", "rollout/", "train/tokens_per_s", "train/mfu", "drafter/seconds")
        row = {name: value for name, value in metrics.rows[-1].items() if not name.startswith(clocks)}
        return [tensor.clone() for _, tensor in tensors], row

    tensors, row = run()
    assert row["drafter/micro_steps"] > 0
    resumed, metrics = run(tmp_path / "rollout.ckpt")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed, tensors, strict=True))
    assert metrics == row


@pytest.mark.vllm
@pytest.mark.slow
def test_a_frozen_drafter_stays_as_bad_as_it_was(
    random_head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random head, but warm: it drafts from the first step on and is never trained."""
    pushed: list[tuple[int, torch.Tensor]] = []
    push = VLLMEngine.update_drafter

    def spy(engine: VLLMEngine, named_tensors: Any, version: int, accepted: Any) -> None:
        tensors = dict(named_tensors)
        pushed.append((version, tensors["lm_head.weight"].clone()))
        push(engine, tensors.items(), version, accepted)

    monkeypatch.setattr(VLLMEngine, "update_drafter", spy)
    run = fit(tmp_path, head=random_head, share=0.0, max_epochs=2)
    for row in run.rows:
        assert row["speculation/acceptance_length"] < 1.1
        assert row["speculation/off_share"] < 1
        assert row["drafter/micro_steps"] == row["drafter/version"] == row["speculation/drafter_version"] == 0
    assert run.module.hidden_state_request is None
    assert len(run.callback.buffer) == 0
    # What it drafts with are rows of the policy's head, and these follow the policy.
    head = run.callback.drafter.head
    assert head is not None
    policy = load_policy(POLICY).get_output_embeddings().weight.detach()[head.t2d]
    assert [version for version, _ in pushed] == [0, 0]
    assert torch.equal(pushed[0][1], policy)
    assert 0 < (pushed[1][1] - policy).abs().max() < 1e-3
