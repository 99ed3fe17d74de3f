import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.gallery.completions_table import CompletionsTable


def make_rollouts(iteration: int) -> list[Any]:
    return [make_rollout(i / 10, text=f"completion {i} of <iteration> {iteration}\nis 1|2") for i in range(10)]


class TableLogger(CSVLogger):
    """A logger with Lightning's `log_table`, as the one for Weights & Biases has it."""

    tables: list[dict[str, Any]]

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        self.tables = [*getattr(self, "tables", []), {"key": key, "columns": columns, "data": data, "step": step}]


def fit(path: Path, callback: CompletionsTable, logger: Any = False) -> None:
    make_trainer(path, [callback], logger=logger).fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts))


def test_writes_a_sample_per_iteration_of_training_only(tmp_path: Path) -> None:
    fit(tmp_path, CompletionsTable(str(tmp_path / "table"), num_samples=4))
    files = sorted((tmp_path / "table").iterdir())
    assert [file.name for file in files] == [f"iteration_0000{i}.jsonl" for i in (1, 2, 3)]
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len(rows) == 4
    assert all("<iteration> 2" in row["response"] and row["iteration"] == 2 for row in rows)
    rewards = [row["reward"] for row in rows]
    assert rewards == sorted(rewards, reverse=True)
    assert len(set(rewards)) == 4


def test_every_n_iterations_skips_the_others(tmp_path: Path) -> None:
    fit(tmp_path, CompletionsTable(str(tmp_path / "table"), every_n_iterations=2))
    assert [file.name for file in (tmp_path / "table").iterdir()] == ["iteration_00002.jsonl"]


def test_tensorboard_gets_text(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="run")
    fit(tmp_path, CompletionsTable(str(tmp_path / "table")), logger)
    events = EventAccumulator(logger.log_dir).Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("completions/text_summary")]
    assert len(texts) == 3
    assert texts[0].startswith("| reward | tokens |")
    assert "of &lt;iteration> 1<br>is 1\\|2" in texts[0]


def test_loggers_with_tables_get_a_table_and_csv_is_left_alone(tmp_path: Path) -> None:
    logger = TableLogger(tmp_path, name="tables")
    callback = CompletionsTable(str(tmp_path / "table"), num_samples=2)
    fit(tmp_path, callback, [logger, CSVLogger(tmp_path, name="csv")])
    assert [table["step"] for table in logger.tables] == [0, 1, 2]
    assert all(table["key"] == "completions" and len(table["data"]) == 2 for table in logger.tables)
    assert all(len(row) == len(table["columns"]) for table in logger.tables for row in table["data"])


@pytest.mark.parametrize("name", ["num_samples", "every_n_iterations"])
def test_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        CompletionsTable("unused", **{name: 0})
