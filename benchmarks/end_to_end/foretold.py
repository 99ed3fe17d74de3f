"""Compare what decisions about publishing a head foretold with what the engine then found, over all runs.

    python -m benchmarks foretold

It reads the results of `end_to_end`: those runs whose decisions foretell a gain. `--tiny` changes nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import plots
from benchmarks.common.arguments import RESULTS, parser_of
from benchmarks.common.results import about, heading, save, table

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Holds tokens per step that a decision foretold and those of the rollout that followed it.

    Args:
        run: The results and the arm.
        iteration: Of the decision.
        published: Whether the new head went to the engine.
        length: Foretold of the head that drafts from then on, on held-out text.
        found: The engine's.
        gain: Foretold of the new head over the one in use.
        found_gain: The engine's, over the rollout before.
    """

    run: str
    iteration: int
    published: bool
    length: float
    found: float
    gain: float
    found_gain: float


def drafted(row: Row) -> float:
    """Return the engine's tokens per step if every draft were of the longest length tried; 1 without drafts."""
    rates = (row["metrics"].get(f"speculation/acceptance_rate_pos_{k}") for k in range(1, 8))
    return 1 + sum(rate for rate in rates if rate is not None)


def decisions_of(rows: Sequence[Row], run: str = "") -> list[Decision]:
    """Return the decisions of a run's iterations, each published before the rollout of its own iteration's row."""
    found = []
    for old, new in pairwise(rows):
        metrics = new["metrics"]
        if metrics.get("drafter/acceptance_gain") is not None:
            decision = Decision(
                run=run,
                iteration=new["iteration"],
                published=metrics["drafter/published"] == 1,
                length=metrics["drafter/acceptance_length"],
                found=drafted(new),
                gain=metrics["drafter/acceptance_gain"],
                found_gain=drafted(new) - drafted(old),
            )
            found.append(decision)
    return found


def table_of(decisions: Sequence[Decision]) -> list[str]:
    """Return the table of the runs, with all in the last line."""
    lines: list[list[Any]] = []
    runs = list(dict.fromkeys(decision.run for decision in decisions))
    for name in [*runs, "all"]:
        mine = [decision for decision in decisions if name in (decision.run, "all")]
        errors = [decision.found - decision.length for decision in mine]
        row: list[Any] = [
            name,
            f"{statistics.mean(errors):+.2f}",
            f"{statistics.fmean(e * e for e in errors) ** 0.5:.2f}",
        ]
        for was_published in (True, False):
            some = [decision for decision in mine if decision.published is was_published]
            pairs = [(decision.gain, decision.found_gain) for decision in some]
            row += [len(some), means(pairs, "+.2f"), sum(gain > 0 for _, gain in pairs)]
        lines.append(row)
    header = ["run", "tokens per step: mean error", "root mean square error"]
    for kind in ("published", "refused"):
        header += [kind, "gain, foretold -> found", "found above 0"]
    return table(header, lines)


def means(pairs: Sequence[tuple[float, float]], form: str) -> str | None:
    """Return the means of what was foretold and of what was found."""
    return " -> ".join(f"{statistics.mean(each):{form}}" for each in zip(*pairs, strict=True)) or None


def picture(decisions: Sequence[Decision], path: Path) -> None:
    """Draw the gains found over those foretold."""
    figure, (panel,) = plots.frame(1)
    figure.set_size_inches(6, 4.5)
    for was_published, colour, label in ((True, plots.BLUE, "published"), (False, plots.ORANGE, "refused")):
        some = [decision for decision in decisions if decision.published is was_published]
        gains = [decision.gain for decision in some], [decision.found_gain for decision in some]
        panel.plot(*gains, "o", color=colour, label=label, markersize=4, alpha=0.7)
    panel.axline((0, 0), slope=1, color=plots.GREY, linewidth=0.8)
    panel.set_xlabel("gain foretold on held-out text, tokens per step")
    panel.set_ylabel("found by the engine", fontsize=9)
    panel.legend(frameon=False, fontsize=9)
    plots.save(figure, path)


def main(arguments: Sequence[str]) -> None:
    """Read all results, and write the table and the picture."""
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of `end_to_end`'s results")
    args = parser.parse_args(arguments)
    decisions = []
    for path in sorted(args.results.glob("end_to_end_*.json")):
        for run in json.loads(path.read_text())["runs"]:
            decisions += decisions_of(run["iterations"], f"{path.stem.removeprefix('end_to_end_')}, {run['arm']}")
    if not decisions:
        parser.error(f"`--results` {args.results} hold no run whose decisions foretell a gain")
    lead = (
        "Tokens per step of the head that drafts after a decision, held-out text against the engine's next rollout, as "
        "if every draft were of the longest length tried; siblings' drafts are among the engine's. Gains are over "
        "the head in use, and over the rollout before: what was refused shows luck and drift alone."
    )
    record = about("all runs", args.note, args.seed, on_cpu=True)
    results = {**record, "decisions": [asdict(decision) for decision in decisions]}
    lines = [*heading("Foretold and found", record), lead, "", *table_of(decisions)]
    save(args.out / "foretold", results, [*lines, "![gains, found over foretold](foretold.png)"])
    picture(decisions, args.out / "foretold.png")
    print("\n".join(lines))
