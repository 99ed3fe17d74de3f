"""What a run leaves of its drafter: snapshots while it learns, and in the end the head and a picture of how it did."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail.picture import DRIFTS, draw_drafter
from tlt_lightning.long_tail.snapshots import SnapshotWriter
from tlt_lightning.long_tail.trainer import Decision

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
        self._quality: DraftQuality | None = None
        self._folder: Path | None = None
        self._snapshots: SnapshotWriter | None = None

    def open(self, folder: Path) -> None:
        """Write to `folder` from now on: `snapshots/`, and at the end `final/` and `drafter.png`."""
        self._folder = folder
        self._snapshots = SnapshotWriter(folder / "snapshots")

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep what the picture is drawn from."""
        self.history[iteration] = {name: value for name, value in metrics.items() if name.startswith(_RECORDED)}

    def decided(self, decision: Decision, version: int) -> dict[str, float]:
        """Say what was decided, and save newly published weights in the background.

        Args:
            decision: The drafter holds the weights that are in force since.
            version: Theirs.

        Returns:
            `drafter/snapshot_ms`, which saving held up the run, if anything was saved.
        """
        self._quality = decision.quality
        if self._snapshots is None:
            return {}
        outcome = "is published" if decision.is_published else "is not published, training goes on from the last one"
        lengths = decision.before.acceptance_length, decision.after.acceptance_length
        log.info("The drafter %s: %.2f -> %.2f tokens per step on held-out text.", outcome, *lengths)
        if not decision.is_published:
            return {}
        self._snapshots.save(self.drafter.trainable_tensors(), version)
        return {"drafter/snapshot_ms": self._snapshots.milliseconds}

    def finish(self, *, is_trained: bool) -> None:
        """Leave the head, if it is worth serving, and the picture; waits for the last snapshot."""
        if self._folder is None or self._snapshots is None:
            return
        self._snapshots.close()
        if is_trained:
            self.drafter.export(self._folder / "final", self._quality)
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
