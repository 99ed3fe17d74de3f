"""The results of `end_to_end/run.py` as tables and curves. Pure but for the files it writes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results_file import heading, table
from benchmarks.end_to_end.work import FIRST_HEAD, STAGES

Rows = list[dict[str, Any]]

WORKING = ("rollout", "idle", "logprobs", "update", "drafter")
PAIRED = "acceptance_length"  # tokens per engine step on held-out text
PARTS = 4  # that the table of a paired run cuts it into
LAST = 5  # iterations that a reward at the end is averaged over


def timed(run: dict[str, Any], warmup: int) -> Rows:
    """The iterations of a run that count."""
    return [row for row in run["iterations"] if row["iteration"] > warmup]


def values(rows: Rows, name: str) -> list[float]:
    """One metric of each iteration that has it."""
    return [row["metrics"][name] for row in rows if row["metrics"].get(name) is not None]


def seconds(rows: Rows, stage: str) -> list[float]:
    """Seconds of a stage in each iteration, 0 where it did not occur."""
    return [row["metrics"].get(f"time/{stage}", 0.0) for row in rows]


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """Median and quartiles."""
    middle = statistics.median(numbers)
    if len(numbers) < 3:
        return f"{middle:.{digits}f}"
    low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def overheads(rows: Rows) -> list[float]:
    """Share of each iteration outside rollout, the wait for other ranks', log-probs, update and drafter's training."""
    return [
        1 - sum(row["metrics"].get(f"time/{stage}", 0.0) for stage in WORKING) / row["metrics"]["time/iteration"]
        for row in rows
    ]


def speedup(base: Rows, rows: Rows, stage: str) -> float | None:
    """How much faster `rows` spent `stage` than `base` over the iterations that both timed, whose lengths are equal."""
    common = {row["iteration"] for row in base} & {row["iteration"] for row in rows}
    before, after = (sum(seconds([r for r in x if r["iteration"] in common], stage)) for x in (base, rows))
    return before / after if common and after else None


def stage_table(runs: list[dict[str, Any]], warmup: int, *, is_paired: bool) -> list[str]:
    """Stages by arm; with `is_paired`, arms did the same work and are compared with the plain one."""
    rows_of = {run["arm"]: timed(run, warmup) for run in runs if timed(run, warmup)}
    base = rows_of.get("plain", []) if is_paired else []
    present = [s for s in STAGES if any(any(seconds(rows, s)) for rows in rows_of.values())]
    lines: list[list[Any]] = []
    for arm, rows in rows_of.items():
        gains = [speedup(base, rows, stage) for stage in ("iteration", "rollout")]
        tau = values(rows, "speculation/acceptance_length")
        kl = values(rows, "mismatch/kl")
        lines.append(
            [
                arm,
                len(rows),
                spread(seconds(rows, "iteration")),
                *(None if gain is None else f"**{gain:.2f}**" for gain in gains),
                *(spread(seconds(rows, stage), 3 if stage in ("sync", "reward", "other") else 2) for stage in present),
                f"{statistics.median(overheads(rows)):.1%}",
                f"{statistics.median(values(rows, 'rollout/tokens_per_s')):,.0f}",
                f"{statistics.median(tau):.2f}" if tau else None,
                f"{statistics.median(kl):.1e}" if kl else None,
            ]
        )
    header = ["arm", "iterations", "iteration s", "speedup", "of the rollout", *(f"{stage} s" for stage in present)]
    return table([*header, "overhead", "rollout tok/s", "acceptance length", "trainer/engine KL"], lines)


def drafter_table(runs: list[dict[str, Any]], warmup: int) -> list[str]:
    """How the drafts fare in the course of each run that has some, and what their drafter's training took."""
    lines: list[list[Any]] = []
    for run in runs:
        rows = timed(run, warmup)
        half = (len(rows) + 1) // 2
        rates = [
            [_middle(part, f"speculation/acceptance_rate_pos_{k}") for part in (rows[:half], rows[half:])]
            for k in (1, 3)
        ]
        if rates[0][0] is None:
            continue
        decisions = values(run["iterations"], "drafter/published")
        proxies = [values(run["iterations"], f"drafter/acceptance_{when}") for when in ("before", "after")]
        lines.append(
            [
                f"{run['arm']} {run['mode']} {run['seed']}",
                *(" -> ".join("-" if rate is None else f"{rate:.3f}" for rate in pair) for pair in rates),
                f"{proxies[0][0]:.2f} -> {proxies[1][-1]:.2f}" if decisions else None,
                f"{sum(decisions):.0f} of {len(decisions)}" if decisions else None,
                *(
                    _digits(_middle(rows, f"drafter/{name}"), 2)
                    for name in ("idle_seconds_available", "idle_seconds_used")
                ),
                _digits(_middle(rows, "drafter/preemption_ms"), 0),
                _digits(next(iter(values(rows[-1:], "drafter/policy_drift")), None), 4),
            ]
        )
    if not lines:
        return []
    header = ["run", "draft 1 accepted", "draft 3 accepted", "held-out tokens per step", "published"]
    header += ["idle s", "of it used", "left late by ms", "policy drift (KL)"]
    lead = (
        "Acceptance in the engine, median over the first and the second half of the iterations that count; on held-out "
        "text before the first decision to publish and after the last; medians of idle time, drift at the end."
    )
    return ["## The drafter in the course of the run", "", lead, "", *table(header, lines)]


