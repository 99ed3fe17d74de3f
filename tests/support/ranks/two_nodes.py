"""Run by test_two_nodes.py, once per rank: a run of two nodes with a device each, whatever has started them."""

import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
from lightning.pytorch.strategies import DDPStrategy

from tests.support.rl_runs import Recorder, evenness, make_data, make_module, make_trainer, weights
from tlt_lightning import RLModule


class Fail(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        if trainer.current_epoch and trainer.global_rank:
            raise RuntimeError("the second node is made to fail")


def main(policy: str, prompts: str, out: str, mode: str) -> None:
    L.seed_everything(3)
    module, recorder, strategy = make_module(policy), Recorder(), DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(
        Path(out),
        recorder,
        *([Fail()] if mode == "fail" else []),
        num_nodes=2,
        devices=1,
        strategy=strategy,
    )
    (Path(out) / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
    numbers = count(1)

    def preempted(prompt: str, response: str, row: dict[str, Any]) -> float:
        """Let Slurm preempt the job while rank zero waits for this score in a collective."""
        if trainer.global_rank and next(numbers) == 16 and mode == "preempted":
            time.sleep(1)
            for rank in (0, 1):
                os.kill(int((Path(out) / f"pid{rank}").read_text()), signal.SIGUSR1)
            time.sleep(1)
        return evenness(prompt, response, row)

    try:
        trainer.fit(module, make_data(prompts, rewards=[preempted]))
    finally:
        keep(trainer, module, recorder, Path(out))


def keep(trainer: L.Trainer, module: RLModule, recorder: Recorder, out: Path) -> None:
    """Tell who started the ranks, which prompts this one answered, and its weights."""
    result = {
        "launcher": type(trainer.strategy.cluster_environment).__name__,
        "prompts": [rollout.prompt.index for each in recorder.rollouts for rollout in each],
        "weights": [float(tensor.double().abs().sum()) for tensor in weights(module).values()],
    }
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
