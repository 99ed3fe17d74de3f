"""Run by data/test_early_scoring.py, once per rank: rank 1 writes on while rank 0 scores, or waits, in its idle window.

Nothing depends on the clock. In mode `early` rank 1 ends once rank 0 has made two passes, and in mode `late` once
rank 0's callback has the window, which it holds until that closes.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.support.rl_runs import make_data, make_trainer, weights
from tlt_lightning import CriticConfig, RLModule, RolloutCallback
from tlt_lightning.hidden_states import HiddenStateRequest
from tlt_lightning.objectives import PPO
from tlt_lightning.objectives.kl import KLPenalty
from tlt_lightning.training.networks import Scoring

NUM_PASSES = 2


class Watched(RLModule):
    """Leaves an idle window after `NUM_PASSES` passes, and says so."""

    out: Path
    num_tokens = 0  # of all passes that were made

    def begin_scoring(self, *args: Any, **kwargs: Any) -> Scoring:
        scoring: Any = super().begin_scoring(*args, **kwargs)
        run, path = scoring.run, self.out / f"idle{self.current_epoch}"

        def watched(is_open: Callable[[], bool] | None = None) -> int:
            left = iter(range(NUM_PASSES))
            num_tokens = run() if is_open is None else run(lambda: is_open() and next(left, None) is not None)
            self.num_tokens += num_tokens
            if is_open is not None:
                path.touch()
            return num_tokens

        scoring.run = watched
        return scoring


class Observer(RolloutCallback):
    def __init__(self, out: Path, is_early: bool) -> None:
        self.out, self.is_early = out, is_early
        self.rows: list[dict[str, float]] = []
        self.stages: list[list[list[str]]] = []
        self.seen = hashlib.sha256()

    def on_engine_setup(self, trainer, pl_module, engine):
        pl_module.hidden_state_request = HiddenStateRequest((1, 2), max_tokens=100_000)

    def on_rollout_progress(self, trainer, pl_module, progress):
        while trainer.global_rank == 1 and not (self.out / f"idle{trainer.current_epoch}").exists():
            time.sleep(0.005)

    def on_rollout_idle(self, trainer, pl_module, window):
        if not self.is_early:
            (self.out / f"idle{trainer.current_epoch}").touch()
            while window.is_open():
                time.sleep(0.005)

    def on_rollout_scored(self, trainer, pl_module, batch):
        self._note(batch.old_logps, batch.ref_logps, batch.values, batch.rewards)

    def on_hidden_states(self, trainer, pl_module, texts):
        self._note(*(text.states for text in texts))

    def on_iteration_end(self, trainer, pl_module, iteration, metrics):
        self.rows.append(metrics)
        self.stages.append([[stage for stage, _ in laps] for laps in pl_module.iteration_log.laps_by_rank])

    def _note(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.seen.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def main(policy: str, prompts: str, out: str, mode: str) -> None:
    L.seed_everything(3)
    objective = PPO(loss_kl=KLPenalty(coef=0.1))
    module = Watched(policy, objective, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3), critic=CriticConfig())
    module.out = Path(out)
    observer = Observer(Path(out), mode == "early")
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(Path(out), observer, devices=2, strategy=strategy)
    trainer.fit(module, make_data(prompts, val=None, micro_batch_tokens=40))
    state = {
        "rows": observer.rows,
        "stages": observer.stages,
        "seen": observer.seen.hexdigest(),
        "num_tokens": module.num_tokens,
    }
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(state))
    torch.save(weights(module), Path(out) / f"weights{trainer.global_rank}.pt")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
