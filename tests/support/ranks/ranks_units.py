"""Run by tests/sharding/test_units.py, once per rank: passes of sharded models beside those of whole ones."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.test_policy import make_batch
from tlt_lightning.adapters import LoRA
from tlt_lightning.objectives import Divergence
from tlt_lightning.policy import PolicyWeights, causal_lm, load_policy, response_logps
from tlt_lightning.sharding.units import Sharding, named_units, total_norm
from tlt_lightning.training.critic import Critic, CriticConfig
from tlt_lightning.training.networks import Reference


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of all ranks, averaged, as an optimizer gets them."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = whole(parameter.grad)
            if not isinstance(parameter.grad, DTensor):
                dist.all_reduce(found[name])
                found[name] /= dist.get_world_size()
    return found


def is_apart(model: nn.Module) -> bool:
    """Nothing is left whole after a pass."""
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def compare(
    path: str, taught_by: str, sharding: Sharding, lora: LoRA | None, checkpointed: bool, trunk: str | None
) -> None:
    batch = make_batch([3, 5], [4, 2 + 3 * dist.get_rank()])  # ranks have different numbers of tokens
    results: list[tuple[Any, ...]] = []
    for each in (None, sharding):
        torch.manual_seed(0)
        policy = load_policy(path, lora=lora, sharding=each)
        critic, reference = Critic(CriticConfig(path=trunk), 64, each), Reference(path, "sdpa", each)
        if checkpointed:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if lora is not None:
                policy.enable_input_require_grads()
        with torch.no_grad():
            scored = reference.logps(policy, batch)
            critic(batch, *response_logps(policy, batch)[3:])
            assert each is None or all(is_apart(model) for model in (policy, reference.model, critic))
        teacher = Reference(taught_by, "sdpa", each)
        heard = teacher.teach(batch, Divergence(beta=0.5))
        assert each is None or is_apart(teacher.model)
        # Chunks of two: ranks have different numbers of them.
        tokens = response_logps(policy, batch, chunk_size=2, teacher=heard)
        values = critic(batch, tokens.states, tokens.places)
        (tokens.divergence.sum() + tokens.logps.sum() + tokens.entropy.sum() + (values - 1).square().sum()).backward()
        found = {**gradients(policy), **{f"critic.{name}": each for name, each in gradients(critic).items()}}
        assert each is None or (is_apart(policy) and is_apart(critic))
        norm = total_norm([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
        streamed = {name: tensor.clone() for name, tensor in PolicyWeights(policy)}
        assert PolicyWeights(policy).shapes == {name: tensor.shape for name, tensor in streamed.items()}
        results.append((scored, tokens.logps.detach(), tokens.divergence.detach(), values.detach(), found, streamed))
        if each is not None:
            total = torch.stack([value.norm() for name, value in found.items() if "critic." not in name]).norm()
            torch.testing.assert_close(norm, total)
            assert len(named_units(causal_lm(policy))) == 3  # two layers, and the rest
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)


def main(tied: str, untied: str, out: str) -> None:
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), 4
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    flat = dist.init_device_mesh("cpu", (num_ranks,))
    compare(tied, untied, Sharding(flat), None, checkpointed=False, trunk=tied)
    compare(untied, tied, Sharding(flat), LoRA(rank=4), checkpointed=True, trunk=untied)
    hybrid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(untied, tied, Sharding(hybrid), None, checkpointed=True, trunk=None)  # the critic is on the policy's
    (Path(out) / f"passed{rank}").touch()
    dist.destroy_process_group()
