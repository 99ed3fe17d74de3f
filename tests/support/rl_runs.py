"""Runs of RLModule on a tiny policy, which rolls out by itself unless vLLM is asked for."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from transformers import PreTrainedConfig

from tlt_lightning import (
    PromptSource,
    RewardTerm,
    RLModule,
    RolloutCallback,
    RolloutDataModule,
    Sampling,
    TransformersEngine,
    VLLMEngine,
)
from tlt_lightning.engine import RolloutEngine
from tlt_lightning.objectives import GRPO
from tlt_lightning.rollout import Rollout, RolloutBatch

PreTrainedConfig.__repr__ = object.__repr__  # an eighth of a small run: transformers logs each config that it reads
if not torch.cuda.is_available():  # another seventh: Lightning copies all that is logged, to where it is
    result._ResultMetric.to = result._ResultCollection.to = lambda self, *_, **__: self


class NeverLoaded(TransformersEngine):
    """Fails when it is loaded."""

    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        raise AssertionError("the engine was loaded")


def evenness(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Even numbers among the first eight words: something that differs between responses and can be learned."""
    return sum(word.isdigit() and int(word) % 2 == 0 for word in response.split()[:8]) / 8


class Recorder(RolloutCallback):
    """Remembers what the hooks were given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batches: list[RolloutBatch] = []
        self.rollouts: list[list[Rollout]] = []
        self.versions: list[tuple[int, set[int]]] = []

    def on_rollout_start(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        self.calls.append("start")

    def on_rollout_progress(self, trainer, pl_module, progress):  # type: ignore[no-untyped-def]
        if self.calls[-1] != "progress":
            self.calls.append("progress")

    def on_rollout_idle(self, trainer, pl_module, window):  # type: ignore[no-untyped-def]
        self.calls.append("idle")

    def on_rollout_end(self, trainer, pl_module, rollouts):  # type: ignore[no-untyped-def]
        self.calls.append("end")
        self.rollouts.append(list(rollouts))
        if trainer.training:
            written_by = {version for rollout in rollouts for version in rollout.response.policy_versions}
            self.versions.append((trainer.global_step, written_by))

    def on_rollout_scored(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
        self.calls.append("scored")
        self.batches.append(batch)

    def on_weights_synced(self, trainer, pl_module, version):  # type: ignore[no-untyped-def]
        self.calls.append(f"synced {version}")


def make_engine(name: str = "transformers") -> RolloutEngine:
    if name == "vllm":
        return VLLMEngine(dtype="float32", kv_cache_gib=0.0625, max_num_seqs=32, enforce_eager=True)
    return TransformersEngine()


def make_data(prompts_path: str, engine: RolloutEngine | None = None, **overrides: Any) -> RolloutDataModule:
    arguments: dict[str, Any] = {
        "train": PromptSource(path=prompts_path),
        "val": PromptSource(path=prompts_path),
        "rewards": [RewardTerm(function=evenness)],
        "group_size": 4,
        "prompts_per_iteration": 4,
        "micro_batch_tokens": 64,
        "num_minibatches": 2,
        "max_prompt_tokens": 16,
        "sampling": Sampling(max_tokens=8),
    }
    return RolloutDataModule(engine=engine or make_engine(), **{**arguments, **overrides})


def make_module(policy_path: str, **overrides: Any) -> RLModule:
    arguments: dict[str, Any] = {"objective": GRPO(), "optimizer": lambda p: torch.optim.AdamW(p, lr=3e-3)}
    return RLModule(policy_path, **{**arguments, **overrides})


def make_trainer(root: Path, *callbacks: L.Callback, **overrides: Any) -> L.Trainer:
    arguments: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": root,
    }
    return L.Trainer(callbacks=list(callbacks), **{**arguments, **overrides})


def fit(policy_path: str, prompts_path: str, root: Path, *, module: RLModule | None = None, **trainer: Any) -> RLModule:
    module = module or make_module(policy_path)
    make_trainer(root, **trainer).fit(module, make_data(prompts_path))
    return module


def weights(module: RLModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.policy_weights()}


def make_and_load(policy_path: str) -> dict[str, torch.Tensor]:
    module = make_module(policy_path)
    module.configure_model()
    return weights(module)
