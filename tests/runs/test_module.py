"""Real `Trainer.fit` runs of RLModule on a tiny policy; the engine is the policy itself unless marked `vllm`."""

import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.rl_runs import (
    Recorder,
    evenness,
    fit,
    make_and_load,
    make_data,
    make_engine,
    make_module,
    make_trainer,
    weights,
)
from tests.test_policy import make_batch
from tlt_lightning import (
    CriticConfig,
    LoRA,
    RewardTerm,
    RLModule,
    RolloutCallback,
    Sampling,
    TransformersEngine,
)
from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.data.dynamic_sampling import DynamicSampling
from tlt_lightning.objectives import GRPO, K3, PPO, DrGRPO, KLPenalty, ObjectiveOutput, group_statistics
from tlt_lightning.policy import causal_lm
from tlt_lightning.training.critic import Critic


@pytest.fixture(autouse=True)
def seed() -> None:
    L.seed_everything(11)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_every_response_is_written_by_the_current_weights(
    engine: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, max_epochs=3)
    trainer.fit(make_module(policy_path), make_data(prompts_path, make_engine(engine)))
    assert recorder.versions == [(0, {0}), (2, {2}), (4, {4})]
    for batch in recorder.batches:
        mismatch = (batch.old_logps - batch.rollout_logps).abs().sum() / batch.response_mask.sum()
        assert mismatch < 1e-3  # stale weights would be off by far more


def test_stale_weights_would_be_seen(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    """The check above can fail: without the push, trainer and engine disagree."""

    mismatches: list[float] = []

    class Stale(RolloutCallback):
        def on_rollout_scored(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
            difference = (batch.old_logps - batch.rollout_logps).abs().sum() / batch.response_mask.sum()
            mismatches.append(difference.item())
            with torch.no_grad():  # what the next rollout is written with is not what it is scored with
                for parameter in pl_module.policy.parameters():
                    parameter.mul_(1.1)

        def on_rollout_end(self, trainer, pl_module, rollouts):  # type: ignore[no-untyped-def]
            with torch.no_grad():
                for parameter in pl_module.policy.parameters():
                    parameter.mul_(1.05)

    trainer = make_trainer(tmp_path, Stale(), max_epochs=1)
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    assert mismatches[0] > 1e-3


def test_hooks_come_in_order(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    recorder = Recorder()
    make_trainer(tmp_path, recorder).fit(make_module(policy_path), make_data(prompts_path))
    one = ["start", "progress", "end", "scored"]
    assert recorder.calls == ["synced 0", *one, "synced 2", *one]
    assert all(batch.advantages is not None for batch in recorder.batches)
    assert all(rollout.rewards["evenness"] == rollout.reward for rollout in recorder.rollouts[0])


def test_a_plain_callback_with_a_hook_works(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    class Plain(L.Callback):
        seen = 0

        def on_rollout_end(self, trainer, pl_module, rollouts):  # type: ignore[no-untyped-def]
            Plain.seen += len(rollouts)

    make_trainer(tmp_path, Plain()).fit(make_module(policy_path), make_data(prompts_path))
    assert Plain.seen == 32


@pytest.mark.slow
def test_reward_goes_up(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, max_epochs=12)
    data = make_data(prompts_path, prompts_per_iteration=8, group_size=8, num_minibatches=1)
    trainer.fit(make_module(policy_path, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)), data)
    means = [sum(r.reward for r in rollouts) / len(rollouts) for rollouts in recorder.rollouts]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.2


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), LoRA(rank=4)])
def test_killed_and_resumed_run_has_the_weights_of_the_uninterrupted_one(
    lora: LoRA | None, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    def checkpointing() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "checkpoints", filename="{epoch}", save_top_k=-1, every_n_epochs=1)

    class Kill(RolloutCallback):
        def on_rollout_progress(self, trainer, pl_module, progress):  # type: ignore[no-untyped-def]
            if trainer.current_epoch == 2:
                raise ZeroDivisionError("killed in the middle of the third rollout")

    def run(*callbacks: L.Callback, ckpt_path: Path | None = None) -> RLModule:
        L.seed_everything(11)
        module = make_module(policy_path, lora=lora)
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=4, enable_checkpointing=True)
        trainer.fit(module, make_data(prompts_path, inner_epochs=2), ckpt_path=ckpt_path)
        return module

    uninterrupted = weights(run(checkpointing()))
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(ZeroDivisionError):
        run(checkpointing(), Kill())
    recorder = Recorder()
    resumed = weights(run(checkpointing(), recorder, ckpt_path=tmp_path / "checkpoints" / "epoch=1.ckpt"))
    assert recorder.versions == [(8, {8}), (12, {12})]
    assert uninterrupted.keys() == resumed.keys()
    for name, tensor in uninterrupted.items():
        assert torch.equal(tensor, resumed[name]), name


