"""The report of `rollout/run.py`: its tables in Markdown, and the picture of one rollout."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results_file import heading, table
from benchmarks.rollout.arms import ENGINES, FIXED_ARMS, arms_of, is_modelled
from benchmarks.rollout.step_picture import draw_rollout
from benchmarks.rollout.steps import stall_seconds

Runs = list[dict[str, Any]]
STALLED = 0.1
"""Share of a turn's seconds that stalls may take before the report warns of it."""


def render(results: dict[str, Any]) -> str:
    """Everything measured so far."""
    first, *later = results["about"]
    lines = heading("Rollout", first)
    for record in later:
        lines += [f"Gone on with `{record['command']}` on {record['hardware']}.", ""]
    lines += lengths_of(results)
    lines += arms_table(results, "replayed", "Same lengths", "all arms write responses of the recorded lengths")
    lines += arms_table(
        results, "natural", "Natural lengths", "lengths differ between the arms, and their luck with them"
    )
    lines += comparisons(results)
    for section in (limit_section, cells_section, engines_section):
        lines += section(results)
    if results["failures"]:
        lines += [
            "## Failed",
            "",
            *(f"- {failure['job']}: `{_last_line(failure)}`" for failure in results["failures"]),
            "",
        ]
    if results["left_out"]:
        lines += [f"Left out, the budget being spent or an arm having failed: {'; '.join(results['left_out'])}.", ""]
    return "\n".join(lines)


def _last_line(failure: dict[str, Any]) -> str:
    return failure["error"].strip().splitlines()[-1]


def lengths_of(results: dict[str, Any]) -> list[str]:
    """What was rolled out."""
    setup, lengths = results["setup"], sorted(results.get("lengths", []))
    text = (
        f"{setup['num_prompts']} prompts x {setup['group_size']} responses, temperature 1, top-p 1, {setup['dtype']}."
    )
    if lengths:
        at = {name: lengths[min(int(share * len(lengths)), len(lengths) - 1)] for name, share in QUANTILES.items()}
        quantiles = ", ".join(f"{name} {value}" for name, value in at.items())
        text += f" Recorded lengths: {quantiles}, max {lengths[-1]}, {sum(lengths)} tokens in all."
    return [text, ""]


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def by_arm(results: dict[str, Any], mode: str) -> dict[str, Runs]:
    """Runs of a mode by arm, in the order of their first."""
    found: dict[str, Runs] = {}
    for run in results["runs"]:
        if run["mode"] == mode or (run["mode"], mode) == ("record", "natural"):
            found.setdefault(run["arm"], []).append(run)
    return found


def middle(runs: Runs, name: str) -> float | None:
    """Median of a number over runs; None where none has it."""
    values = [run[name] for run in runs if name in run]
    return statistics.median(values) if values else None


def arms_table(results: dict[str, Any], mode: str, title: str, subtitle: str) -> list[str]:
    """One row an arm."""
    arms = by_arm(results, mode)
    if not arms:
        return []
    plain = middle(arms.get("plain", []), "seconds")
    limit = results.get("limit", {}).get("limit_seconds") if mode == "replayed" else None
    heads = tuple(results["setup"]["heads"])
    modelled = {name for name, arm in arms_of(heads).items() if is_modelled(arm, heads)}
    header = ["arm", "turns", "seconds", "least to most", "stalls s", "speedup", "tau", "speedup / tau"]
    header += ["of the limit", "K mean", "off", "graphs", "tokens/s", "tail share", "kept by position"]
    rows = [[name, *arm_row(runs, plain, limit if name in modelled else None)] for name, runs in arms.items()]
    lines = [f"## {title}", "", f"Median over turns; {subtitle}. tau: tokens per request and step with drafts."]
    lines += ["stalls: the most that a turn took beyond its prompts and the medians of its steps. of the limit: for"]
    lines += ["arms that draft as those it is modelled on. graphs: share of steps with a CUDA graph.", ""]
    lines += table(header, rows)
    for name, runs in arms.items():
        for run in runs:
            if (stalled := stall_seconds(run)) > STALLED * run["seconds"]:
                lines += [f"**{name} #{run['turn']} stood still for {stalled:.1f} of its {run['seconds']:.1f} s.**", ""]
    return lines


