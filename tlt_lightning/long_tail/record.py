"""Write the files that a run leaves of its drafter: the head, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail.picture import DRIFTS, draw_drafter

_RECORDED = ("drafter/", "speculation/acceptance_length", *DRIFTS)


class DrafterRecord:
    """Keeps a drafter's metrics, and writes the files that a run leaves of it."""

    def __init__(self) -> None:
        self.history: dict[int, dict[str, float]] = {}
        """Metrics of the drafter by iteration, counted from 1."""
        self.quality: DraftQuality | None = None
        """Quality of the published weights, if it was measured."""

    def note(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics that the picture shows."""
        self.history[iteration] = {name: value for name, value in metrics.items() if name.startswith(_RECORDED)}

    def write(self, folder: Path, drafter: DrafterModule | None) -> None:
        """Write the head of `drafter`, if any, to `folder/final`, and `folder/drafter.png`."""
        if drafter is not None:
            drafter.export(folder / "final", self.quality)
        rows = [self.history.get(iteration, {}) for iteration in range(1, max(self.history, default=0) + 1)]
        if any("drafter/acceptance_after" in row for row in rows):
            draw_drafter(rows, folder / "drafter.png")