def test_lora_checkpoint_holds_the_adapter_alone(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    checkpointing = ModelCheckpoint(tmp_path, filename="last")
    trainer = make_trainer(tmp_path, checkpointing, max_epochs=1, enable_checkpointing=True)
    trainer.fit(make_module(policy_path, lora=LoRA(rank=4)), make_data(prompts_path))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]
    assert all("lora_" in name for name in checkpoint["state_dict"])


def test_checkpoint_of_another_lora_is_refused(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, ModelCheckpoint(tmp_path, filename="last"), max_epochs=1, enable_checkpointing=True
    )
    trainer.fit(make_module(policy_path, lora=LoRA(rank=4)), make_data(prompts_path))
    other = make_module(policy_path, lora=LoRA(rank=8))
    with pytest.raises(ValueError, match="rank=4"):
        make_trainer(tmp_path).fit(other, make_data(prompts_path), ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_reference_stays_where_the_policy_was(
    lora: LoRA | None, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    recorder = Recorder()
    objective = GRPO(loss_kl=KLPenalty(coef=0.1, estimator=K3()))
    module = make_module(policy_path, objective=objective, lora=lora)
    make_trainer(tmp_path, recorder, max_epochs=3).fit(module, make_data(prompts_path))
    first, last = recorder.batches[0], recorder.batches[-1]
    torch.testing.assert_close(first.ref_logps, first.old_logps, atol=1e-5, rtol=1e-5)
    assert (last.ref_logps - last.old_logps).abs().max() > 1e-3
    assert not any("reference" in name for name in module.state_dict())


def test_ppo_trains_a_critic_at_its_own_rate(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    module = make_module(policy_path, objective=PPO(), critic=CriticConfig(lr=0.02))
    recorder = Recorder()
    make_trainer(tmp_path, recorder, max_epochs=3).fit(module, make_data(prompts_path))
    assert module.trainer.optimizers[0].param_groups[1]["lr"] == 0.02
    assert not recorder.batches[0].values.any()  # starts from zero
    assert recorder.batches[-1].values.any()
    assert {"train/value_loss", "train/explained_variance"} <= set(module.trainer.callback_metrics)
    assert all(batch.returns is not None for batch in recorder.batches)


@pytest.mark.parametrize(
    "kind", ["on the policy's trunk", pytest.param("own trunk", marks=pytest.mark.slow), "own trunk with LoRA"]
)
def test_policy_stands_still_while_the_critic_warms_up(
    kind: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    path = None if kind == "on the policy's trunk" else policy_path
    lora = LoRA(rank=2) if "LoRA" in kind else None
    critic = CriticConfig(path=path, lora=lora, lr=0.02, warmup_iterations=2)
    module = make_module(policy_path, objective=PPO(), critic=critic)
    seen = []

    class Watch(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module):  # type: ignore[no-untyped-def]
            seen.append((weights(pl_module), pl_module.critic.head.weight.clone()))

    make_trainer(tmp_path, Watch(), max_epochs=4).fit(module, make_data(prompts_path))
    policies = [policy for policy, _ in seen]
    assert all(torch.equal(policies[0][name], policies[2][name]) for name in policies[0])
    assert not all(torch.equal(policies[2][name], policies[3][name]) for name in policies[0])
    assert not torch.equal(seen[0][1], seen[2][1])


def test_updates_stop_once_the_policy_has_moved_by_target_kl(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    results = []
    for target in (None, 1e-6):
        L.seed_everything(11)
        module = make_module(policy_path, objective=PPO(target_kl=target), critic=CriticConfig(lr=1e-3))
        trainer = make_trainer(tmp_path, max_epochs=1)
        trainer.fit(module, make_data(prompts_path, inner_epochs=4))
        results.append(weights(module))
    initial = dict(make_and_load(policy_path))
    moved = [sum((w[name] - initial[name]).abs().sum().item() for name in initial) for w in results]
    assert 0 < moved[1] < 0.5 * moved[0]


def test_how_a_step_is_cut_and_packed_changes_neither_the_update_nor_its_metrics(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, passes = [], []
    ragged = Sampling(max_tokens=32, stop_token_ids=(4, 5, 6, 7, 8))
    for is_padded, tokens in ((False, 1000), (False, 64), (True, 64), (False, 48)):
        if is_padded:
            monkeypatch.setattr("tlt_lightning.policy.note_if_packable", lambda trunk: False)
        else:
            monkeypatch.undo()
        L.seed_everything(11)
        objective = PPO(loss_kl=KLPenalty(coef=0.1, estimator=K3()), entropy_coef=0.01)
        critic, optimizer = CriticConfig(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)
        module = make_module(policy_path, objective=objective, critic=critic, optimizer=optimizer)
        trainer = make_trainer(tmp_path, max_epochs=1)
        trainer.fit(module, make_data(prompts_path, sampling=ragged, micro_batch_tokens=tokens))
        assert module.networks.is_padded == is_padded
        metrics = {n: v for n, v in trainer.callback_metrics.items() if n.startswith(("train/", "mismatch/"))}
        passes.append(metrics.pop("train/passes"))
        del metrics["train/tokens_per_s"]
        results.append({**metrics, **weights(module), "critic": module.critic.head.weight.detach()})
    assert 1 == passes[0] < passes[1] < passes[2]
    assert passes[1] < passes[3]
    assert {"train/loss", "train/value_loss", "train/kl", "train/grad_norm", "mismatch/kl"} <= results[0].keys()
    assert results[0]["critic"].any()
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-6, rtol=1e-5)


def test_all_passes_of_a_step_have_the_precision_of_the_last(policy_path: str, prompts_path: str) -> None:
    """The Trainer leaves autocast before the last one's backward pass; the critic's head has a float32 one."""
    module = make_module(policy_path, objective=PPO(), critic=CriticConfig(lr=0.1))
    module.trainer = make_trainer(Path(), precision="bf16-mixed")
    module.trainer.strategy._lightning_module = module
    module.configure_model()
    torch.nn.init.normal_(module.critic.head.weight)
    batch = replace(make_batch([2, 3, 2, 3], [3, 9, 6, 5]), num_loss_tokens=23, num_loss_sequences=4)
    for name in ("old_logps", "values", "advantages", "returns"):
        setattr(batch, name, torch.randn_like(batch.rollout_logps))
    gradients = []
    for step in ([[0, 1], [2, 3]], [[2, 3], [0, 1]]):
        with module.trainer.precision_plugin.train_step_context():
            loss = module.training_step([batch.select(rows) for rows in step], 0)
        loss.backward()
        gradients.append(module.critic.head.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_scoring_cuts_by_tokens_and_gives_the_scores_of_each_sequence_alone(policy_path: str) -> None:
    module = make_module(policy_path, objective=GRPO(loss_kl=KLPenalty(coef=0.1, estimator=K3())))
    module.trainer = make_trainer(Path())
    module.configure_model()
    batch = make_batch([2, 3, 2, 3, 2, 2, 2], [3, 40, 6, 5, 1, 20, 2])
    rows = [batch.select([row]) for row in range(7)]
    alone = [module.begin_scoring(row, 43).finish(row) for row in rows]
    shapes: list[tuple[int, ...]] = []
    trunk: Any = causal_lm(module.policy).base_model
    trunk.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True)
    together = module.begin_scoring(batch, 50).finish(batch)
    assert shapes == [(1, 47), (1, 46)]  # the largest first, the reference's passes beside them; no padding
    for row, one in enumerate(alone):
        for name in ("old_logps", "ref_logps"):
            expected = getattr(one, name)[0]
            torch.testing.assert_close(getattr(together, name)[row, : len(expected)], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.1},
    ],
)
def test_trainer_settings_work(settings: dict, policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    before = make_and_load(policy_path)
    after = weights(fit(policy_path, prompts_path, tmp_path, **settings))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_mixed_precision_keeps_updates_that_are_too_small_for_bfloat16(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    seen: set[torch.dtype] = set()

    class Types(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            layer = causal_lm(pl_module.policy).model.layers[0].mlp.up_proj
            layer.register_forward_hook(
                lambda layer, inputs, output: seen.add(output.dtype) if layer.training else None
            )

    module = make_module(policy_path, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-6, weight_decay=0.0))
    before = make_and_load(policy_path)
    trainer = make_trainer(tmp_path, Types(), precision="bf16-mixed", max_epochs=1)
    trainer.fit(module, make_data(prompts_path))
    name = "model.layers.0.mlp.up_proj.weight"
    old, new = before[name], weights(module)[name]
    assert torch.bfloat16 in seen
    assert new.dtype == torch.float32
    assert (new != old).float().mean() > 0.9
    assert (new.bfloat16() != old.bfloat16()).float().mean() < 0.1


def test_gradient_checkpointing_gives_the_same_update(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    results = []
    for checkpointing in (False, True):
        L.seed_everything(11)
        module = make_module(policy_path, gradient_checkpointing=checkpointing)
        results.append(weights(fit(policy_path, prompts_path, tmp_path, module=module)))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], atol=1e-5, rtol=1e-4)


def test_scheduler_moves_once_an_optimizer_step(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    module = make_module(policy_path, lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    fit(policy_path, prompts_path, tmp_path, module=module)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-3 * 0.5**4)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 1}, "group_size"),
        ({"train": None}, r"data\.train"),
        ({"max_prompt_tokens": 2}, "No prompt"),
        ({"max_prompt_tokens": 250, "micro_batch_tokens": 300}, "context of 256"),
        ({"num_minibatches": 3}, "16 responses .* not divisible by `data.num_minibatches` 3"),
        ({"micro_batch_tokens": 23}, "`data.micro_batch_tokens` 23 is less .* set it to at least 24"),
    ],
)
def test_unfit_data_settings_are_refused(
    arguments: dict, message: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        make_trainer(tmp_path).fit(make_module(policy_path), make_data(prompts_path, **arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 0}, "group_size"),
        ({"rewards": []}, "rewards"),
        ({"sampling": Sampling(temperature=0)}, "temperature"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict, message: str, prompts_path: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_data(prompts_path, **arguments)


def test_an_objective_that_assumes_another_length_limit_is_refused(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    with pytest.raises(MisconfigurationException, match=r"`objective.aggregation.max_tokens` 1024 .* is 8; make them"):
        make_trainer(tmp_path).fit(make_module(policy_path, objective=DrGRPO()), make_data(prompts_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": torch.nn.Linear(1, 1)}, r"`policy` must be a str, got a Linear\. .* `merge_and_unload\(\)`"),
        ({"objective": GRPO}, "`objective` must be a PolicyObjective, got the class GRPO itself"),
        ({"lora": {"rank": 4}}, r"`lora` must be a LoRA, got a dict\. Give for example"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "`optimizer` must build one .* got a SGD that is built"),
    ],
)
def test_arguments_of_another_type_are_refused_in_words(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RLModule(**{"policy": "some/model", "objective": GRPO(), **arguments})


def test_sizes_that_are_no_whole_numbers_are_refused(prompts_path: str) -> None:
    with pytest.raises(TypeError, match=r"`group_size` must be a whole number of at least 1, got 4\.0"):
        make_data(prompts_path, group_size=8 / 2)
    with pytest.raises(TypeError, match=r"`sampling\.max_tokens` must be a whole number .* got 8\.0"):
        Sampling(max_tokens=8.0)  # type: ignore[arg-type]


def test_a_policy_may_be_a_path() -> None:
    assert RLModule(Path("some/model"), GRPO()).policy_path == "some/model"  # type: ignore[arg-type]


def test_ppo_without_a_critic_is_refused(policy_path: str) -> None:
    with pytest.raises(ValueError, match="critic"):
        make_module(policy_path, objective=PPO())


def test_a_raising_callback_still_closes_the_engine(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    class Raises(RolloutCallback):
        def on_rollout_scored(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError

    class Closable(TransformersEngine):
        closed = 0

        def close(self) -> None:
            Closable.closed += 1
            super().close()
            raise RuntimeError("and closing fails, too")

    data = make_data(prompts_path, Closable())
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, Raises()).fit(make_module(policy_path), data)
    assert Closable.closed
    with pytest.raises(RuntimeError, match="closed"):
        data.pool.submit(0, "", "", {})


def test_fit_without_a_data_module_is_refused(policy_path: str, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="`RolloutDataModule`"):
        make_trainer(tmp_path).fit(make_module(policy_path), train_dataloaders=[0])


def test_metrics_of_the_loss_are_sums_over_a_steps_micro_batches_and_means_over_steps(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    losses: list[float] = []

    class Counted(GRPO):
        def loss(self, *inputs: Any) -> ObjectiveOutput:
            output = super().loss(*inputs)
            losses.append(output.loss.item())
            return ObjectiveOutput(output.loss, {"train/number": torch.tensor(float(len(losses)))})

    class Interrupt(L.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            raise ZeroDivisionError("when the metrics of a step are there, and before they are logged")

    module = make_module(policy_path, objective=Counted())
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, Interrupt()).fit(module, make_data(prompts_path))
    for num_iterations in (1, 2):  # of two steps of two micro-batches
        losses.clear()
        trainer = make_trainer(tmp_path, max_epochs=num_iterations)
        trainer.fit(module, make_data(prompts_path))
        assert trainer.callback_metrics["train/passes"] == 2
        last = range(4 * num_iterations - 3, 4 * num_iterations + 1)
        assert len(losses) == last[-1]
        assert trainer.callback_metrics["train/number"] == sum(last) / 2
        assert trainer.callback_metrics["train/loss"].item() == pytest.approx(sum(losses[-4:]) / 2, abs=1e-6)


def test_dynamic_sampling_replaces_groups_without_a_signal(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    def only_some(prompt: str, response: str, row: dict[str, Any]) -> float:
        return evenness(prompt, response, row) if int(prompt.split()[0]) % 2 else 0.0

    def run(dynamic_sampling: DynamicSampling | None) -> tuple[Recorder, dict[str, Any]]:
        L.seed_everything(11)
        recorder = Recorder()
        trainer = make_trainer(tmp_path, recorder, max_epochs=3)
        rewards = [RewardTerm(function=only_some)]
        data = make_data(prompts_path, rewards=rewards, dynamic_sampling=dynamic_sampling)
        trainer.fit(make_module(policy_path), data)
        return recorder, trainer.callback_metrics

    def has_signal(batch: RolloutBatch) -> bool:
        _, deviation, _ = group_statistics(batch.rewards, batch.groups)
        return bool((deviation > 0).all())

    plain, _ = run(None)
    filtered, metrics = run(DynamicSampling(max_rounds=6))
    assert all(len(batch) == 16 for batch in (*plain.batches, *filtered.batches))
    assert not all(map(has_signal, plain.batches))
    assert all(map(has_signal, filtered.batches))
    assert all(len(batch.groups.unique()) == 4 for batch in filtered.batches)
    assert metrics["rollout/groups_drawn"] > 4
    assert metrics["rollout/groups_without_signal_kept"] == 0
    assert filtered.calls.count("start") == filtered.calls.count("end") == 3  # once an iteration, however many rounds
    assert len(filtered.rollouts[-1]) == metrics["rollout/groups_drawn"] * 4
    assert len({rollout.group for rollout in filtered.rollouts[-1]}) == metrics["rollout/groups_drawn"]


def test_iteration_is_filled_up_when_no_group_has_a_signal(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    data = make_data(
        prompts_path,
        rewards=[RewardTerm(function=lambda prompt, response, row: 1.0, name="one")],
        dynamic_sampling=DynamicSampling(max_rounds=2),
    )
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(make_module(policy_path), data)
    assert trainer.callback_metrics["rollout/groups_without_signal_kept"] == 4
    assert trainer.callback_metrics["rollout/groups_drawn"] == 8


def test_every_second_of_an_iteration_is_accounted_for(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    class WallClock(RolloutCallback):
        def __init__(self) -> None:
            self.spans: list[tuple[float, float]] = []  # before and after an account is closed
            self.accounts: list[dict[str, float]] = []

        def on_validation_end(self, trainer, pl_module):  # type: ignore[no-untyped-def]
            self.before = time.perf_counter()

        def on_iteration_end(self, trainer, pl_module, iteration, metrics):  # type: ignore[no-untyped-def]
            self.spans.append((self.before, time.perf_counter()))
            self.accounts.append({n: v for n, v in metrics.items() if n.startswith("time/")})

        def on_rollout_scored(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
            time.sleep(0.05)

    clock = WallClock()
    trainer = make_trainer(tmp_path, clock, max_epochs=4, limit_val_batches=1.0, check_val_every_n_epoch=1)
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    for account, (begin, end) in zip(clock.accounts[1:], pairwise(clock.spans), strict=True):
        total = account.pop("time/iteration")
        assert end[0] - begin[1] <= total <= end[1] - begin[0]
        assert sum(account.values()) == pytest.approx(total, rel=1e-3)
        assert account["time/other"] > 0.05
        assert {"time/sync", "time/rollout", "time/reward", "time/logprobs", "time/update", "time/validate"} <= set(
            account
        )


def test_one_update_needs_no_pass_before_it(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    """With one optimizer step an iteration the log-prob pass is left out, and the weights come out the same."""

    class ScoredGRPO(GRPO):
        needs_old_logps = True

    recorders, results = [Recorder(), Recorder()], []
    for recorder, objective in zip(recorders, (GRPO(), ScoredGRPO()), strict=True):
        L.seed_everything(11)
        # Not Adam, which makes a step of its learning rate's size out of the rounding of a gradient near zero.
        module = make_module(policy_path, objective=objective, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        trainer = make_trainer(tmp_path, recorder)
        trainer.fit(module, make_data(prompts_path, num_minibatches=1))
        results.append((weights(module), trainer.callback_metrics["mismatch/kl"].item()))
    assert all(batch.old_logps is None for batch in recorders[0].batches)
    assert all(batch.old_logps is not None for batch in recorders[1].batches)
    for name, tensor in results[0][0].items():
        torch.testing.assert_close(tensor, results[1][0][name], atol=1e-6, rtol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-6)


def test_a_broken_update_ends_the_run_before_a_checkpoint_holds_it(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    class Breaking(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.current_epoch == 1:
                next(pl_module.policy.parameters()).data.fill_(math.nan)

    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = make_trainer(tmp_path, Breaking(), checkpoints, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="`train/loss` is nan in iteration 2"):
        trainer.fit(make_module(policy_path), make_data(prompts_path))
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0.ckpt"]


class Watched(TransformersEngine):
    """Remembers the seed and the sampling of each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, Sampling]] = []

    def generate(self, requests, sampling, *, seed, on_progress=None):  # type: ignore[no-untyped-def]
        self.asked.append((seed, sampling))
        return super().generate(requests, sampling, seed=seed, on_progress=on_progress)


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


def test_held_out_prompts_are_needed_to_validate_and_not_to_fit(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path), make_data(prompts_path, val=None))
    with pytest.raises(MisconfigurationException, match=r"`data\.val` is not set"):
        make_trainer(tmp_path).validate(make_module(policy_path), make_data(prompts_path, val=None))


def test_policy_and_critic_are_clipped_apart(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    norms: list[list[float]] = []

    class Norms(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            loss = closure()
            norms.append(
                [float(torch.nn.utils.get_total_norm([p.grad for p in g["params"]])) for g in self.param_groups]
            )
            return loss

    module = make_module(
        policy_path, objective=PPO(), critic=CriticConfig(lr=1e-3), optimizer=lambda p: Norms(p, lr=0.1)
    )
    trainer = make_trainer(tmp_path, max_epochs=1, gradient_clip_val=1e-3)
    trainer.fit(module, make_data(prompts_path))
    for policy, critic in norms:
        assert policy == pytest.approx(1e-3, rel=1e-2)
        assert critic == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_the_step_that_breaks_the_policy_is_noticed_before_a_checkpoint_holds_it(
    value: float, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    class Breaking(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.current_epoch == 1 and trainer.is_last_batch:
                next(pl_module.policy.parameters()).data.fill_(value)

    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = make_trainer(tmp_path, Breaking(), checkpoints, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match=r"`norm of the weights` is (nan|inf) in iteration 2"):
        trainer.fit(make_module(policy_path), make_data(prompts_path))
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0.ckpt"]


def test_a_masked_span_shortens_nothing(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []

    class Mask(RolloutCallback):
        def on_rollout_scored(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
            batch.response_mask[:, 2:5] = 0.0  # what a tool wrote, for instance
            self.left = batch.response_mask.sum()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # type: ignore[no-untyped-def]
            seen.extend((float(part.response_mask.sum()), part.num_loss_tokens) for part in batch)

    mask = Mask()
    make_trainer(tmp_path, mask, max_epochs=1).fit(make_module(policy_path), make_data(prompts_path, num_minibatches=1))
    assert sum(tokens for tokens, _ in seen) == mask.left == seen[0][1]


def test_a_critic_with_tied_embeddings_keeps_learning_them(policy_path: str) -> None:
    critic = Critic(CriticConfig(path=policy_path), 64)
    assert causal_lm(critic.trunk).get_input_embeddings().weight.requires_grad


def test_accumulation_by_the_trainer_is_refused_whenever_it_begins(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    class Change(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.accumulate_grad_batches = 1 + 2 * trainer.current_epoch

    for callback in (GradientAccumulationScheduler({0: 1, 7: 3}), Change()):
        with pytest.raises(MisconfigurationException, match=r"accumulate_grad_batches=3\)` has to be 1"):
            make_trainer(tmp_path, callback).fit(make_module(policy_path), make_data(prompts_path))


def test_a_scheduler_that_follows_a_metric_names_it(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return ReduceLROnPlateau(optimizer, monitor="train/grad_norm", mode="min", patience=0, threshold=1e9)

    module = make_module(policy_path, lr_scheduler=plateau)
    fit(policy_path, prompts_path, tmp_path, module=module, max_epochs=3)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] < 3e-3
    module = make_module(policy_path, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(MisconfigurationException, match=r"lightning\.pytorch\.cli\.ReduceLROnPlateau"):
        fit(policy_path, prompts_path, tmp_path, module=module)


def test_held_out_metrics_before_training_and_after_iterations_go_together(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, limit_val_batches=1.0, num_sanity_val_steps=-1, check_val_every_n_epoch=1, max_epochs=2
    )
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    assert {"val/accuracy", "val/reward", "reward/mean"} <= trainer.callback_metrics.keys()


def test_filters_of_the_distribution_are_warned_of(
    policy_path: str, prompts_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_data(prompts_path, sampling=Sampling(max_tokens=4, top_k=5))
    make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path), data)
    assert "`top_k` 5) cuts the distribution" in caplog.text