def arm_row(runs: Runs, plain: float | None, limit: float | None) -> list[Any]:
    """What an arm's runs came to.

    Args:
        runs: Of one mode.
        plain: Seconds of the plain arm.
        limit: Seconds of the modelled limit, if it is one for this arm.
    """
    seconds = [run["seconds"] for run in runs]
    median = statistics.median(seconds)
    speedup, tau = plain and plain / median, middle(runs, "acceptance_length")
    positions = [middle(runs, f"acceptance_rate_pos_{i}") for i in range(1, 9)]
    return [
        len(runs),
        f"{median:.2f}",
        f"{min(seconds):.2f} to {max(seconds):.2f}",
        f"{max(map(stall_seconds, runs)):.2f}",
        _number(speedup, ".2f"),
        _number(tau, ".2f"),
        _number(speedup and tau and speedup / tau, ".2f"),
        _number(limit and limit / median, ".0%"),
        _number(middle(runs, "k_mean"), ".2f"),
        _number(middle(runs, "off_share"), ".0%"),
        _number(middle(runs, "graph_hits"), ".0%"),
        _number(middle(runs, "tokens_per_s"), ",.0f"),
        _number(middle(runs, "tail_share"), ".0%"),
        " ".join(f"{value:.2f}" for value in positions if value is not None) or None,
    ]


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def comparisons(results: dict[str, Any]) -> list[str]:
    """The adaptive arm against the best fixed one, TLT's rule and vLLM's table."""
    arms = by_arm(results, "replayed")
    medians = {name: statistics.median(run["seconds"] for run in runs) for name, runs in arms.items()}
    least = {name: min(run["seconds"] for run in runs) for name, runs in arms.items()}
    if "adaptive" not in medians:
        return []
    lines, fixed = [], {name: medians[name] for name in FIXED_ARMS if name in medians}
    others = {"the best fixed arm": min(fixed, key=lambda name: fixed[name])} if fixed else {}
    others |= {name: name for name in ("TLT rule", "TLT rule K=3", "BEG-MAB", "vLLM table", "off") if name in medians}
    for label, name in others.items():
        faster, fastest = (found[name] / found["adaptive"] - 1 for found in (medians, least))
        lines.append(f"- against {label}{f' ({name})' if label != name else ''}: {faster:+.1%} ({fastest:+.1%})")
    turns = ", ".join(f"{run['seconds']:.2f}" for run in arms["adaptive"])
    told = f"Its turns, the first untaught: {turns} s."
    if spent := arms["adaptive"][0].get("steer_seconds"):
        told += f" Not counted: {spent:.1f} s before the first, in which it measures steps once a run."
    return ["The adaptive arm is faster, by the medians (and by the fastest turns):", "", *lines, "", told, ""]


def limit_section(results: dict[str, Any]) -> list[str]:
    """The modelled limit and how good its model is."""
    limit = results.get("limit")
    if not limit:
        return []
    seconds = limit["limit_seconds"]
    lines = ["## Limit", "", f"Best K in every step at the measured step times and acceptance: {seconds:.2f} s,"]
    lines += [f"{limit['measured_seconds']['plain'] / seconds:.2f} times as fast as plain. The model's own error:", ""]
    rows = []
    for name, modelled in limit["modelled_seconds"].items():
        measured = limit["measured_seconds"][name]
        rows.append([name, f"{measured:.2f}", f"{modelled:.2f}", f"{modelled / measured - 1:+.1%}"])
    lines += table(["arm", "measured", "modelled", "error"], rows)
    steps = limit["step_ms"]
    header = ["batch", "plain", *(f"K={k}" for k in steps["K"])]
    rows = [
        [f"{batch:.0f}", f"{plain:.2f}", *(f"{value:.2f}" for value in values)]
        for batch, plain, values in zip(steps["batch"], steps["plain"], steps["speculative"], strict=True)
        if batch <= len(results["lengths"])  # the model's last row is an extrapolation
    ]
    lines += ["Milliseconds per step, where replayed rollouts met these batch sizes. As in vLLM, a step of more tokens"]
    lines += ["(batch x (K + 1)) than the largest graph has none:", "", *table(header, rows)]
    best = ", ".join(f"{first}-{last}: {k}" for first, last, k in limit["best_k"])
    return [*lines, f"Best K by batch size: {best}.", ""]


