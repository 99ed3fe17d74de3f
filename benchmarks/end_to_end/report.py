"""Render the results of `python -m benchmarks end_to_end` as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common.results import heading, table
from benchmarks.common.statistics import middle, rounded, spread
from benchmarks.end_to_end.foretold import decisions_of, drafted, means
from benchmarks.end_to_end.work import OVERHEAD, STAGES

Rows = list[dict[str, Any]]
Runs = list[dict[str, Any]]
Point = tuple[int, float, float]
"""Iteration, seconds since training began, mean reward."""

SPANS = [*((n, n) for n in range(1, 6)), (6, 10), (11, 20), (21, 30), (31, 40), (41, 10**9)]
LAST = 5  # iterations that a reward at the end is averaged over


def timed(run: dict[str, Any], warmup: int) -> Rows:
    """Return the iterations of a run that count."""
    return [row for row in run["iterations"] if row["iteration"] > warmup]


def values(rows: Rows, name: str) -> list[float]:
    """Return one metric of each iteration that has it."""
    return [row["metrics"][name] for row in rows if row["metrics"].get(name) is not None]


def seconds(rows: Rows, stage: str) -> list[float]:
    """Return the seconds of a stage in each iteration, 0 where it did not occur."""
    return [row["metrics"].get(f"time/{stage}", 0.0) for row in rows]


def speedup(base: Rows, rows: Rows, stage: str) -> float | None:
    """Return the speedup of `stage` over the iterations that both timed, of equal lengths."""
    common = {row["iteration"] for row in base} & {row["iteration"] for row in rows}
    before, after = (sum(seconds([r for r in x if r["iteration"] in common], stage)) for x in (base, rows))
    return before / after if common and after else None


def overheads(rows: Rows) -> list[float]:
    """Return each iteration's share outside rollout, idle, log-probs, update and drafter."""
    return [sum(seconds([row], stage)[0] for stage in OVERHEAD) / row["metrics"]["time/iteration"] for row in rows]


def stage_table(runs: Runs, warmup: int, *, is_paired: bool) -> list[str]:
    """Return stages by arm; `is_paired` compares them with the plain arm on equal work."""
    rows_of = {run["arm"]: timed(run, warmup) for run in runs if timed(run, warmup)}
    base = rows_of.get("plain", []) if is_paired else []
    present = [stage for stage in STAGES if any(any(seconds(rows, stage)) for rows in rows_of.values())]
    lines: list[list[Any]] = []
    for arm, rows in rows_of.items():
        kl = middle(values(rows, "mismatch/kl"))
        lines.append(
            [
                arm,
                len(rows),
                spread(seconds(rows, "iteration")),
                *(rounded(speedup(base, rows, stage), 2) for stage in ("iteration", "rollout")),
                *(spread(seconds(rows, stage), 3 if stage in OVERHEAD else 2) for stage in present),
                f"{statistics.median(overheads(rows)):.1%}",
                f"{statistics.median(values(rows, 'rollout/tokens_per_s')):,.0f}",
                rounded(middle(values(rows, "speculation/acceptance_length")), 2),
                kl and f"{kl:.1e}",
            ]
        )
    header = ["arm", "iterations", "iteration s", "speedup", "of the rollout", *(f"{stage} s" for stage in present)]
    return table([*header, "overhead", "rollout tok/s", "acceptance length", "trainer/engine KL"], lines)


def memory_table(runs: Runs, warmup: int) -> list[str]:
    """Return the most memory of a device by stage, and what the update made of it."""
    lines: list[list[Any]] = []
    for run in runs:
        rows = timed(run, warmup)
        peaks = [max(values(rows, f"memory/peak_{stage}"), default=None) for stage in STAGES]
        if any(peaks):
            speed = [middle(values(rows, f"train/{name}")) for name in ("tokens_per_s", "mfu")]
            forecast = [run.get("planned", {}).get(stage) for stage in ("rollout", "update")]
            lines.append([f"{run['arm']} {run['mode']} {run['seed']}", *peaks, *forecast, *speed])
    header = ["peak GiB by stage", *STAGES, "rollout, forecast", "update, forecast", "update tok/s", "utilisation"]
    return table(header, lines) if lines else []


