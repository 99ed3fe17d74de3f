"""Build a run's page: one HTML file that needs no other and fetches nothing. Pure."""

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from math import isfinite
from typing import Any

MAX_DETAILED = 24
NUM_RECENT = 4


def page(data: Mapping[str, Any]) -> str:
    """Return the page that shows `data`; its script knows the keys, which `RunReport` fills in.

    A text of the policy may hold any markup. Here it is data of a kind that no browser runs, `<` does not occur in it,
    and the page's script shows it as text.
    """
    block = json.dumps(data, ensure_ascii=False, allow_nan=False, default=str).replace("<", "\\u003c")
    html, css, js = (files(__package__).joinpath(f"report.{kind}").read_text() for kind in ("html", "css", "js"))
    return html.replace("REPORT_CSS", css).replace("REPORT_JS", js).replace("REPORT_DATA", block)


def columns(history: Mapping[int, Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    """Return the values of each metric in the order of the iterations; None where there is none."""
    rows = [history[iteration] for iteration in sorted(history)]
    names = sorted({name for row in rows for name in row})
    return {name: [row.get(name) for row in rows] for name in names}


def rounded(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics in five digits, see `in_five_digits`."""
    return {name: in_five_digits(value) for name, value in metrics.items()}


def kept_details(iterations: Iterable[int]) -> set[int]:
    """Return the iterations whose timeline and completions stay, at most `MAX_DETAILED` and evenly spread.

    The latest `NUM_RECENT` are among them. Of the others stays every n-th, where n doubles as the run goes on, so what
    is dropped would not be wanted later.
    """
    known, stride = set(iterations), 1
    newest = max(known, default=0)
    while newest // stride + 1 + NUM_RECENT > MAX_DETAILED:
        stride *= 2
    return {number for number in known if (number - 1) % stride == 0 or number > newest - NUM_RECENT}


def in_five_digits(value: float | None) -> float | None:
    """Return a number in five digits; None for one that JSON does not know."""
    return None if value is None or not isfinite(value) else float(f"{value:.5g}")
