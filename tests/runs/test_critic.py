"""Runs of PPO on a tiny policy: what its critic learns, when the policy stands still."""

from pathlib import Path

import lightning as L
import pytest
import torch

from tests.support.rl_runs import Recorder, make_and_load, make_data, make_module, make_trainer, weights
from tlt_lightning import CriticConfig, LoRA, RolloutCallback
from tlt_lightning.objectives import PPO
from tlt_lightning.policy import causal_lm
from tlt_lightning.training.critic import Critic


@pytest.fixture(autouse=True)
def seed() -> None:
    L.seed_everything(11)


def test_ppo_trains_a_critic_at_its_own_rate(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    module = make_module(policy_path, objective=PPO(), critic=CriticConfig(lr=0.02))
    recorder = Recorder()
    make_trainer(tmp_path, recorder, max_epochs=3).fit(module, make_data(prompts_path))
    assert module.trainer.optimizers[0].param_groups[1]["lr"] == 0.02
    assert not recorder.batches[0].values.any()  # starts from zero
    assert recorder.batches[-1].values.any()
    assert {"train/value_loss", "train/explained_variance"} <= set(module.trainer.callback_metrics)
    assert all(batch.returns is not None for batch in recorder.batches)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_critic_with_tied_embeddings_keeps_learning_them(policy_path: str) -> None:
    critic = Critic(CriticConfig(path=policy_path), 64)
    assert causal_lm(critic.trunk).get_input_embeddings().weight.requires_grad


def test_ppo_without_a_critic_is_refused(policy_path: str) -> None:
    with pytest.raises(ValueError, match="critic"):
        make_module(policy_path, objective=PPO())
