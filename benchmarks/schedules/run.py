"""Simulate what schedules save of a rollout, on recorded lengths and step times. No GPU.

    python -m benchmarks schedules

The schedules, what follows a rollout and the backlog are the package's own. Simplified:

- Responses that run advance together, so that n of them take S(n) / E(n) a token each: milliseconds of a step over its
  tokens a request. With a head, K is the best one at each n, switched for nothing. Prompts cost nothing.
- Text of responses that go on under new weights is read again. A token of it costs the 7B policy what one costs in its
  steps with the most drafts, and the 23M policy, whose steps wait for launches, nothing.
- Policy "23M, plain": S(n) = a + b n, fitted to the rollouts of the arm `plain` of `end_to_end_25m_schedules.json`. The
  others: medians by batch of the plain and the fixed arms of `rollout_25m.json` and `rollout_7b.json`, beyond 256
  running extrapolated from the last two.
- A prompt's lengths are those of a recorded group, drawn with replacement. Tail batching needs earlier answers: in the
  cases called halves a prompt has four responses, and the group's other four are its earlier answers.
- Workers have a share of the prompts each, and an iteration's rollout ends with the last of them.

Which schedule waits for what does not hang on step times, as all that run advance together: each rollout is followed
once, and timed by each policy's steps. A long response has more than half the tokens allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.common.arguments import RESULTS, parser_of
from benchmarks.common.results import about, save
from benchmarks.schedules.cases import NUM_RESPONSES, Case, recorded_cases, resampled_cases
from benchmarks.schedules.check import MEASURED, check
from benchmarks.schedules.costs import Costs, costs_of
from benchmarks.schedules.report import report
from benchmarks.schedules.worker import Worker, log_values, seconds_of
from tlt_lightning.metrics import IterationLog
from tlt_lightning.schedules import PartialRollout, RolloutSchedule, SynchronousSchedule, TailBatching

ITERATIONS, SETTLE = 30, 5
"""Iterations of a simulation, which are whole cycles of each `TailBatching`, and those before them."""
SHARES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
"""Of long responses."""
EXTRAS = (0.25, 0.5, 1.0)
SCHEDULES: dict[str, RolloutSchedule] = {
    "synchronous": SynchronousSchedule(),
    **{f"TailBatching({extra:g})": TailBatching(extra) for extra in EXTRAS},
    **{f"PartialRollout({extra:g})": PartialRollout(extra) for extra in EXTRAS},
}


def simulate(case: Case, schedule: str, costs: Costs, *, iterations: int, seed: int) -> dict[str, Any]:
    """Return what `iterations` take under a schedule, after `SETTLE` that do not count."""
    wanted = NUM_RESPONSES // case.size // case.workers
    workers = [Worker(SCHEDULES[schedule], wanted, case.draw_group, seed + i) for i in range(case.workers)]
    log = IterationLog()
    for iteration in range(SETTLE):
        for worker in workers:
            worker.iterate(iteration, IterationLog())
    rows = [[worker.iterate(SETTLE + i, log) for worker in workers] for i in range(iterations)]
    rollouts = [each for row in rows for each in row]
    numbers = log_values(log)
    learned = sum(each.learned for each in rollouts)
    slots = max(int(each.running.max(initial=0)) for each in rollouts) * case.workers
    found: dict[str, Any] = {"schedule": schedule, "seconds": {}, "idle": {}}
    for name, (cost, reading_ms) in costs.items():
        seconds = [seconds_of(row, cost, reading_ms) for row in rows]
        busy = sum(float((each.tokens * each.running) @ cost[each.running]) for each in rollouts) / 1e3
        found["seconds"][name] = fmean(seconds)
        found["idle"][name] = 1 - busy / (slots * sum(seconds))
    steps = fmean(max(float(each.tokens.sum()) for each in row) for row in rows)
    return found | {
        "steps": steps,
        "continued": numbers.get("schedule/continued", 0.0),
        "age": sum(each.aged for each in rollouts) / learned,
        "read": sum(each.read for each in rollouts) / learned,
        "waited": numbers.get("schedule/waited", 0.0),
    }


def against_synchronous(
    case: Case, costs: Costs, *, iterations: int = ITERATIONS, seed: int = 0
) -> list[dict[str, Any]]:
    """Simulate schedules on a case, `TailBatching` where prompts have earlier answers, the others elsewhere.

    `relative` are their seconds over the synchronous ones.
    """
    left_out = "PartialRollout" if case.has_earlier else "TailBatching"
    names = [name for name in SCHEDULES if not name.startswith(left_out)]
    rows = [simulate(case, name, costs, iterations=iterations, seed=seed) for name in names]
    facts = {name: value for name, value in vars(case).items() if name not in ("name", "draw_group")}
    for row in rows:
        row |= {"lengths": case.name} | facts | {"saved_steps": 1 - row["steps"] / rows[0]["steps"]}
        row["relative"] = {name: row["seconds"][name] / rows[0]["seconds"][name] for name in costs}
    return rows


def main(arguments: Sequence[str]) -> None:
    """Simulate all cases, and write `schedules.json` and `.md`."""
    args = parser_of(__doc__).parse_args(arguments)
    costs = costs_of(RESULTS)
    results: dict[str, Any] = {"about": about("recorded lengths", args.note, args.seed, on_cpu=True)}
    results["check"] = [check(RESULTS, each, repeats=1 if args.tiny else 10) for each in MEASURED]
    cases = recorded_cases(RESULTS, (1,) if args.tiny else (1, 2, 4))
    cases += resampled_cases(RESULTS, (8,) if args.tiny else (4, 8, 16), SHARES[3:4] if args.tiny else SHARES)
    results["rows"] = []
    for case in cases:
        results["rows"] += against_synchronous(case, costs, iterations=1 if args.tiny else ITERATIONS, seed=args.seed)
        save(args.out / "schedules", results, report(results))
    print("\n".join(report(results)))
