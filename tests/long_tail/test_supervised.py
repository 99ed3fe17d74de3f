"""A drafter that learns along with supervised fine-tuning."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

from tests.long_tail.test_callback import texts_of
from tests.support.drafters.drafter_runs import ASSETS, POLICY, Metrics, make_data, make_trainer
from tlt_lightning import (
    DrafterDataModule,
    DrafterModule,
    PromptSource,
    RLModule,
    SupervisedDataModule,
    TransformersEngine,
    export_policy,
)
from tlt_lightning.long_tail.publishing import DrafterPublisher
from tlt_lightning.long_tail.supervised import SupervisedDrafterCallback
from tlt_lightning.long_tail.trainer import TrainingStretch
from tlt_lightning.metrics import IterationLog
from tlt_lightning.objectives import SFT


def make_callback(**drafter: Any) -> SupervisedDrafterCallback:
    made = DrafterModule(POLICY, optimizer=lambda p: torch.optim.AdamW(p, lr=7e-3), draft_vocab_size=40, **drafter)
    return SupervisedDrafterCallback(made, pack_tokens=256, buffer_gib=0.25)


def fit(root: Path, callback: SupervisedDrafterCallback, *others: L.Callback, ckpt: str | None = None) -> list[Any]:
    L.seed_everything(3)
    metrics = Metrics()
    trainer = make_trainer(root, callback, metrics, *others, max_epochs=2)
    texts = PromptSource(path=str(ASSETS / "searches.jsonl"), split="train[:120]")
    data = SupervisedDataModule(train=texts, batch_size=16, steps_per_epoch=6)
    trainer.fit(RLModule(POLICY, SFT()), data, ckpt_path=ckpt)
    return metrics.rows


def test_texts_of_a_step_are_gone_through_as_often_as_asked_for() -> None:
    callback = SupervisedDrafterCallback(DrafterModule(POLICY), pack_tokens=128, passes=3.0)
    texts, seen = texts_of(8), list[float]()
    training: Any = SimpleNamespace(num_passes=0.0, num_seen=0, begin=lambda seed: None, average=lambda: None)

    def train(may_go_on: Callable[[], bool]) -> TrainingStretch:
        while may_go_on():
            seen.append(training.num_passes)
            training.num_passes += 0.5
        return TrainingStretch()

    training.train, callback.training = train, training
    trainer: Any = SimpleNamespace(global_step=0, current_epoch=0, global_rank=0)
    callback.on_hidden_states(trainer, SimpleNamespace(iteration_log=IterationLog()), texts)
    assert seen == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], SupervisedDrafterCallback]:
    root, callback = tmp_path_factory.mktemp("run"), make_callback()
    return root, fit(root, callback, ModelCheckpoint(root, "{epoch}", save_top_k=-1)), callback


@pytest.mark.slow
def test_a_head_learns_to_draft_while_the_policy_imitates(run: Any) -> None:
    """By its own account, and by a validation of the exported head on the policy that the run leaves."""
    root, rows, _ = run
    assert rows[1]["drafter/acceptance_before"] < 1.1 < 1.5 < rows[1]["drafter/acceptance_after"]
    assert rows[0]["drafter/tokens"] > 5_000
    policy = export_policy(str(root / "epoch=1.ckpt"), str(root / "policy"), dtype="float32")
    drafter = DrafterModule(str(policy), str(root / "drafter/final"))
    texts = DrafterDataModule(str(ASSETS / "searches.jsonl"), split="train[120:]", num_tokens=1024)
    trainer = make_trainer(root, limit_val_batches=4)
    trainer.validate(drafter, texts, verbose=False)
    assert float(trainer.callback_metrics["val/acceptance_length"]) > 1.5


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_head(run: Any, tmp_path: Path) -> None:
    root, rows, whole = run
    resumed = make_callback()
    (row,) = fit(tmp_path, resumed, ckpt=str(root / "epoch=0.ckpt"))
    for name in ("drafter/acceptance_before", "drafter/acceptance_after"):  # by the policy that the checkpoint holds
        assert row[name] == rows[1][name]
    torch.testing.assert_close(resumed.training.weights(), whole.training.weights(), atol=0, rtol=0)
    heads = [load_file(folder / "drafter/final/model.safetensors") for folder in (root, tmp_path)]
    torch.testing.assert_close(*heads, atol=0, rtol=0)


@pytest.mark.slow
def test_seconds_of_a_decision_are_the_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = make_callback()
    callback.passes = 0.01
    monkeypatch.setattr(DrafterPublisher, "publish_if_better", lambda self: time.sleep(3))
    texts = SupervisedDataModule(
        train=PromptSource(path=str(ASSETS / "searches.jsonl")), batch_size=4, steps_per_epoch=1
    )
    metrics = Metrics()
    make_trainer(tmp_path, callback, metrics, max_epochs=1).fit(RLModule(POLICY, SFT()), texts)
    assert metrics.rows[0]["time/drafter"] > 3


def test_a_drafter_of_another_policy_or_without_texts_is_refused(tmp_path: Path, policy_path: str) -> None:
    data = SupervisedDataModule(train=[{"prompt": "1", "answer": "2"}])
    with pytest.raises(MisconfigurationException, match=r"drafter.target` is .*countdown/policy.*but the policy is"):
        make_trainer(tmp_path, make_callback()).fit(RLModule(policy_path, SFT()), data)
    rollouts = make_data(TransformersEngine())
    with pytest.raises(MisconfigurationException, match="Callback` needs a `SupervisedDataModule`"):
        make_trainer(tmp_path, make_callback()).fit(RLModule(POLICY), rollouts)
