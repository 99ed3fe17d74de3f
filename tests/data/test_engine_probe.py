"""A run whose engine does not compute with the policy's weights stops at its first responses."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.conftest import save_policy
from tests.support.architectures import save_architecture
from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.rl_runs import make_data, make_engine, make_module, make_trainer
from tlt_lightning import FixedSelector, LoRA, RolloutCallback, VLLMEngine
from tlt_lightning.data.engine_probe import EngineProbe, compared
from tlt_lightning.engine.vllm import engine as engine_module
from tlt_lightning.engine.vllm.patches import cpu_experts, finite_drafts, patched
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.objectives import GRPO
from tlt_lightning.rollout import Prompt, Response, Rollout, Sampling


class DropoutOn(L.Callback):
    """Turns on a dropout within the layers."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for layer in pl_module.policy.model.layers:
            layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.3))


def test_dropout_that_a_callback_turns_on_stops_the_run(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DropoutOn())
    with pytest.raises(RuntimeError, match=r"After the first sync .* 0\.005 on average .*TransformersEngine"):
        trainer.fit(make_module(policy_path), make_data(prompts_path))


@pytest.mark.parametrize("num_hosts", [1, 12])
def test_groups_are_compared_before_siblings_as_an_engine_writes_whole_groups(num_hosts: int) -> None:
    response = Response(0, [1], [-1.0], "stop", (0,))
    rollouts = [Rollout(Prompt("", [3] * (i // 8 + 1)), response, "", group=i // 8) for i in range(64)]
    groups = [rollout.group for rollout in compared(rollouts, num_hosts)]
    assert groups == [*range(8), 0, 1, 2, 3][: max(8, num_hosts)]


@pytest.mark.parametrize(("objective", "warns"), [(GRPO(correction=None), True), (GRPO(), False)])
def test_eight_bit_without_a_correction_is_warned_of(
    objective: GRPO,
    warns: bool,
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    engine.compute_dtype = "fp8"
    make_trainer(tmp_path, max_epochs=1).fit(
        make_module(policy_path, objective=objective), make_data(prompts_path, engine=engine)
    )
    assert ("the objective corrects for nothing" in caplog.text) is warns


@pytest.mark.vllm
def test_experts_that_a_sync_leaves_wrong_stop_the_run(
    prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "patched", lambda without: patched(without=(*without, cpu_experts.PATCH)))
    policy = save_architecture("qwen3_moe", tmp_path / "policy")
    trainer = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match=r"After the first sync .* the engine does not compute with the policy's"):
        trainer.fit(make_module(policy), make_data(prompts_path, engine=make_engine("vllm")))


class Counted(EngineProbe):
    """Keeps the versions of the drafter at which it compared."""

    versions: tuple[int, ...] = ()

    def check(self, trainer, engine, rollouts, sampling) -> bool:  # type: ignore[no-untyped-def]
        if compared := super().check(trainer, engine, rollouts, sampling):
            self.versions += (engine.drafter_version,)
        return compared


def test_a_run_is_looked_at_once_and_again_after_its_first_drafter(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_lightning.data.module.EngineProbe", Counted)
    data = make_data(prompts_path)

    class Push(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            data.engine.drafter_version = trainer.current_epoch - 1

    make_trainer(tmp_path, Push(), max_epochs=4).fit(make_module(policy_path), data)
    assert data._probe.versions == (-1, 0)


def test_seconds_of_the_comparison_are_not_the_rewards(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    class Watch(RolloutCallback):
        before_rewards: tuple[str, ...] = ()

        def on_iteration_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            stages = [stage for stage, _ in pl_module.iteration_log.laps_by_rank[0]]
            self.before_rewards += (stages[stages.index("reward") - 1],)

    watch = Watch()
    make_trainer(tmp_path, watch).fit(make_module(policy_path), make_data(prompts_path))
    assert watch.before_rewards == ("logprobs", "sync")


@pytest.mark.vllm
def test_a_lora_policy_learns_from_8_bit_rollouts_and_says_what_the_correction_leaves(
    policy_path: str, prompts_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"kv_cache_gib": 0.0625, "max_num_seqs": 32, "enforce_eager": True}
    engine = VLLMEngine(dtype="bfloat16", quantization="fp8", **settings)
    trainer = make_trainer(tmp_path, max_epochs=2)
    module = make_module(policy_path, lora=LoRA(rank=4, alpha=64), objective=GRPO(correction=None))
    with caplog.at_level(logging.WARNING):
        trainer.fit(module, make_data(prompts_path, engine=engine))
    assert "writes in fp8, and the objective corrects for nothing" in caplog.text
    assert engine.policy_version == -1  # closed
    assert 1e-4 < trainer.callback_metrics["mismatch/kl"] < 0.1
    assert "mismatch/effective_sample_size" not in trainer.callback_metrics


@pytest.mark.vllm
@pytest.mark.parametrize("is_repaired", [True, False])
def test_tokens_that_nobody_drew_are_a_surprise(
    is_repaired: bool,
    prompts_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head that overflows makes vLLM write token 0, unless it is repaired; no other metric shows that."""
    if not is_repaired:
        monkeypatch.setattr(engine_module, "patched", lambda without: patched(without=(*without, finite_drafts.PATCH)))
    policy = str(save_policy(tmp_path / "policy", num_hidden_layers=4))  # peaked: token 0 is unlikely
    head = make_head(policy, seed=3)
    with torch.no_grad():
        head.norm.weight.fill_(3e38)
    speculation = Speculation(
        selector=FixedSelector(3), head=save_head(head, tmp_path / "head"), draft_sampling="probabilistic"
    )
    engine = VLLMEngine(
        dtype="float32", kv_cache_gib=0.0625, max_num_seqs=32, enforce_eager=True, speculation=speculation
    )
    trainer = make_trainer(tmp_path, max_epochs=1)
    with caplog.at_level(logging.WARNING):
        trainer.fit(make_module(policy), make_data(prompts_path, engine=engine, sampling=Sampling(max_tokens=48)))
    assert ("`mismatch/surprise` is " in caplog.text) is not is_repaired
    assert trainer.callback_metrics["mismatch/kl"] < 1e-4