def paired(run: dict[str, Any]) -> Rows:
    """The iterations in which both heads of a paired run were measured, on one text."""
    names = (f"drafter/{PAIRED}", FIRST_HEAD + PAIRED)
    return [row for row in run["iterations"] if all(row["metrics"].get(name) is not None for name in names)]


def paired_table(runs: list[dict[str, Any]]) -> list[str]:
    """What the head a run began with and the one trained along are worth on the same text, in the course of the run."""
    lines: list[list[Any]] = []
    for run in runs:
        rows = paired(run)
        size = -(-len(rows) // PARTS)
        for part in [rows[start : start + size] for start in range(0, len(rows), size or 1)]:
            heads = [
                [_middle(part, f"{prefix}acceptance_{name}") for prefix in (FIRST_HEAD, "drafter/")]
                for name in ("length", "rate_pos_1", "rate_pos_3")
            ]
            lines.append(
                [
                    f"{run['mode']} {run['seed']}",
                    f"{part[0]['iteration']} to {part[-1]['iteration']}",
                    _digits(part[-1]["metrics"].get("drafter/policy_drift"), 3),
                    *(", ".join(f"{value:.3f}" for value in pair if value is not None) for pair in heads),
                ]
            )
    if not lines:
        return []
    header = ["run", "iterations", "drift at their end", "tokens per step", "draft 1 accepted", "draft 3 accepted"]
    lead = (
        "The head the run began with, then the one trained along: each drafts the held-out text of the last iteration "
        "for the policy of now. Medians."
    )
    return ["## Both heads on the same text", "", lead, "", *table(header, lines)]


def _middle(rows: Rows, name: str) -> float | None:
    found = values(rows, name)
    return statistics.median(found) if found else None


def _digits(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def memory_table(runs: list[dict[str, Any]]) -> list[str]:
    """Peak memory by stage and arm, GiB used on the device / allocated by torch."""
    peaks: dict[str, dict[str, tuple[float, float]]] = {}
    for run in runs:
        for row in run["iterations"]:
            for stage, found in row["memory"].items():
                stages = peaks.setdefault(run["arm"], {})
                used, allocated = stages.get(stage, (0.0, 0.0))
                stages[stage] = max(used, found["used"]), max(allocated, found["allocated"])
    if not peaks:
        return []
    present = [stage for stage in STAGES if any(stage in stages for stages in peaks.values())]
    lines = [
        [arm, *(f"{stages[s][0]:.1f} / {stages[s][1]:.1f}" if s in stages else None for s in present)]
        for arm, stages in peaks.items()
    ]
    lead = (
        "GiB in use on the device at the worst moment of each stage / allocated by torch, which counts a sleeping "
        "engine's unmapped memory too. Caches of the allocator belong to the first number."
    )
    return ["## Peak memory by stage", "", lead, "", *table(["arm", *present], lines)]


def curve(run: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(iteration, seconds since training began, mean reward) of a run, warm-up included."""
    points, clock = [], 0.0
    for row in run["iterations"]:
        clock += row["metrics"]["time/iteration"]
        points.append((row["iteration"], clock, row["metrics"]["reward/mean"]))
    return points


def reward_table(runs: list[dict[str, Any]]) -> list[str]:
    """Rewards of the natural runs at equal steps and at equal time."""
    curves = [(run["arm"], curve(run)) for run in runs if run["iterations"]]
    if not curves:
        return []
    num_steps = min(len(points) for _, points in curves)
    time_limit = min(points[-1][1] for _, points in curves)
    lines: list[list[Any]] = []
    for arm in dict.fromkeys(arm for arm, _ in curves):
        mine = [points for name, points in curves if name == arm]
        lengths = [points[-1][1] / len(points) for points in mine]
        at_steps = [_end_reward(points[:num_steps]) for points in mine]
        at_time = [_end_reward([point for point in points if point[1] <= time_limit]) for points in mine]
        start = [_mean(points[:1]) for points in mine]
        row: list[Any] = [arm, len(mine), f"{statistics.mean(lengths):.2f}"]
        lines.append([*row, *(_mean_and_deviation(x) for x in (start, at_steps, at_time))])
    header = ["arm", "seeds", "s per iteration", "reward, first iteration"]
    header += [f"after {num_steps} iterations", f"after {time_limit:.0f} s"]
    lead = f"Mean reward of the last {LAST} iterations by then, mean and standard deviation over seeds."
    return ["## Natural lengths: reward at equal steps and at equal time", "", lead, "", *table(header, lines)]


def _mean(points: Sequence[tuple[int, float, float]]) -> float:
    return statistics.mean(point[2] for point in points) if points else float("nan")


def _end_reward(points: Sequence[tuple[int, float, float]]) -> float:
    return _mean(points[-LAST:])


def _mean_and_deviation(numbers: Sequence[float]) -> str | None:
    if any(number != number for number in numbers):  # a run had not finished one by then
        return None
    deviation = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.3f}{deviation}"


def report(results: dict[str, Any]) -> str:
    """Everything as Markdown."""
    runs, warmup, work = results["runs"], results["warmup"], results["work"]
    replayed = [run for run in runs if run["mode"] == "replay"]
    natural = [run for run in runs if run["mode"] == "natural"]
    lines = heading("End to end", results)
    for command in results.get("earlier", []):
        lines += [f"Goes on from `{command}`.", ""]
    trained = f"LoRA of rank {work['lora_rank']}" if work["lora_rank"] else "all weights trained"
    drafts = "; heads sample their drafts" if work.get("draft_sampling") == "probabilistic" else ""
    lines += [
        f"{work['prompts']} prompts x {work['group_size']} responses of up to {work['max_tokens']} tokens, one "
        f"optimizer step of micro-batches of {work['micro_batch_size']} on average, {trained}{drafts}. Medians and "
        f"quartiles over iterations after the first {warmup}. Overhead is what is neither rollout, wait for another "
        "rank's (idle), log-probs, update nor the drafter's training. Sync counts the engine's sleep and wake.",
        "",
    ]
    if any(timed(run, warmup) for run in replayed):
        lead = "Every arm writes responses of the same recorded lengths; speedups over the plain engine are paired."
        lines += ["## Replayed lengths: seconds by stage", "", lead, "", *stage_table(replayed, warmup, is_paired=True)]
    if any(timed(run, warmup) for run in natural):
        first = [run for run in natural if run["seed"] == results["seed"]]
        lines += [f"## Natural lengths, seed {results['seed']}: seconds by stage", ""]
        lines += stage_table(first, warmup, is_paired=False)
    lines += reward_table([run for run in natural if not run["error"]])
    lines += drafter_table(runs, warmup)
    lines += paired_table(runs)
    lines += memory_table(replayed or natural)
    starts = [f"{run['arm']} {run['setup_seconds']:.0f}" for run in replayed or natural if run["setup_seconds"]]
    lines += [f"Seconds from start to the first iteration: {', '.join(starts)}.", ""] if starts else []
    for run in runs:
        if run["note"]:
            lines += [f"{run['arm']} {run['mode']} seed {run['seed']} ran {run['note']}.", ""]
        if run["error"]:
            lines += [f"Incomplete: {run['arm']} {run['mode']} seed {run['seed']}, {run['error']}.", ""]
    if left_out := results.get("left_out"):
        lines += [f"Left out, the time being up: {'; '.join(left_out)}.", ""]
    return "\n".join(lines)


def write_report(results: dict[str, Any], out: Path) -> None:
    """Write the tables and the curves beside the JSON file."""
    stem = f"end_to_end_{results['rung']}"
    (out / f"{stem}.md").write_text(report(results) + "\n")
    rows = ["arm,mode,seed,iteration,seconds,reward"]
    for run in results["runs"]:
        key = f"{run['arm']},{run['mode']},{run['seed']}"
        rows += [f"{key},{iteration},{clock:.3f},{reward:.4f}" for iteration, clock, reward in curve(run)]
    (out / f"{stem}.csv").write_text("\n".join(rows) + "\n")
