"""Tell what a token takes by the requests that run, from measured rollouts. Pure."""

from __future__ import annotations

import json
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
Costs = Mapping[str, tuple[Array, float]]
"""Milliseconds a token by requests that run, and a token that is read again, by policy."""


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


def costs_of(results: Path) -> Costs:
    """Return the costs by policy; the 23M policy's steps wait for launches, and what it reads again costs nothing."""
    plain = next(run for run in read_runs(results / PLAIN) if run.arm == "plain")
    costs = {"23M, plain": (plain_cost(plain)[0], 0.0)}
    for size, name in (("25m", "23M"), ("7b", "7B")):
        runs = json.loads((results / f"rollout_{size}.json").read_text())["runs"]
        arms = {k: [r for r in runs if r["arm"] == arm and r["mode"] == "replayed"] for k, arm in NAMES.items()}
        curves, most = {k: step_curve(arm) for k, arm in arms.items()}, max(arms)
        batches, step_ms = curves[most]
        reading_ms = step_ms[-1] / (batches[-1] * (most + 1)) if size == "7b" else 0.0
        costs |= {f"{name}, plain": (cost_of({0: curves[0]}, {0: 1.0}), reading_ms)} if size == "7b" else {}
        tokens = {k: tokens_per_step(arms[most], k) for k in arms}
        costs[f"{name}, head"] = cost_of(curves, tokens), reading_ms
    return costs
