"""Adam in one pass over the memory: where, and that each kind goes on from the other; learning rates that move."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.rl_runs import NeverLoaded, make_data, make_module, make_trainer
from tlt_lightning.sharding.units import total_norm
from tlt_lightning.training.lr_schedule import WarmupCosine, with_schedule
from tlt_lightning.training.optimization import ResumedOptimizer, clip_networks, fuse_adam, fuse_on_gpu, settings_of


def adamw(parameter: nn.Parameter, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1, **options)


def learn(optimizer: torch.optim.Optimizer) -> None:
    (weight,) = optimizer.param_groups[0]["params"]
    for number in range(3):
        weight.grad = torch.tensor([1.0, -3.0, 0.1 * number])
        if isinstance(weight, DTensor):
            weight.grad = distribute_tensor(weight.grad, weight.device_mesh, weight.placements)
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": False}], ids=str)
def test_adam_is_fused_unless_its_settings_say_how_and_goes_on_from_one_that_was_not(options: dict[str, Any]) -> None:
    first, second = (adamw(nn.Parameter(torch.ones(3)), **options) for _ in range(2))
    learn(first)
    learn(second)
    fuse_adam(second, torch.device("cpu"))
    assert second.param_groups[0]["fused"] is (options.get("fused", None if options else True))
    learn(first)
    learn(second)
    torch.testing.assert_close(second.state_dict()["state"], first.state_dict()["state"])
    torch.testing.assert_close(second.param_groups[0]["params"], first.param_groups[0]["params"])


@pytest.fixture
def shards() -> Iterator[nn.Parameter]:
    """A parameter of three numbers as FSDP2 leaves it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield nn.Parameter(distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Shard(0)]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_saved_fused", [False, True])
def test_a_sharded_adam_goes_on_from_either_kind(is_saved_fused: bool, shards: nn.Parameter) -> None:
    plain, saved = (adamw(nn.Parameter(torch.ones(3))) for _ in range(2))
    fused = adamw(shards)
    if is_saved_fused:
        fuse_adam(saved, torch.device("cpu"))
    for optimizer in (plain, saved, fused):
        learn(optimizer)
    state = saved.state_dict()
    mesh, placements = shards.device_mesh, shards.placements
    state["state"][0] |= {
        n: distribute_tensor(state["state"][0][n], mesh, placements) for n in ("exp_avg", "exp_avg_sq")
    }
    fused.load_state_dict(state)
    fuse_adam(fused, torch.device("cpu"))
    assert fused.param_groups[0]["fused"] is True
    learn(plain)
    learn(fused)
    torch.testing.assert_close(shards.full_tensor(), plain.param_groups[0]["params"][0])


def test_adam_is_fused_on_a_gpu_alone_and_other_optimizers_stay_as_they_are() -> None:
    optimizer = adamw(nn.Parameter(torch.ones(3)))
    fuse_on_gpu(optimizer, torch.device("cpu"))
    assert optimizer.param_groups[0]["fused"] is None
    fuse_on_gpu(optimizer, torch.device("cuda"))
    assert optimizer.param_groups[0]["fused"] is True
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    before = settings_of(other)
    fuse_on_gpu(other, torch.device("cuda"))
    assert settings_of(other) == before


