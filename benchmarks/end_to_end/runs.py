"""The runs of `end_to_end/run.py` and the files they are kept in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.work import Work


@dataclass
class Run:
    """One arm with one seed, and what came of it."""

    arm: str
    mode: str
    seed: int
    setup_seconds: float = 0.0
    device: str = ""
    error: str = ""
    note: str = ""
    iterations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.arm} {self.mode} seed {self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Tells runs apart."""
        return self.arm, self.mode, self.seed

    @property
    def seconds(self) -> float:
        """What its iterations took."""
        return sum(row["metrics"]["time/iteration"] for row in self.iterations)


def recorded_lengths(runs: Sequence[Run]) -> list[list[int]] | None:
    """Lengths of the plain natural run, by iteration and request; None if there is none."""
    for run in runs:
        lengths = [row["lengths"] for row in run.iterations if "lengths" in row]
        if run.arm == "plain" and run.mode == "natural" and lengths:
            return lengths
    return None


def read_runs(path: str | None, work: Work | None = None) -> list[Run]:
    """The runs in a file of results; none without a file. Runs that failed are left out, to be tried again.

    Raises:
        ValueError: They did other work than `work`; where files lie and how many iterations there are may differ.
    """
    if path is None:
        return []
    results = json.loads(Path(path).read_text())
    for name, value in {} if work is None else settings_of(work).items():
        if name not in ("policy", "train", "iterations") and results["work"].get(name, value) != value:
            raise ValueError(
                f"`--previous` {path} was measured with `{name}` {results['work'].get(name)}, this run has {value}; "
                "give this one a `--name` of its own."
            )
    return [run for run in (Run(**found) for found in results["runs"]) if not run.error]


def commands_of(path: str | None) -> list[str]:
    """The commands behind a file of results, the first one first; none without a file."""
    if path is None:
        return []
    results = json.loads(Path(path).read_text())
    return [*results.get("earlier", []), results["command"]]


def settings_of(work: Work) -> dict[str, Any]:
    """What all runs share."""
    return {name: value for name, value in vars(work).items() if name not in ("lengths", "seed")}
