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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import PreTrainedTokenizerBase

from tests.support.rl_runs import (
    Recorder,
    fit,
    make_and_load,
    make_data,
    make_engine,
    make_module,
    make_trainer,
    weights,
)
from tests.test_policy import make_batch
from tlt_lightning import CriticConfig, LoRA, RolloutCallback, Sampling, TransformersEngine
from tlt_lightning.objectives import GRPO, K3, PPO, KLPenalty, ObjectiveOutput
from tlt_lightning.packed_pass import IS_PACKABLE
from tlt_lightning.policy import causal_lm


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


@pytest.mark.slow
def test_reward_goes_up(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, max_epochs=6)
    data = make_data(prompts_path, prompts_per_iteration=8, group_size=8, num_minibatches=1)
    trainer.fit(make_module(policy_path, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)), data)
    means = [sum(r.reward for r in rollouts) / len(rollouts) for rollouts in recorder.rollouts]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.2


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_an_entropy_bonus_is_learned_from(coef: float, policy_path: str) -> None:
    module = make_module(policy_path, objective=GRPO(entropy_coef=coef))
    module.trainer = make_trainer(Path())
    module.configure_model()
    batch = replace(make_batch([2, 3], [3, 9]), num_loss_tokens=12, num_loss_sequences=2)
    batch.advantages = torch.zeros_like(batch.rollout_logps)  # nothing else to learn from
    module.training_step([batch], 0).backward()
    assert any(bool(parameter.grad.any()) for parameter in module.policy.parameters()) is (coef > 0)


def test_scoring_cuts_by_tokens_and_gives_the_scores_of_each_sequence_alone(policy_path: str) -> None:
    module = make_module(policy_path, objective=GRPO(loss_kl=KLPenalty(coef=0.1, estimator=K3())))
    module.trainer = make_trainer(Path())
    module.configure_model()
    batch = make_batch([2, 3, 2, 3, 2, 2, 2], [3, 40, 6, 5, 1, 20, 2])
    rows = [batch.select([row]) for row in range(7)]
    alone = [module.score(row, 43) for row in rows]
    shapes: list[tuple[int, ...]] = []
    trunk: Any = causal_lm(module.policy).base_model
    trunk.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True)
    together = module.score(batch, 50)
    assert shapes == [(1, 47), (1, 46)]  # the largest first, the reference's passes beside them; no padding
    shapes.clear()
    setattr(trunk, IS_PACKABLE, False)
    module.score(batch, 50)
    assert shapes == [(2, 22), (1, 43), (4, 8)]  # with it
    for row, one in enumerate(alone):
        for name in ("old_logps", "ref_logps"):
            expected = getattr(one, name)[0]
            torch.testing.assert_close(getattr(together, name)[row, : len(expected)], expected, atol=1e-5, rtol=1e-5)


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


@pytest.mark.slow
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
    last_steps = 3e-3 * 0.5**2, 3e-3 * 0.5**3  # of the second iteration
    assert module.trainer.callback_metrics["train/lr"] == pytest.approx(sum(last_steps) / 2)


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


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_data_module_and_engine_read_the_tokenizer_once_each(
    engine: str, policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 150,000 tokens takes more than a second."""
    read, paths = PreTrainedTokenizerBase.from_pretrained.__func__, []

    def noted(cls: type, path: str, *args: Any, **kwargs: Any) -> Any:
        paths.append(path)
        return read(cls, path, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(noted))
    make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path), make_data(prompts_path, make_engine(engine)))
    assert paths == [policy_path] * 2


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks_at", "value", "message"),
    [
        ("begin", math.nan, "`train/loss` is nan in iteration 2"),
        *(("end", value, r"`norm of the weights` is (nan|inf) in iteration 2") for value in (math.nan, math.inf, 1e30)),
    ],
)
def test_a_broken_update_ends_the_run_before_a_checkpoint_holds_it(
    breaks_at: str, value: float, message: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    class Breaking(L.Callback):
        def break_in(self, at: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1 and at == breaks_at:
                next(pl_module.policy.parameters()).data.fill_(value)

        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            self.break_in("begin", trainer, pl_module)

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.is_last_batch:
                self.break_in("end", trainer, pl_module)

    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = make_trainer(tmp_path, Breaking(), checkpoints, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match=message):
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


def test_a_scheduler_that_follows_a_metric_names_it(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return ReduceLROnPlateau(optimizer, monitor="train/grad_norm", mode="min", patience=0, threshold=1e9)

    module = make_module(policy_path, lr_scheduler=plateau)
    fit(policy_path, prompts_path, tmp_path, module=module, max_epochs=3)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] < 3e-3
    module = make_module(policy_path, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(MisconfigurationException, match=r"lightning\.pytorch\.cli\.ReduceLROnPlateau"):
        fit(policy_path, prompts_path, tmp_path, module=module)
