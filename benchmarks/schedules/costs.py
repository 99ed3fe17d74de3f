"""Tell what a token takes by the requests that run, from measured rollouts. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.end_to_end.run import Run, read_runs
from benchmarks.rollout.limit import NAMES, step_curve, tokens_per_step
from benchmarks.schedules.worker import Array, Group

PLAIN = "end_to_end_25m_schedules.json"
"""Results whose plain run tells what the 23M policy's steps cost."""
MOST_RUNNING = 512


def cost_of(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]], tokens: Mapping[int, float]) -> Array:
    """Return milliseconds a token by requests that run, of the best K.

    Args:
        curves: Batches and milliseconds of a step, by K.
        tokens: Tokens of a step and request, by K.
    """
    running = np.arange(MOST_RUNNING + 1)
    found = []
    for k, (batches, step_ms) in curves.items():
        (x, last_x), (y, last_y) = batches[-2:], step_ms[-2:]
        beyond = last_y + (running - last_x) * (last_y - y) / (last_x - x)
        found.append(np.where(running > last_x, beyond, np.interp(running, batches, step_ms)) / tokens[k])
    return np.min(found, axis=0)


def fitted_cost(lengths: Sequence[Group], seconds: Sequence[float]) -> tuple[Array, dict[str, Any]]:
    """Return milliseconds a token by requests that run, a + b n, fitted to plain rollouts, with a, b and the error."""
    work = np.array([[max(each), sum(each)] for each in lengths], float)
    (a, b), *_ = np.linalg.lstsq(work, 1e3 * np.array(seconds))
    errors = work @ (a, b) / 1e3 / seconds - 1
    found = {"a_ms": float(a), "b_ms": float(b), "mean_error": float(np.abs(errors).mean())}
    return a + b * np.arange(MOST_RUNNING + 1), found | {"worst_error": float(np.abs(errors).max())}


def plain_cost(plain: Run) -> tuple[Array, dict[str, Any]]:
    """Return the cost that is fitted to a plain run, and the fit."""
    rows = plain.iterations[1:]  # the first one compiles
    return fitted_cost([row["lengths"] for row in rows], [row["metrics"]["rollout/seconds"] for row in rows])


def reading_of(results: Path) -> dict[str, float]:
    """Return milliseconds a token that is read, by policy: of the 7B's step with the most drafts; 0 of small ones.

    The 23M policy's steps wait for launches, not for tokens.
    """
    runs = json.loads((results / "rollout_7b.json").read_text())["runs"]
    most = max(NAMES)
    batches, step_ms = step_curve([r for r in runs if r["arm"] == NAMES[most] and r["mode"] == "replayed"])
    return defaultdict(float, dict.fromkeys(("7B, plain", "7B, head"), step_ms[-1] / (batches[-1] * (most + 1))))


def costs_of(results: Path) -> dict[str, Array]:
    """Return the costs by policy."""
    plain = next(run for run in read_runs(results / PLAIN) if run.arm == "plain")
    costs = {"23M, plain": plain_cost(plain)[0]}
    for size, name in (("25m", "23M"), ("7b", "7B")):
        runs = json.loads((results / f"rollout_{size}.json").read_text())["runs"]
        arms = {k: [r for r in runs if r["arm"] == arm and r["mode"] == "replayed"] for k, arm in NAMES.items()}
        curves = {k: step_curve(arm) for k, arm in arms.items()}
        costs |= {f"{name}, plain": cost_of({0: curves[0]}, {0: 1.0})} if size == "7b" else {}
        costs[f"{name}, head"] = cost_of(curves, {k: tokens_per_step(arms[max(arms)], k) for k in arms})
    return costs
