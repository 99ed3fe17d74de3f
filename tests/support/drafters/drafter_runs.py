"""Runs of the adaptive drafter on the quickstart's policy, small enough for a test."""

from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning import PromptSource, RewardTerm, RLModule, RolloutCallback, RolloutDataModule, Sampling
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.engine import RolloutEngine, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.long_tail.budget import FixedBudget
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.objectives import GRPO
from tlt_lightning.rewards import countdown
from tlt_lightning.rollout import Request
from tlt_lightning.speculation.strategy import OFF, Strategy, StrategySelector

ASSETS = Path(__file__).parents[3] / "recipes" / "assets" / "countdown"
POLICY = str(ASSETS / "policy")
K3 = Strategy(3)


def fixed() -> ScriptedSelector:
    """Drafts three tokens in every step until it is told otherwise: choices that do not depend on the clock."""
    selector = ScriptedSelector(longest=3)
    selector.script = lambda state: K3
    return selector


def make_engine(selector: StrategySelector, **speculation: Any) -> VLLMEngine:
    choices = Speculation(**{"selector": selector, "cold_head": True, "max_draft_tokens": 3, **speculation})
    return VLLMEngine(
        dtype="float32", kv_cache_gib=0.125, max_num_seqs=32, enforce_eager=True, sleep=False, speculation=choices
    )


def make_data(engine: RolloutEngine, **overrides: Any) -> RolloutDataModule:
    arguments: dict[str, Any] = {
        "rewards": [RewardTerm(function=countdown)],
        "train": PromptSource(path=str(ASSETS / "train.jsonl")),
        "group_size": 4,
        "prompts_per_iteration": 8,
        "micro_batch_tokens": 512,
        "max_prompt_tokens": 32,
        "sampling": Sampling(max_tokens=96),
    }
    return RolloutDataModule(engine=engine, **{**arguments, **overrides})


def make_module() -> RLModule:
    return RLModule(POLICY, GRPO(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4))


def make_callback(
    head: str | None = None,
    lr: float = 7e-3,
    share: float = 0.1,
    draft_vocab_size: int | None = None,
    **arguments: Any,
) -> LongTailIdleCallback:
    drafter = DrafterModule(
        POLICY, head, optimizer=lambda p: torch.optim.AdamW(p, lr=lr), draft_vocab_size=draft_vocab_size
    )
    return LongTailIdleCallback(
        drafter, **{"pack_tokens": 256, "buffer_gib": 0.25, "budget": FixedBudget(share), **arguments}
    )


def make_trainer(root: Path, *callbacks: L.Callback, **overrides: Any) -> L.Trainer:
    arguments: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, L.pytorch.callbacks.Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "default_root_dir": root,
    }
    return L.Trainer(callbacks=list(callbacks), **{**arguments, **overrides})


class Metrics(RolloutCallback):
    """Remembers each iteration's metrics."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        if trainer.callback_metrics:
            self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    on_train_end = on_train_epoch_start


class Greedy(RolloutCallback):
    """Writes greedily with and without drafts once the run is over, with the weights of the last rollout.

    Remembers as `map` which of the policy's tokens the engine's head drafts.
    """

    def __init__(self, selector: ScriptedSelector) -> None:
        self.selector = selector
        self.texts: dict[int, list[list[int]]] = {}
        self.map: torch.Tensor | None = None

    def on_train_end(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        data = trainer.datamodule
        requests = [Request(id=i, prompt_ids=data.train_prompts[i].ids) for i in range(8)]
        for strategy in (OFF, K3):
            self.selector.script = lambda state, strategy=strategy: strategy
            responses = data.engine.generate(requests, Sampling(max_tokens=64, temperature=0), seed=0)
            texts = {response.request_id: list(response.token_ids) for response in responses}
            self.texts[strategy.num_draft_tokens] = [texts[request.id] for request in requests]
        held = data.engine.inspect().speculative_runner.head.draft_id_to_target_id
        self.map = None if held is None else held.detach().clone()
