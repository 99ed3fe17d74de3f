"""Runs of the same objects one after another: a later one takes from an earlier one what it should and no more."""

from typing import Any

import pytest
import torch

from tests.conftest import Paths
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer
from tlt_lightning import PartialRollout, RLModule, RolloutCallback, Sampling, TailBatching, TransformersEngine
from tlt_lightning.adapters import LoRA
from tlt_lightning.objectives import GRPO, PPO, KLPenalty

pytestmark = pytest.mark.slow


class Fail(RolloutCallback):
    """Raises RuntimeError in an epoch, the second unless told otherwise, when a hook is called for the first time."""

    def __init__(self, hook: str, epoch: int = 1) -> None:
        self.hook, self.epoch = hook, epoch

    def _fail(self, trainer: Any, hook: str) -> None:
        if hook == self.hook and trainer.current_epoch == self.epoch:
            self.hook = ""
            raise RuntimeError("made to fail")

    def on_rollout_end(self, trainer: Any, *_: Any) -> None:
        self._fail(trainer, "rollout")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._fail(trainer, "update")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self._fail(trainer, "validation")


def longer(prompt: str, response: str, row: dict[str, Any]) -> float:
    return float(len(response))


@pytest.mark.parametrize("hook", ["rollout", "update", "validation"])
def test_checkpoints_of_a_fit_after_one_that_failed_resume(
    hook: str, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_path, prompts_path, root = paths
    module, data = make_module(policy_path), make_data(prompts_path)
    trainer = make_trainer(root, Fail(hook), max_epochs=3, limit_val_batches=1.0)
    with pytest.raises(RuntimeError, match="made to fail"):
        trainer.fit(module, data)
    assert module.policy is not None
    assert all(each.training for each in module.policy.modules())
    barriers: list[str | None] = []
    monkeypatch.setattr(type(trainer.strategy), "barrier", lambda _, name=None: barriers.append(name))
    trainer.fit(module, data)
    assert "train_dataloader()" in barriers
    trainer.save_checkpoint(root / "third.ckpt")
    recorder = Recorder()
    resumed = make_trainer(root, recorder, max_epochs=4, limit_val_batches=1.0)
    resumed.fit(make_module(policy_path), make_data(prompts_path), ckpt_path=root / "third.ckpt")
    assert recorder.calls.count("scored") == 1
    assert resumed.global_step == trainer.global_step + 2


def test_a_validation_after_one_that_failed_measures_its_own_responses_alone(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data = make_module(policy_path), make_data(prompts_path)
    trainer = make_trainer(root, limit_val_batches=1.0)
    whole = trainer.validate(module, data)
    failing = make_trainer(root, Fail("validation", epoch=0), limit_val_batches=1.0)
    with pytest.raises(RuntimeError, match="made to fail"):
        failing.validate(module, data)
    assert trainer.validate(module, data) == whole
    with pytest.raises(RuntimeError, match="made to fail"):
        make_trainer(root, Fail("validation", epoch=0), limit_val_batches=1.0).validate(module, data)
    trainer.fit(module, data)


def test_what_is_set_between_two_fits_holds_for_all_of_the_second(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data, recorder = make_module(policy_path), make_data(prompts_path), Recorder()
    make_trainer(root, recorder, max_epochs=1, limit_val_batches=1.0).fit(module, data)
    data.sampling, data.group_size, data.prompts_per_iteration = Sampling(max_tokens=4), 2, 3
    data.num_minibatches, data.inner_epochs, data.schedule = 1, 3, TailBatching()
    data.train, data.val = [{"prompt": "1 2 = 3 :", "answer": ""}] * 5, [{"prompt": "2 3 = 5 :", "answer": ""}] * 2
    data.rewards = [longer]
    recorder.rollouts.clear()
    trainer = make_trainer(root, recorder, max_epochs=1, limit_val_batches=1.0)
    trainer.fit(module, data)
    train, held_out = recorder.rollouts
    assert (len(train), len(held_out), trainer.global_step) == (6, 2, 3)
    assert {rollout.prompt.text for rollout in train} == {"1 2 = 3 :"}
    for rollout in (*train, *held_out):
        assert len(rollout.response.token_ids) <= 4
        assert rollout.reward == len(rollout.text)
    assert data.backlog.schedule is data.schedule
    trainer.save_checkpoint(root / "second.ckpt")
    kept = torch.load(root / "second.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert (kept["group_size"], kept["sampling"]["max_tokens"], kept["val_sampling"]) == (2, 4, None)
    assert kept["schedule"]["class_path"].endswith("TailBatching")


def test_what_a_run_cannot_have_or_load_anew_is_refused_when_it_is_set_between_two_fits(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data = make_module(policy_path), make_data(prompts_path)
    make_trainer(root, max_epochs=1).fit(module, data)
    changes: list[tuple[Any, str, Any, str]] = [
        (data, "sampling", Sampling(max_tokens=8, temperature=0), r"`sampling\.temperature` 0 writes the same"),
        (module, "lora", LoRA(rank=2), r"`model\.lora` was None and is LoRA\(rank=2.*make a new `RLModule`"),
        (module, "policy_path", "another", r"`model\.policy` was '.*' and is 'another'"),
        (module, "gradient_checkpointing", True, r"`model\.gradient_checkpointing` was False and is True"),
        (module, "objective", PPO(), r"`model\.objective` PPO needs a critic, which was not loaded"),
        (module, "objective", GRPO(loss_kl=KLPenalty()), r"GRPO needs a reference, which was not loaded"),
    ]
    for owner, name, value, message in changes:
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(ValueError, match=message):
            make_trainer(root, max_epochs=1).fit(module, data)
        setattr(owner, name, before)


def test_an_objective_that_is_set_between_two_fits_is_the_checkpoints(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    module, data = make_module(policy_path), make_data(prompts_path)
    make_trainer(root, max_epochs=1).fit(module, data)
    module.objective, module.optimizer = GRPO(entropy_coef=0.5), lambda p: torch.optim.SGD(p, lr=0.25)
    trainer = make_trainer(root, max_epochs=1)
    trainer.fit(module, data)
    trainer.save_checkpoint(root / "second.ckpt")
    loaded = RLModule.load_from_checkpoint(root / "second.ckpt")
    assert loaded.objective == module.objective
    assert loaded.hparams["optimizer"]["init_args"]["lr"] == 0.25


def test_a_fit_after_a_resume_that_was_refused_begins_with_its_own_settings(
    paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    policy_path, prompts_path, root = paths
    data, trainer = make_data(prompts_path), make_trainer(root, max_epochs=1)
    trainer.fit(make_module(policy_path), data)
    trainer.save_checkpoint(root / "first.ckpt")
    module = make_module(policy_path, optimizer=lambda p: torch.optim.SGD(p, lr=0.25), lr_scheduler=constant)
    with pytest.raises(ValueError, match="is no SGD"):
        make_trainer(root).fit(module, data, ckpt_path=root / "first.ckpt")
    trainer = make_trainer(root, max_epochs=1)
    trainer.fit(module, data)
    assert "Resumed" not in caplog.text
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def test_a_run_that_is_validated_is_saved_as_before(paths: Paths) -> None:
    policy_path, prompts_path, root = paths
    engine = TransformersEngine(batch_size=4)
    module, data = make_module(policy_path), make_data(prompts_path, engine, schedule=PartialRollout())
    trainer = make_trainer(root, max_epochs=2, limit_val_batches=1.0)
    trainer.fit(module, data)
    trainer.save_checkpoint(root / "fitted.ckpt")
    trainer.validate(module, data)
    trainer.save_checkpoint(root / "validated.ckpt")
    fitted, validated = (torch.load(root / f"{name}.ckpt")[type(data).__qualname__] for name in ("fitted", "validated"))
    assert fitted["cursor"] == validated["cursor"] > 8
    assert len(fitted["ranks"][0]["deferred"]) == len(validated["ranks"][0]["deferred"]) > 0
    assert fitted["mean_lengths"] == validated["mean_lengths"] != {}


@pytest.mark.parametrize("schedule", [None, PartialRollout(extra=0.5)], ids=["synchronous", "partial"])
@pytest.mark.parametrize("fails_at", [None, "rollout"])
def test_a_fit_that_goes_on_draws_the_prompts_that_come_next(
    fails_at: str | None, schedule: PartialRollout | None, paths: Paths
) -> None:
    policy_path, prompts_path, root = paths

    def prompts_of(recorder: Recorder) -> list[list[int]]:
        return [sorted(rollout.prompt.index for rollout in rollouts) for rollouts in recorder.rollouts]

    whole, parts = Recorder(), Recorder()
    own = {"prompts_per_iteration": 2, "schedule": schedule}
    never = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}  # so that parts write what one run does
    data = make_data(prompts_path, **own)
    make_trainer(root, whole, max_epochs=4).fit(make_module(policy_path, **never), data)
    module, data = make_module(policy_path, **never), make_data(prompts_path, **own)
    trainer = make_trainer(root, parts, Fail(fails_at or "never"), max_epochs=2)
    if fails_at is not None:
        with pytest.raises(RuntimeError, match="made to fail"):
            trainer.fit(module, data)
        del parts.rollouts[1:]
    else:
        trainer.fit(module, data)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, data)
    assert prompts_of(parts) == prompts_of(whole)
    assert trainer.global_step == 8