def rank_table(runs: Runs, warmup: int) -> list[str]:
    """Return how long each rank wrote and waited, what used the wait, and how evenly the update was shared."""
    lines: list[list[Any]] = []
    for run in runs:
        rows = [row for row in timed(run, warmup) if "ranks" in row]
        if not rows:
            continue
        whole = sum(seconds(rows, "iteration"))
        for rank in range(len(rows[0]["ranks"])):
            mine = [row["ranks"][rank] for row in rows]
            wrote, waited, used = (sum(each.get(name, 0.0) for each in mine) for name in ("rollout", "idle", "used"))
            # The update lasts as long as the most tokens of a rank do.
            busy = [row["ranks"][rank]["tokens"] / max(each["tokens"] for each in row["ranks"]) for row in rows]
            shares = [f"{share:.1%}" for share in (waited / whole, used / waited if waited else 0.0)]
            name = f"{run['arm']} {run['mode']} {run['seed']}"
            lines.append([name, rank, wrote / len(rows), waited / len(rows), *shares, f"{statistics.mean(busy):.1%}"])
    if not lines:
        return []
    header = ["run", "rank", "rollout s", "idle s", "idle, of the iteration", "of it training the drafter"]
    lead = "Means over the iterations that count; tokens of the update beside those of the rank that has the most."
    return ["## Ranks", "", lead, "", *table([*header, "tokens, of the most"], lines)]


def drafter_table(runs: Runs, warmup: int) -> list[str]:
    """Return what decisions about publishing foretold in each drafting run, and what the engine found."""
    lines: list[list[Any]] = []
    for run in runs:
        rows = timed(run, warmup)
        rates = [middle(values(rows, f"speculation/acceptance_rate_pos_{k}")) for k in (1, 3)]
        if rates[0] is None:
            continue
        decisions = decisions_of(run["iterations"])
        pairs = [(each.length, each.found) for each in decisions if each.iteration > warmup]
        cells: list[Any] = []
        for was_published in (True, False):
            gains = [(each.gain, each.found_gain) for each in decisions if each.published is was_published]
            cells += [len(gains), means(gains, "+.3f")]
        drift = rounded(middle(values(rows[-1:], "rollout/policy_drift")), 4)
        name = f"{run['arm']} {run['mode']} {run['seed']}"
        lines.append([name, *(rounded(rate, 3) for rate in rates), means(pairs, ".2f"), *cells, drift])
    if not lines:
        return []
    header = ["run", "draft 1 accepted", "draft 3 accepted", "tokens per step", "published", "gain", "refused", "gain"]
    lead = (
        "Acceptance in the engine, median over the iterations that count. Means of tokens per step, and of what a "
        "decision about publishing gains: foretold on held-out text -> found in the engine's rollout thereafter, gains "
        "against the rollout before. What was refused shows luck and drift alone. Drift (KL, nats) at the end."
    )
    return ["## The drafter, foretold and found", "", lead, "", *table([*header, "policy drift"], lines)]


