"""Count every text of a tiny vocabulary on this machine, by the tests' own code."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch

from benchmarks.common.arguments import ROOT
from benchmarks.common.results import about, heading, save, table

TEST = "tests/engine/vllm/test_distribution.py"


class Counts:
    """Keeps, as a plugin of pytest, the records and outcomes of the tests."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a test's report of setup, call or teardown; setup's names skipped tests."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.partition("::")[2]] = report.outcome
            self.rows += [row for name, row in report.user_properties if name == "enumeration"]


def count_texts(args: argparse.Namespace) -> None:
    """Run the enumeration, write `enumeration_gpu` or `enumeration_cpu`; exit if it failed."""
    import pytest

    counts = Counts()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu" if device == "gpu" else "not gpu", "--rootdir", str(ROOT)]
    status = pytest.main([*options, str(ROOT / TEST)], plugins=[counts])
    results = about(device, args.note, args.seed) | {"enumeration": counts.rows, "tests": counts.outcomes}
    lines = heading("Every text of a tiny vocabulary, counted", results)
    lines += [f"By `{TEST}`: p is the chi-square test's that texts are as likely as the policy says.", ""]
    lines += table(list(counts.rows[0]), [list(row.values()) for row in counts.rows]) if counts.rows else []
    ended = [f"{number} {outcome}" for outcome, number in Counter(counts.outcomes.values()).items()]
    lines += [f"Tests: {', '.join(ended)}.", ""]
    lines += [f"- failed: {name}" for name, outcome in counts.outcomes.items() if outcome == "failed"]
    save(args.out / f"enumeration_{device}", results, lines)
    print("\n".join(lines))
    if status:
        raise SystemExit(f"The enumeration ended with status {int(status)}.")
