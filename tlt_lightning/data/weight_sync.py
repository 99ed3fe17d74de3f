"""Keep the engine's weights equal to the policy's."""

import lightning as L
import torch
from torch import nn

from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.sharding.units import local
from tlt_lightning.training.fsdp2 import run_shards


class WeightSync:
    """Gives the engine the policy's weights whenever anybody has changed them.

    The optimizer's steps do not tell: callbacks, too, swap weights for a validation (`EMAWeightAveraging`) and back.

    Args:
        engine: What rolls out.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._fingerprint: tuple[int, ...] = ()

    def sync(self, trainer: L.Trainer, num_requests: int = 1) -> None:
        """Bring the engine up to date; the version of the weights is the number of optimizer steps.

        `num_requests` are those that the rollout begins with.
        Ranks that shard the policy, or are one engine, do so together: each may see changes of its own rows alone.
        """
        module, version = trainer.lightning_module, trainer.global_step
        found = fingerprint(module)
        is_current = self.engine.policy_version == version and found == self._fingerprint
        if run_shards(trainer) or self.engine.num_ranks > 1:
            is_current = trainer.strategy.reduce_boolean_decision(is_current, all=True)
        if is_current:
            return
        self._fingerprint = ()  # a sync that fails leaves weights that are nobody's
        self.engine.update_weights(module.policy_weights(), version)  # type: ignore[operator]
        self.engine.policy_version = version  # also of an engine that does not note it: responses say what wrote them
        self._fingerprint = found
        self.engine.warm_up(num_requests)
        call_rollout_hook(trainer, "on_weights_synced", version)


def fingerprint(module: nn.Module) -> tuple[int, ...]:
    """Return a hash of the bits that this rank has of each parameter, which sees changes to `tensor.data`, too."""
    rows = (local(parameter.detach()) for parameter in module.parameters())
    hashes = [torch.hash_tensor(tensor) for tensor in rows if tensor.numel()]
    return tuple(torch.stack(hashes).tolist()) if hashes else ()
