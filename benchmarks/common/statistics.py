"""Summarize repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def middle(values: Sequence[float]) -> float | None:
    """Return the median; None of nothing."""
    return statistics.median(values) if values else None


def spread(values: Sequence[float], digits: int = 2) -> str | None:
    """Return median and quartiles as text; None of nothing."""
    if not values:
        return None
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) < 3:
        return text
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def rounded(value: float | None, digits: int) -> str | None:
    """Return a number as text; None stays."""
    return None if value is None else f"{value:.{digits}f}"
