"""Run by data/test_tensor_parallel.py, once per rank: two iterations, written by one engine or by one a rank."""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.support.rl_runs import make_data, make_trainer
from tlt_lightning import RLModule, RolloutCallback
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.objectives import GRPO


class Observer(RolloutCallback):
    def __init__(self, dies: bool) -> None:
        self.dies = dies
        self.rollouts: list[tuple[int, list[int], float]] = []

    def on_rollout_progress(self, trainer, pl_module, progress):
        if self.dies and trainer.global_rank == 1 and trainer.current_epoch == 1 and progress.tokens > 8:
            os._exit(3)

    def on_rollout_end(self, trainer, pl_module, rollouts):
        self.rollouts += [(each.prompt.index, list(each.response.token_ids), each.reward) for each in rollouts]


def main(policy: str, prompts: str, out: str, tensor_parallel: str, mode: str, num_ranks: str = "2") -> None:
    L.seed_everything(3)
    engine = VLLMEngine(
        dtype="float32",
        kv_cache_gib=0.0625,
        max_num_seqs=16,
        enforce_eager=True,
        tensor_parallel=int(tensor_parallel),
    )
    data = make_data(prompts, engine, val=None, num_minibatches=1)
    observer = Observer(dies=mode == "die")
    module = RLModule(policy, GRPO(), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    strategy = {"alone": "auto", "fsdp2": "fsdp2"}.get(mode) or DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(Path(out), observer, devices=int(num_ranks), strategy=strategy)
    trainer.fit(module, data)
    weights = {name: float(tensor.double().abs().sum()) for name, tensor in module.policy_weights()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found = {"rollouts": observer.rollouts, "weights": weights, "metrics": metrics}
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))
