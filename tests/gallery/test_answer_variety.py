import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import Rollout, RolloutCallback
from tlt_lightning.gallery.answer_variety import AnswerVariety


class SameAnswers(RolloutCallback):
    """Makes every second group's answers equal."""

    def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Sequence[Rollout]) -> None:
        for number, rollout in enumerate(rollouts):
            rollout.text = "the same" if rollout.group % 2 else f"number {number}"


def test_the_share_of_answers_given_once_reaches_logger_and_trainer(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path, name="csv", version=0)
    trainer = make_trainer(tmp_path, SameAnswers(), AnswerVariety(), max_epochs=2, logger=logger)
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    assert trainer.callback_metrics["rollout/variety"] == 0.5
    rows = list(csv.DictReader((tmp_path / "csv/version_0/metrics.csv").open()))
    assert [float(row["rollout/variety"]) for row in rows if row["rollout/variety"]] == [0.5, 0.5]
