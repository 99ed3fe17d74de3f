"""What a run leaves of its drafter: snapshots while it learns, and in the end the head and a picture of how it did."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.picture import DRIFTS, draw_drafter
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.drafter.snapshots import SnapshotWriter

log = logging.getLogger(__name__)

_RECORDED = ("drafter/", "speculation/acceptance_length", *DRIFTS)


class DrafterArchive:
    """Files of one run's drafter; only the rank that was `open`ed writes any.

    Args:
        drafter: Whose files these are.
    """

    def __init__(self, drafter: DrafterModule) -> None:
        self.drafter = drafter
        self.history: dict[int, dict[str, float]] = {}
        """Metrics of the drafter by iteration, counted from 1."""
        self._folder: Path | None = None
        self._snapshots: SnapshotWriter | None = None

    def open(self, folder: Path) -> None:
        """Write to `folder` from now on: `snapshots/`, and at the end `final/` and `drafter.png`."""
        self._folder = folder
        self._snapshots = SnapshotWriter(folder / "snapshots")

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep what the picture is drawn from."""
        self.history[iteration] = {name: value for name, value in metrics.items() if name.startswith(_RECORDED)}

    def snapshot(self, version: int) -> float:
        """Save the weights of now in the background; return the milliseconds that it held up."""
        if self._snapshots is None:
            return 0.0
        self._snapshots.save(self.drafter.trainable_tensors(), version)
        return self._snapshots.milliseconds

    def finish(self, quality: DraftQuality | None, *, is_trained: bool) -> None:
        """Leave the head, if it is worth serving, and the picture; waits for the last snapshot."""
        if self._folder is None or self._snapshots is None:
            return
        self._snapshots.close()
        if is_trained:
            self.drafter.export(self._folder / "final", quality)
        rows = [self.history.get(iteration, {}) for iteration in range(1, max(self.history, default=0) + 1)]
        if any("drafter/acceptance_after" in row for row in rows):
            draw_drafter(rows, self._folder / "drafter.png")

    def abandon(self) -> None:
        """End the background thread after an error, whose message nothing here may hide."""
        if self._snapshots is None:
            return
        try:
            self._snapshots.close()
        except RuntimeError:
            log.exception("The last snapshot of the drafter was lost.")