def cells_section(results: dict[str, Any]) -> list[str]:
    """The adaptive selector over plain decoding by batch and context."""
    rates: dict[tuple[int, int], dict[str, float]] = {}
    for cell in results["cells"]:
        rates.setdefault((cell["context"], cell["batch"]), {})[cell["arm"]] = cell["tokens_per_s"]
    both = {at: found for at, found in rates.items() if len(found) == 2}
    if not both:
        return []
    batches = sorted({batch for _, batch in both})
    rows = []
    for context in sorted({context for context, _ in both}):
        row: list[Any] = [context]
        for batch in batches:
            found = both.get((context, batch))
            row.append(found and f"{found['adaptive'] / found['plain']:.2f} ({found['adaptive']:,.0f})")
        rows.append(row)
    worst = min(found["adaptive"] / found["plain"] for found in both.values())
    lines = [
        "## Batch x context",
        "",
        "Tokens per second of the adaptive arm over plain (and its tokens per second); a dash",
    ]
    lines += ["where the cache or the policy's positions end.", ""]
    return [*lines, *table(["context", *map(str, batches)], rows), f"The worst cell is {worst:.2f} times plain.", ""]


def engines_section(results: dict[str, Any]) -> list[str]:
    """Settings, memory, cache and graphs of each engine."""
    engines = results["engines"]
    if not engines:
        return []
    lines = ["## Engines", "", *(f"- {kind}: {ENGINES[kind]}" for kind in engines), ""]
    header = [
        "engine",
        "start s",
        "async",
        "tokens a step",
        "weights GiB",
        "KV bytes a token",
        "graphs MiB",
        "peak GiB",
    ]
    header += ["KV tokens on a whole device", "full-length requests"]
    rows = []
    for kind, found in engines.items():
        capacity = capacity_of(found)
        longest = results["setup"]["max_model_len"]
        rows.append(
            [
                kind,
                found["start_seconds"],
                "yes" if found["async_scheduling"] else "no",
                found["max_num_batched_tokens"],
                f"{found['weights_gib']:.2f}",
                f"{found['kv_bytes_per_token']:,.0f}",
                f"{sum(found['graph_mib'].values()):.0f}" if found.get("graph_mib") else None,
                f"{found['peak_allocated_gib']:.1f}",
                capacity and f"{capacity:,}",
                capacity and f"{capacity / longest:.0f} of {longest}",
            ]
        )
    lines += [*table(header, rows), "KV capacity at 90 % of the device, all but the cache being as measured.", ""]
    for kind, found in engines.items():
        if "graph_table" in found:
            lines += [f"Graphs of the {kind} engine:", "", found["graph_table"], ""]
    if "table" in engines:
        lines += [f"vLLM's table: {engines['table'].get('table', results.get('table'))}.", ""]
    return lines


def capacity_of(engine: dict[str, Any]) -> int | None:
    """Tokens of KV cache if the engine had 90 % of its device for itself."""
    if not engine["device_gib"]:
        return None
    cache = engine["kv_tokens"] * engine["kv_bytes_per_token"] / 2**30
    room = 0.9 * engine["device_gib"] - (max(engine["reserved_gib"], engine["peak_allocated_gib"]) - cache)
    return int(room * 2**30 / engine["kv_bytes_per_token"])


def draw(trace: Sequence[dict[str, Any]], plain: Sequence[Sequence[float]], scratch: Path, path: Path) -> None:
    """Draw a traced rollout, and over it how many requests the plain engine had running.

    Args:
        trace: Rows of a `StepTrace`.
        plain: [seconds, running] of the plain rollout.
        scratch: A directory to work in.
        path: The picture.
    """
    file = scratch / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"rollout": 0, **row}) for row in trace))
    draw_rollout(file, path, plain=[(seconds, int(running)) for seconds, running in plain])
