"""Loggers of one run, read back from their files: CSV, TensorBoard, Weights & Biases offline, MLflow's file store."""

import csv
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning.gallery.completions_table import COLUMNS, CompletionsTable

# MLflow, TensorBoard and Weights & Biases are loaded where they are used: they take seconds.
pytestmark = pytest.mark.slow

Steps = list[dict[str, float]]
"""Metrics of each iteration."""


@pytest.fixture(scope="module")
def run(policy_path: str, prompts_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two iterations with all loggers and the table of completions."""
    root = tmp_path_factory.mktemp("loggers")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # asked for since MLflow 3.17, which would rather have a database
    loggers = [
        CSVLogger(root, name="csv"),
        TensorBoardLogger(root, name="tensorboard"),
        wandb := WandbLogger(save_dir=root, offline=True),
        MLFlowLogger(tracking_uri=f"file:{root}/mlflow"),
    ]
    trainer = make_trainer(root, CompletionsTable(str(root / "table"), num_samples=3), logger=loggers)
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    wandb.experiment.finish()
    return root


def records(file: Path) -> Iterator[Any]:
    """Read a `.wandb` file: LevelDB's log format after seven bytes of header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block, position, parts = file.read_bytes(), 32768, 7, b""
    while position < len(data):
        if block - position % block < 7:  # a record's head is not split; the rest of the block is padding
            position += block - position % block
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def items(record: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record}


def read_wandb(root: Path) -> tuple[Steps, list[Any]]:
    (file,) = root.glob("wandb/offline-run-*/run-*.wandb")
    rows = [items(record.history.item) for record in records(file) if record.HasField("history")]
    tables = [row["completions/path"] for row in rows if "completions/path" in row]
    tables = [json.loads((file.parent / "files" / table).read_text()) for table in tables]
    return [row for row in rows if "reward/mean" in row], tables


def mlflow_run(root: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"file:{root}/mlflow")
    experiment = client.get_experiment_by_name("lightning_logs")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def read_mlflow(root: Path) -> tuple[Steps, list[Any]]:
    client, run = mlflow_run(root)
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    steps = [{name: points[i].value for name, points in history.items() if len(points) == 2} for i in range(2)]
    return steps, [json.loads(Path(client.download_artifacts(run.info.run_id, "completions.json")).read_text())]


def read_csv(root: Path) -> Steps:
    with open(root / "csv/version_0/metrics.csv") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def read_tensorboard(root: Path) -> tuple[Steps, int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "tensorboard/version_0")).Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    steps = [{name: points[i].value for name, points in scalars.items() if len(points) == 2} for i in range(2)]
    return steps, len(events.Tensors("completions/text_summary"))


def test_every_logger_has_the_metrics_and_the_completions_of_every_iteration(run: Path) -> None:
    expected = read_csv(run)
    assert [step["step"] for step in expected] == [0, 1]
    tensorboard, num_texts = read_tensorboard(run)
    wandb, wandb_tables = read_wandb(run)
    mlflow, (mlflow_table,) = read_mlflow(run)
    for steps in (tensorboard, wandb, mlflow):
        assert len(steps) == 2
        for step, row in zip(steps, expected, strict=True):
            names = {name for name in row if "/" in name}
            assert "rollout/length_p50" in names
            assert {name: step[name] for name in names} == pytest.approx({n: row[n] for n in names}, rel=1e-6)

    written = [json.loads(line) for file in sorted((run / "table").iterdir()) for line in file.read_text().splitlines()]
    cells = [[row[column] for column in COLUMNS] for row in written]
    assert len(cells) == 6
    assert num_texts == 2
    assert [table["columns"] for table in wandb_tables] == [COLUMNS] * 2
    assert [row for table in wandb_tables for row in table["data"]] == cells
    assert [row[: len(COLUMNS)] for row in mlflow_table["data"]] == cells


def test_every_logger_has_the_configuration(run: Path, policy_path: str) -> None:
    """CSV and TensorBoard keep it as YAML, Weights & Biases in its file, MLflow flat and as text."""
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    updates = [items(record.config.update) for record in records(file) if record.HasField("config")]
    for config in (
        yaml.safe_load((run / "csv/version_0/hparams.yaml").read_text()),
        yaml.safe_load((run / "tensorboard/version_0/hparams.yaml").read_text()),
        {name: value for update in updates for name, value in update.items()},
    ):
        assert config["policy"] == policy_path
        assert config["objective"]["class_path"].endswith(".GRPO")
        assert (config["group_size"], config["sampling"]["max_tokens"]) == (4, 8)
    _, mlflow = mlflow_run(run)
    assert mlflow.data.params["policy"] == policy_path
    assert mlflow.data.params["objective/class_path"].endswith(".GRPO")
    assert (mlflow.data.params["group_size"], mlflow.data.params["sampling/max_tokens"]) == ("4", "8")
