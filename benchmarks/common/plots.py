"""Draw pictures with one palette and one frame."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#888888"
COLOURS = (BLUE, ORANGE, GREEN, GREY)
"""Told apart by colour-blind readers (Okabe and Ito)."""


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each of the different `names`, in their order; a fifth has that of the first again."""
    return dict(zip(dict.fromkeys(names), cycle(COLOURS), strict=False))


def frame(num_panels: int) -> tuple[Figure, list[Axes]]:
    """Make a figure of panels one above the other, which share an axis of iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # No pyplot: it would pick a backend for the whole process, which may be a notebook's.
    figure = Figure(figsize=(8, 1.0 + 2.2 * num_panels), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Axes] = list(figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)
    panels[-1].set_xlabel("iteration")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure, panels


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to `path`, whose ending chooses the format; make missing folders.

    A PNG has 128 colours, which the eye does not miss and which take a third of the bytes.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    if Path(path).suffix == ".png":
        from PIL import Image

        Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
