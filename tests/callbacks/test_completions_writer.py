import json
from pathlib import Path
from typing import Any

import lightning as L

from tests.support.rollout_loop import make_rollout, make_trainer
from tlt_lightning.callbacks.completions_writer import CompletionsWriter

HALF = "half a \ud83d, and é"
"""A text that has no bytes: an answer of JSON may hold it, and a model may write it."""


class Predicts(L.LightningModule):
    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        return [make_rollout(1.0, text=HALF).to_row()]

    def predict_dataloader(self) -> list[int]:
        return [0, 1]


def test_any_text_is_written_and_read_back(tmp_path: Path) -> None:
    make_trainer(tmp_path, [CompletionsWriter(str(tmp_path / "out"))]).predict(Predicts(), return_predictions=False)
    lines = (tmp_path / "out" / "completions.jsonl").read_bytes().decode().splitlines()
    assert [json.loads(line)["response"] for line in lines] == [HALF, HALF]
    assert "and é" in lines[0]


def test_completions_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    earlier = {"completions.jsonl": "one rank\n", "completions.rank1.jsonl": "another of two\n"}
    for name, text in earlier.items():
        (folder / name).write_text(text)
    make_trainer(tmp_path, [CompletionsWriter(str(folder))]).predict(Predicts(), return_predictions=False)
    assert {path.name: path.read_text() for path in (folder / "earlier_0").iterdir()} == earlier
    assert [path.name for path in folder.glob("*.jsonl")] == ["completions.jsonl"]
