"""Files that a run leaves of its drafter: the head, and a picture of how it did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail.picture import DRIFTS, draw_drafter

_RECORDED = ("drafter/", "speculation/acceptance_length", *DRIFTS)


class DrafterRecord:
    """Remembers how a drafter did, and writes what a run leaves of it."""

    def __init__(self) -> None:
        self.history: dict[int, dict[str, float]] = {}
        """Metrics of the drafter by iteration, counted from 1."""
        self.quality: DraftQuality | None = None
        """Worth of the published weights, as far as it is known."""

    def note(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep what the picture is drawn from."""
        self.history[iteration] = {name: value for name, value in metrics.items() if name.startswith(_RECORDED)}

    def write(self, folder: Path, drafter: DrafterModule | None) -> None:
        """Write the head to `folder/final`, if there is one worth serving, and the picture to `folder/drafter.png`."""
        if drafter is not None:
            drafter.export(folder / "final", self.quality)
        rows = [self.history.get(iteration, {}) for iteration in range(1, max(self.history, default=0) + 1)]
        if any("drafter/acceptance_after" in row for row in rows):
            draw_drafter(rows, folder / "drafter.png")
