"""Write the completions of `predict` as JSON lines."""

import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override

from tlt_lightning.arguments import folder_of
from tlt_lightning.guard.files import set_aside

log = logging.getLogger(__name__)


class CompletionsWriter(BasePredictionWriter):
    """Writes completions and rewards of `predict` to `completions.jsonl`, one file for each rank.

    Those of an earlier run in the folder are kept in `earlier_0`.

    Args:
        dirpath: Folder of the file.

    Example:
        >>> trainer = L.Trainer(callbacks=[CompletionsWriter("outputs")])  # doctest: +SKIP
    """

    def __init__(self, dirpath: str) -> None:
        super().__init__(write_interval="batch")
        self.dirpath = Path(folder_of("dirpath", dirpath))

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        name = "completions.jsonl" if trainer.world_size == 1 else f"completions.rank{trainer.global_rank}.jsonl"
        if trainer.is_global_zero:
            set_aside(self.dirpath, sorted(self.dirpath.glob("completions*.jsonl")), "completions")
        trainer.strategy.barrier("earlier completions")
        self.dirpath.mkdir(parents=True, exist_ok=True)
        self.path = self.dirpath / name
        self.path.write_text("")
        self.count = 0

    @override
    def write_on_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, prediction: Any, *_: Any) -> None:
        # A lone surrogate has no bytes; what is written in its place is its escape in JSON.
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in prediction)
        self.count += len(prediction)

    @override
    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log.info("Wrote %d completions to %s", self.count, self.path)