def rates(scheduler: WarmupCosine, number: int) -> list[float]:
    """Of the next steps."""
    seen = []
    for _ in range(number):
        seen += scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def test_a_rate_rises_in_a_line_and_falls_along_a_cosine_to_zero() -> None:
    scheduler = WarmupCosine(adamw(nn.Parameter(torch.ones(3))), num_steps=20, warmup_share=0.2)
    seen = rates(scheduler, 22)
    assert seen[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert seen[12] == pytest.approx(0.05)  # half way down
    assert seen[4:20] == sorted(seen[4:20], reverse=True)
    assert 0 < seen[19] < 0.002
    assert seen[20:] == pytest.approx([0, 0])


def test_the_steps_of_the_run_are_told_also_of_one_that_is_resumed() -> None:
    build = lambda optimizer: WarmupCosine(optimizer, warmup_share=0.5)  # noqa: E731
    (optimizer,), (config,) = with_schedule(adamw(nn.Parameter(torch.ones(3))), build, 10.0)
    first = config["scheduler"]
    assert config["interval"] == "step"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 6)
    rates(first, 10)
    (second,), (config,) = with_schedule(adamw(nn.Parameter(torch.ones(3))), build, 20)
    second.load_state_dict(optimizer.state_dict())
    config["scheduler"].load_state_dict(first.state_dict())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)
    assert second.param_groups[0]["lr"] == pytest.approx(0.1)
    for number in (None, float("inf")):
        with pytest.raises(MisconfigurationException, match=r"WarmupCosine needs `num_steps`.*`Trainer\(max_epochs"):
            with_schedule(optimizer, build, number)
    assert with_schedule(optimizer, lambda each: WarmupCosine(each, 5))[1][0]["scheduler"].num_steps == 5


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": lambda groups: [torch.optim.AdamW(groups)]}, "must be an Optimizer, got"),
        ({"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "has no way to name a metric"),
        ({"lr_scheduler": lambda optimizer: {"scheduler": one_cycle(optimizer)}}, "must be a.? LRScheduler, got"),
        ({"lr_scheduler": lambda each: ReduceLROnPlateau(each, "reward/mean")}, "'min', the default.*`reward/mean`"),
        ({"lr_scheduler": lambda each: ReduceLROnPlateau(each, "val/reward")}, "this run has none: set `data.val`"),
    ],
)
def test_what_cannot_move_the_policy_to_the_end_is_refused_before_the_engine_loads(
    arguments: dict[str, Any], message: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises((MisconfigurationException, TypeError, ValueError), match=message):
        trainer.fit(make_module(policy_path, **arguments), make_data(prompts_path, NeverLoaded()))


@pytest.mark.slow
def test_a_plateau_of_held_out_accuracy_is_looked_for_where_it_is_validated(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    seen: list[float] = []

    class Plateau(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: int | None = None) -> None:
            seen.append(float(metrics))

    module = make_module(policy_path, lr_scheduler=lambda each: Plateau(each, "val/reward", mode="max"))
    trainer = make_trainer(tmp_path, max_epochs=5, check_val_every_n_epoch=2, limit_val_batches=1)
    trainer.fit(module, make_data(prompts_path))
    assert len(seen) == 2
    assert seen[-1] == trainer.callback_metrics["val/reward"]


@pytest.mark.parametrize("interval", [3, "00:01:00:00"])
def test_a_plateau_of_held_out_accuracy_needs_validations_of_whole_iterations(
    interval: Any, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    module = make_module(policy_path, lr_scheduler=lambda each: ReduceLROnPlateau(each, "val/reward", mode="max"))
    every = {"check_val_every_n_epoch": None, "val_check_interval": interval, "limit_val_batches": 1}
    with pytest.raises(MisconfigurationException, match=r"ends of iterations.*check_val_every_n_epoch=1\)`"):
        make_trainer(tmp_path, **every).fit(module, make_data(prompts_path, NeverLoaded()))


def test_an_optimizer_may_move_matrices_alone(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    def muon(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([each for group in groups for each in group["params"] if each.ndim == 2])

    make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path, optimizer=muon), make_data(prompts_path))


def test_a_learning_rate_may_be_a_tensor(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    module = make_module(policy_path, optimizer=lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.5)))
    make_trainer(tmp_path, max_epochs=1).fit(module, make_data(prompts_path))
    assert module.hparams["optimizer"]["init_args"]["lr"] == 0.5


def test_a_checkpoint_of_another_optimizer_is_refused_by_name() -> None:
    resumed, parameter = ResumedOptimizer(), nn.Parameter(torch.zeros(2))
    saved = {"optimizer_settings": settings_of(torch.optim.SGD([parameter], lr=0.1))}
    resumed.load(saved, None, is_another=False)
    trainer: Any = SimpleNamespace(optimizers=[adamw(parameter)], lr_scheduler_configs=[])
    with pytest.raises(ValueError, match=r"`optimizer` is no AdamW: it has .*momentum.* and no .*betas"):
        resumed.note(trainer)


@pytest.mark.parametrize("is_added", [True, False])
def test_a_setting_that_another_torch_has_added_or_dropped_ends_no_run(is_added: bool) -> None:
    resumed, optimizer = ResumedOptimizer(), adamw(nn.Parameter(torch.zeros(2)))
    (group,) = saved = settings_of(optimizer)
    if is_added:
        group["of_a_later_torch"] = False
    else:
        del group["maximize"]
    resumed.load({"optimizer_settings": saved}, None, is_another=False)
    trainer: Any = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[])
    resumed.note(trainer)


def test_a_policy_in_two_groups_is_clipped_by_one_norm_and_its_critic_by_another() -> None:
    policy, critic = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(
        [{"params": [policy.weight]}, {"params": [policy.bias]}, {"params": critic.parameters()}]
    )
    for parameter in (*policy.parameters(), *critic.parameters()):
        parameter.grad = torch.full_like(parameter, 7.0)
    clip_networks(optimizer, critic, 1.0, None)
    for network in (policy, critic):
        assert float(total_norm([p.grad for p in network.parameters() if p.grad is not None])) == pytest.approx(1.0)


def test_gradients_are_clipped_by_value_also_where_a_network_has_none() -> None:
    policy, critic = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()])
    policy.weight.grad = torch.full_like(policy.weight, 7.0)
    for network in (critic, None):
        clip_networks(optimizer, network, 1.0, "value")
    assert policy.weight.grad.unique().tolist() == [1.0]
