"""Train with weights, gradients and optimizer sharded over the ranks: `Trainer(strategy="fsdp2")`."""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from tlt_lightning.ranks.reduce import largest_over_ranks
from tlt_lightning.sharding.rows import Rows, sharded_as
from tlt_lightning.sharding.units import Sharding
from tlt_lightning.training.micro_batches import LargestCounts


class FSDP2Strategy(ModelParallelStrategy):
    """Shards policy, critic and reference over all ranks; Lightning's own would split them as tensors by default.

    Args:
        timeout: Longest time a collective may take.
    """

    def __init__(self, timeout: timedelta | None = default_pg_timeout) -> None:
        super().__init__(timeout=timeout)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_shards, 1
        super().setup_environment()

    @property
    def num_shards(self) -> int:
        """Ranks that hold a weight's rows together."""
        return self.num_nodes * self.num_processes

    @property
    def sharding(self) -> Sharding:
        """The ranks that shard."""
        return Sharding(self.device_mesh["data_parallel"], is_half=self.precision_plugin.precision == "bf16-mixed")

    # Checkpoints: as every other strategy's, but for the shards, which `guard.parts` and `guard.shards` write and read

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # models are sharded before it

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return Strategy.lightning_module_state_dict(self)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return Strategy.optimizer_state(self, optimizer)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        options: dict[str, Any] = {"weights_only": weights_only, "as_rows": True}
        return self.checkpoint_io.load_checkpoint(checkpoint_path, **options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        alike, saved = self.lightning_module.state_dict(), checkpoint["state_dict"]
        state = {name: _sharded(value, alike.get(name)) for name, value in saved.items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                number: {name: _sharded(value, parameters[number]) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def _sharded(value: Any, like: Tensor | None) -> Any:
    """Return a tensor of the shape of `like` sharded as that is, and all else as it is."""
    is_alike = isinstance(value, Rows) or (isinstance(value, Tensor) and like is not None and value.shape == like.shape)
    return sharded_as(value, like) if is_alike and isinstance(like, DTensor) else value


def run_sharding(trainer: L.Trainer) -> Sharding | None:
    """Return how a run shards its models; None where each rank has them whole."""
    return trainer.strategy.sharding if isinstance(trainer.strategy, FSDP2Strategy) else None


def run_shards(trainer: L.Trainer) -> bool:
    """Return True if a run shards its models, and each pass over one is a collective."""
    return isinstance(trainer.strategy, FSDP2Strategy)


def largest_counts(trainer: L.Trainer) -> LargestCounts | None:
    """Return how ranks learn the largest number of passes, where all make as many; None where each has its own."""
    return partial(largest_over_ranks, trainer) if run_shards(trainer) else None


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all ranks")
