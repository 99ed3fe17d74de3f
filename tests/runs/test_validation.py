"""Held-out prompts in runs on a tiny policy: which weights answer them, and how."""

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import Sampling, TransformersEngine


@pytest.fixture(autouse=True)
def seed() -> None:
    L.seed_everything(11)


def test_weights_of_the_engine_follow_validation_and_prediction(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    module = make_module(policy_path)
    trainer = make_trainer(tmp_path, limit_val_batches=1.0)
    data = make_data(prompts_path, val_group_size=4)
    (metrics,) = trainer.validate(module, data, verbose=False)
    assert set(metrics) >= {"val/accuracy", "val/pass@2", "val/pass@4"}
    assert 0 <= metrics["val/accuracy"] <= metrics["val/pass@2"] <= metrics["val/pass@4"] <= 1
    rows = [row for group in trainer.predict(module, data) for row in group]
    assert len(rows) == 9 * 4
    assert set(rows[0]) >= {"prompt", "response", "answer", "reward", "correct", "tokens", "finish_reason"}
    assert data.tokenizer.decode(rows[0]["prompt_ids"]) == rows[0]["prompt"]
    assert len(rows[0]["response_ids"]) == rows[0]["tokens"]
    assert sum(row["correct"] for row in rows) / len(rows) == pytest.approx(metrics["val/accuracy"])


@pytest.mark.parametrize("first", ["validate", "test"])
def test_a_fit_after_an_evaluation_of_the_same_objects_validates(
    first: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    module, data = make_module(policy_path), make_data(prompts_path)
    getattr(make_trainer(tmp_path, limit_val_batches=1.0, limit_test_batches=1.0), first)(module, data, verbose=False)
    trainer = make_trainer(tmp_path, max_epochs=1, limit_val_batches=1.0)
    trainer.fit(module, data)
    assert 0 <= trainer.callback_metrics["val/accuracy"] <= 1


class Watched(TransformersEngine):
    """Remembers the seed and the sampling of each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, Sampling]] = []

    def generate(self, requests, sampling, *, seed, on_progress=None):  # type: ignore[no-untyped-def]
        self.asked.append((seed, sampling))
        return super().generate(requests, sampling, seed=seed, on_progress=on_progress)


@pytest.mark.slow
def test_weights_swapped_for_a_validation_do_not_stay_for_training(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    class Copying(TransformersEngine):
        """Keeps weights of its own, as vLLM does, and compares them with the policy's when it writes."""

        def __init__(self) -> None:
            super().__init__()
            self.held: dict[str, torch.Tensor] = {}
            self.stale: list[bool] = []
            self.syncs = 0

        def update_weights(self, named_tensors, version):  # type: ignore[no-untyped-def]
            self.syncs += 1
            self.held = {name: tensor.clone() for name, tensor in named_tensors}
            super().update_weights(self.held.items(), version)

        def generate(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            live = module.policy_weights()
            self.stale.append(any(not torch.equal(self.held[name], tensor) for name, tensor in live))
            return super().generate(*args, **kwargs)

    module, engine = make_module(policy_path), Copying()
    averaging = EMAWeightAveraging(decay=0.5)
    trainer = make_trainer(tmp_path, averaging, limit_val_batches=1.0, check_val_every_n_epoch=1, max_epochs=3)
    trainer.fit(module, make_data(prompts_path, engine))
    assert engine.stale == [False] * 6
    assert engine.syncs == 6  # the averaged weights differ from the policy's, and the policy's from the averaged
    engine = Copying()
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, check_val_every_n_epoch=1, max_epochs=3)
    module = make_module(policy_path)
    trainer.fit(module, make_data(prompts_path, engine))
    assert engine.syncs == 4  # a validation and the next rollout have the same weights


def test_every_validation_samples_with_the_same_noise_and_as_it_is_told(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    engine, greedy = Watched(), Sampling(max_tokens=8, temperature=0)
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, check_val_every_n_epoch=1, max_epochs=3)
    trainer.fit(make_module(policy_path), make_data(prompts_path, engine, val_sampling=greedy))
    train, held_out = engine.asked[0::2], engine.asked[1::2]
    assert len({seed for seed, _ in train}) == 3
    assert len(set(held_out)) == 1
    assert held_out[0][1] == greedy
    L.seed_everything(12)
    other = Watched()
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, check_val_every_n_epoch=1, max_epochs=1)
    trainer.fit(make_module(policy_path), make_data(prompts_path, other, val_sampling=greedy))
    assert len(other.asked) == 2
    assert not {seed for seed, _ in other.asked} & {seed for seed, _ in engine.asked}  # each run has noise of its own


def test_held_out_prompts_are_needed_to_validate_and_not_to_fit(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        make_trainer(tmp_path, max_epochs=1, limit_val_batches=1.0).fit(
            make_module(policy_path), make_data(prompts_path, val=None)
        )
    assert not [warning for warning in caught if "Total length" in str(warning.message)]
    with pytest.raises(MisconfigurationException, match=r"`data\.val` is not set"):
        make_trainer(tmp_path).validate(make_module(policy_path), make_data(prompts_path, val=None))


def test_held_out_metrics_before_training_and_after_iterations_go_together(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, limit_val_batches=1.0, num_sanity_val_steps=-1, check_val_every_n_epoch=1, max_epochs=2
    )
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    assert {"val/accuracy", "val/reward", "reward/mean"} <= trainer.callback_metrics.keys()
