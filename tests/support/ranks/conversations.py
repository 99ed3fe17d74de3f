"""Run by environments/test_two_ranks.py, once per rank: conversations whose environments take their time."""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
from lightning.pytorch.strategies import DDPStrategy

from tests.environments.test_runs import Slowly, settings
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer
from tlt_lightning.environments.limits import TurnLimits


def main(policy: str, prompts: str, out: str) -> None:
    L.seed_everything(3)
    recorder, strategy = Recorder(), DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(Path(out), recorder, devices=2, strategy=strategy, max_epochs=2, limit_val_batches=2)
    data = make_data(prompts, **settings(turns=TurnLimits(tokens=4), environment=Slowly))
    trainer.fit(make_module(policy), data)
    rollouts = [rollout for each in recorder.rollouts for rollout in each]
    state = {
        "turns": [len(rollout.response.turns) for rollout in rollouts],
        "groups": sorted({rollout.prompt.index for rollout in recorder.rollouts[0]}),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(state))
