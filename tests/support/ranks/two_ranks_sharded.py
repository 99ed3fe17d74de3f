"""Run by test_fsdp2.py, once per rank: a run under a strategy, or the rest of one from a checkpoint, with real vLLM.

Its options are words, of which `ppo` adds a critic with a trunk of its own and a reward model, `judge` beside the run's
folder, and makes two steps of all of an iteration's responses: a number of ranks does not change what they learn from.
With `taught` the policy follows `teacher`, a model there, in bfloat16.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.rl_runs import Recorder, make_data, make_engine, make_module, make_trainer, weights
from tlt_lightning import CriticConfig, LoRA, RewardTerm, RolloutCallback, VLLMEngine
from tlt_lightning.objectives import GRPO, PPO, Distillation
from tlt_lightning.objectives.kl import KLPenalty
from tlt_lightning.rewards import RewardModel


class Save(RolloutCallback):
    """Saves before the second iteration's update."""

    def __init__(self, out: Path, die: bool) -> None:
        self.out, self.die = out, die

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.die and trainer.global_rank == 1:
            os._exit(3)  # while rank 0 waits for its rows

    def on_rollout_scored(self, trainer, pl_module, batch):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.out / "within.ckpt")


def main(
    policy: str, prompts: str, out: str, strategy: str, options: str = "", ckpt_path: str | None = None, *to_load: str
) -> None:
    L.seed_everything(3)
    is_ppo = "ppo" in options
    teacher = str(Path(out).parent / "teacher") if "taught" in options else None
    module = make_module(
        policy,
        objective=PPO() if is_ppo else Distillation() if teacher else GRPO(loss_kl=KLPenalty(coef=0.1)),
        reference=teacher,
        critic=CriticConfig(path=policy, lr=3e-3) if is_ppo else None,
        lora=LoRA(rank=4) if "lora" in options else None,
        gradient_checkpointing="checkpointing" in options,
    )
    recorder = Recorder()
    save = ModelCheckpoint(out, "{epoch}", save_top_k=-1) if is_ppo else Save(Path(out), "die" in options)
    callbacks = [recorder] if ckpt_path else [recorder, save]
    checkpoints = {"enable_checkpointing": is_ppo and not ckpt_path}
    on_gpu = {"accelerator": "gpu", "precision": "bf16-mixed"} if "gpu" in options else {}
    half = {"precision": "bf16-mixed"} if teacher else {}
    engine = VLLMEngine(kv_cache_gib=0.25, enforce_eager=True) if on_gpu else make_engine("vllm")
    ranks = {"strategy": strategy, "devices": 1 if strategy == "auto" else 2}
    trainer = make_trainer(Path(out), *callbacks, gradient_clip_val=0.5, **checkpoints, **ranks, **on_gpu, **half)
    tokens = 64 if os.environ.get("LOCAL_RANK", "0") == "0" else 32  # more passes on rank 1, where it may choose
    overrides: dict[str, Any] = {"micro_batch_tokens": tokens}
    if is_ppo:
        judge = RewardTerm(function=RewardModel(str(Path(out).parent / "judge")))
        overrides |= {"rewards": [judge], "num_minibatches": 1, "inner_epochs": 2}
    trainer.fit(module, make_data(prompts, engine, **overrides), ckpt_path=ckpt_path or None)
    result = {
        "rollouts": [(rollout.response.token_ids, rollout.reward) for each in recorder.rollouts for rollout in each],
        "metrics": module.iteration_metrics,
    }
    if teacher:
        held = next(module._reference.model.parameters())
        result["teacher"] = [str(held.dtype), type(held).__name__]
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))
    torch.save(weights(module), Path(out) / f"weights{trainer.global_rank}.pt")
    trainer.save_checkpoint(Path(out) / "end.ckpt")
    for path in to_load:  # of another strategy
        checkpoint = trainer.strategy.load_checkpoint(path)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        trainer.save_checkpoint(Path(out) / "loaded.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