def compared(name: str, mine: list[float], plain: list[float], frozen: list[float]) -> list[str]:
    """Say from where on a run is ahead of the plain one, and how near its end is to that of a frozen head.

    Each of `mine`, `plain` and `frozen` holds the seconds after 0, 1, 2, ... iterations, none for a run that is not
    there. The end is the last third of the iterations that both made, ten of them at most.
    """
    told, shared = [], min(len(mine), len(plain)) - 1
    if shared > 0 and mine is not plain:
        behind = max((number for number in range(1, shared + 1) if mine[number] >= plain[number]), default=0)
        ahead = "not ahead of" if behind == shared else f"from iteration {behind + 1} on ahead of"
        told.append(f"{name} {ahead} plain, {plain[shared] / mine[shared]:.2f}x after {shared}")
    shared = min(len(mine), len(frozen)) - 1
    first = shared - min(10, shared // 3)
    if first < shared and mine is not frozen:
        ratio = (mine[shared] - mine[first]) / (frozen[shared] - frozen[first])
        told.append(f"{name} takes {ratio:.2f} of frozen's seconds in iterations {first + 1} to {shared}")
    return told


def replayed_again(run: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Compare iterations after the end of the plain run with those of it that wrote the same lengths.

    Their tokens tell which; the plain run's first iteration, which compiles, does not count.
    """
    known = {row["metrics"].get("rollout/tokens"): seconds([row], "iteration")[0] for row in plain["iterations"][1:]}
    later = run["iterations"][len(plain["iterations"]) :]
    again = [row for row in later if row["metrics"].get("rollout/tokens", -1) in known]
    if not again:
        return []
    mine = sum(seconds(again, "iteration"))
    ratio = sum(known[row["metrics"]["rollout/tokens"]] for row in again) / mine
    last = again[-1]["iteration"]
    lead = f"{run['arm']} {run['seed']}: {len(again)} of the iterations {again[0]['iteration']} to {last}"
    return [f"{lead} write lengths that plain wrote before, {ratio:.2f}x as fast as plain"]


def course_table(runs: Runs, title: str) -> list[str]:
    """Return runs of one mode in the course of their iterations, beside the plain run of their seed."""
    clocks = {(run["arm"], run["seed"]): [0.0, *(clock for _, clock, _ in curve(run))] for run in runs}
    lines: list[list[Any]] = []
    told = []
    for run in runs:
        mine, plain, frozen = (clocks.get((arm, run["seed"]), []) for arm in (run["arm"], "plain", "frozen"))
        shared = min(len(mine), len(plain))
        told += compared(f"{run['arm']} {run['seed']}", mine, plain, frozen)
        beside = [other for other in runs if (other["arm"], other["seed"]) == ("plain", run["seed"])]
        told += [line for other in beside if run["mode"] == "replay" for line in replayed_again(run, other)]
        for first, last in SPANS:
            rows = [row for row in run["iterations"] if first <= row["iteration"] <= last]
            if not rows:
                continue
            end, written = rows[-1]["iteration"], sum(values(rows, "rollout/tokens"))
            lines.append(
                [
                    f"{run['arm']} {run['seed']}",
                    f"{first} to {end}",
                    *(f"{statistics.mean(seconds(rows, stage)):.2f}" for stage in ("iteration", "rollout", "drafter")),
                    f"{mine[end]:.1f}",
                    f"{plain[end] / mine[end]:.2f}" if end < shared else None,
                    f"{statistics.mean(values(rows, 'reward/mean')):.3f}",
                    f"{statistics.mean(map(drafted, rows)):.2f}",
                    f"{sum(values(rows, 'drafter/tokens')) / written:.2f}" if written else None,
                    rounded(middle(values(rows, "drafter/predicted_saving_s")), 1),
                    f"{sum(values(rows, 'drafter/published')):.0f}",
                ]
            )
    header = ["run", "iterations", "s", "rollout s", "drafter s", "s so far", "speedup so far", "reward"]
    header += ["tokens per step", "trained on, of the tokens", "foretold to save s", "published"]
    lead = "Means over iterations; of the seconds that the budget foretells a plan of training to save, the median."
    ending = [f"{'; '.join(told)}.", ""] if told else []
    return [f"## {title}", "", lead, "", *table(header, lines), *ending] if lines else []


def curve(run: dict[str, Any]) -> list[Point]:
    """Return the reward of a run over iterations and time, warm-up included."""
    points, clock = [], 0.0
    for row in run["iterations"]:
        clock += row["metrics"]["time/iteration"]
        points.append((row["iteration"], clock, row["metrics"]["reward/mean"]))
    return points


def reward_table(runs: Runs) -> list[str]:
    """Return the rewards of the natural runs at equal steps and at equal time."""
    curves = [(run["arm"], curve(run)) for run in runs if run["iterations"]]
    if not curves:
        return []
    num_steps = min(len(points) for _, points in curves)
    time_limit = min(points[-1][1] for _, points in curves)
    lines: list[list[Any]] = []
    for arm in dict.fromkeys(arm for arm, _ in curves):
        mine = [points for name, points in curves if name == arm]
        cuts = [
            [points[:1] for points in mine],
            [points[:num_steps][-LAST:] for points in mine],
            [[point for point in points if point[1] <= time_limit][-LAST:] for points in mine],
        ]
        pace = statistics.mean(points[-1][1] / len(points) for points in mine)
        lines.append([arm, len(mine), f"{pace:.2f}", *map(_mean_and_deviation, cuts)])
    header = ["arm", "seeds", "s per iteration", "reward, first iteration"]
    header += [f"after {num_steps} iterations", f"after {time_limit:.0f} s"]
    lead = f"Mean reward of the last {LAST} iterations by then, mean and standard deviation over seeds."
    return ["## Natural lengths: reward at equal steps and at equal time", "", lead, "", *table(header, lines)]


def schedule_table(runs: Runs, warmup: int) -> list[str]:
    """Return what schedules take and throw away, beside the same arms without one."""
    scheduled = {run["arm"].split("+")[0] for run in runs if "+" in run["arm"]}
    lines: list[list[Any]] = []
    for run in runs:
        rows = timed(run, warmup)
        if run["arm"].split("+")[0] not in scheduled or not rows:
            continue
        names = ("schedule/tokens_thrown_away", "rollout/tokens", "schedule/tokens_read_again")
        thrown, kept, read = (sum(values(rows, name)) for name in names)
        cells = [statistics.mean(seconds(rows, stage)) for stage in ("iteration", "rollout")]
        idle = sum(seconds(rows, "idle")) / sum(seconds(rows, "iteration"))
        found = [values(rows, f"schedule/{name}") for name in ("repeated", "continued", "age")]
        shares = [idle, *(statistics.mean(each) if each else None for each in found)]
        first = [f"{run['arm']} {run['seed']}", len(rows), *(rounded(cell, 2) for cell in cells)]
        counted = [
            f"{kept / len(rows):,.0f}",
            f"{thrown / (thrown + kept):.1%}",
            f"{read / kept:.1%}" if read else None,
        ]
        lines.append([*first, *counted, *(rounded(share, 3) for share in shares)])
    if not lines:
        return []
    header = [
        "run",
        "iterations",
        "iteration s",
        "rollout s",
        "tokens learned from",
        "thrown away",
        "read again",
        "idle",
        "repeated",
        "continued",
    ]
    lead = (
        "Means over iterations: give a multiple of five, a cycle of tail batching. Idle is the share that ranks wait "
        "for others. `docs/schedules.md` has the words."
    )
    return ["## Schedules", "", lead, "", *table([*header, "age"], lines)]


def device_table(runs: Runs, warmup: int) -> list[str]:
    """Return what devices did in runs with engines beside the trainer, and in the same arms without."""
    parted = {run["arm"].split("+")[0] for run in runs if "+ray" in run["arm"]}
    lines: list[list[Any]] = []
    for run in runs:
        rows = timed(run, warmup)
        if run["arm"].split("+")[0] not in parted or not rows:
            continue
        total = sum(seconds(rows, "iteration"))
        trainer = [sum(seconds(rows, stage)) for stage in ("update", "logprobs", "sync")]
        names = {name for row in rows for name in row["metrics"] if name.startswith("engine/")}
        engines: dict[str, dict[str, float]] = {}
        for name in sorted(names):
            _, engine, stage = name.split("/")
            engines.setdefault(engine, {})[stage] = sum(values(rows, name))
        shares = [
            ", ".join(f"{each.get(stage, 0.0) / sum(each.values()):.0%}" for each in engines.values()) or None
            for stage in ("writing", "weights", "waiting")
        ]
        oldest = values(rows, "schedule/age_max")
        lines.append(
            [
                f"{run['arm']} {run['seed']}",
                len(rows),
                spread(seconds(rows, "iteration")),
                f"{sum(trainer[:2]) / total:.0%}",
                f"{sum(seconds(rows, 'rollout')) / total:.0%}",
                f"{trainer[2] / len(rows):.2f}",
                *shares,
                rounded(statistics.mean(values(rows, "schedule/age") or [0.0]), 2),
                f"{max(oldest, default=0.0):.0f}",
            ]
        )
    if not lines:
        return []
    header = ["run", "iterations", "iteration s", "ranks learn", "wait for text", "sync s"]
    header += ["engines write", "take weights", "wait", "age", "oldest"]
    lead = (
        "Half of the devices train in runs with engines beside the trainer, the others write; in the other runs all do "
        "both in turn. Shares of the time, of engines each by its own; sync is what ranks wait for: their own copy."
    )
    return ["## Devices", "", lead, "", *table(header, lines)]


def _mean_and_deviation(by_seed: Sequence[Sequence[Point]]) -> str | None:
    if not all(by_seed):  # a run had not finished an iteration by then
        return None
    means = [statistics.mean(point[2] for point in points) for points in by_seed]
    deviation = f" ± {statistics.stdev(means):.3f}" if len(means) > 1 else ""
    return f"{statistics.mean(means):.3f}{deviation}"


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    runs, warmup, work = results["runs"], results["warmup"], results["work"]
    replayed = [run for run in runs if run["mode"] == "replay"]
    natural = [run for run in runs if run["mode"] == "natural"]
    lines = heading("End to end", results)
    for command in results["earlier"]:
        lines += [f"Goes on from `{command}`.", ""]
    where = f" on {work['devices']} devices by {work['strategy']}" if work.get("devices", 1) > 1 else ""
    if (ranks := work.get("tensor_parallel", 1)) > 1:
        where += f", {ranks} to an engine"
    if work.get("gradient_checkpointing"):
        where += ", activations computed again"
    trained = f"LoRA of rank {work['lora_rank']}" if work["lora_rank"] else "all weights trained"
    passes = f"{work['micro_batch_size']} sequences on average"  # of the earliest results, which lack the tokens
    if "micro_batch_tokens" in work:
        tokens = work["micro_batch_tokens"]
        passes = f"at most {tokens:,} tokens" if tokens else "as many tokens as the device had room for"
    drafts = "; heads sample their drafts" if work["draft_sampling"] == "probabilistic" else ""
    lines += [
        f"{work['prompts']} prompts x {work['group_size']} responses of up to {work['max_tokens']} tokens, one "
        f"optimizer step, passes of {passes}, {trained}{where}{drafts}. Medians and "
        f"quartiles over iterations after the first {warmup}. Overhead is sync (with the engine's sleep and wake), "
        "reward and other.",
        "",
    ]
    if any(timed(run, warmup) for run in replayed):
        lead = "Every arm writes responses of the same recorded lengths; speedups over the plain engine are paired."
        lines += ["## Replayed lengths: seconds by stage", "", lead, "", *stage_table(replayed, warmup, is_paired=True)]
    if first := [run for run in natural if run["seed"] == results["seed"] and timed(run, warmup)]:
        lines += [f"## Natural lengths, seed {results['seed']}: seconds by stage", ""]
        lines += stage_table(first, warmup, is_paired=False)
    lines += reward_table([run for run in natural if not run["error"]])
    lines += course_table([run for run in natural if run["iterations"]], "In the course of the run")
    if any(run["arm"].startswith("random") for run in replayed):
        lines += course_table(
            [run for run in replayed if run["iterations"]], "In the course of the run, lengths replayed"
        )
    lines += [*schedule_table(natural, warmup), *device_table(natural, warmup)]
    lines += [*memory_table(runs, warmup), *rank_table(runs, warmup), *drafter_table(runs, warmup)]
    starts = [f"{run['arm']} {run['setup_seconds']:.0f}" for run in replayed or natural if run["setup_seconds"]]
    lines += [f"Seconds from start to the first iteration: {', '.join(starts)}.", ""] if starts else []
    for run in runs:
        if run["error"]:
            lines += [f"Incomplete: {run['arm']} {run['mode']} seed {run['seed']}, {run['error']}.", ""]
    if results["left_out"]:
        lines += [f"Left out, the time being up: {'; '.join(results['left_out'])}.", ""]
    return lines
