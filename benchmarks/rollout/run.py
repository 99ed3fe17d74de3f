"""How long a rollout takes under every way of speculating, against plain vLLM and against the limit.

    python -m benchmarks rollout --rung 25m
    python -m benchmarks rollout --tiny         # on a CPU, to see that it works

rolls out `num_prompts` x `group_size` responses at temperature 1 and top-p 1, in these parts, most important first:

- `core`: lengths are recorded once by a plain rollout; then the plain engine, every fixed K, TLT's rule, BEG-MAB and
  the adaptive selector write responses of exactly these lengths, ends ignored, so that all do the same work.
- `cells`: tokens per second of the adaptive selector against the plain engine at fixed batches and contexts.
- `natural`: plain, the best fixed K and the adaptive selector with lengths that come as they come.
- `extra`: off, siblings, n-gram, other heads, a head with random weights.
- `others`: vLLM's own table of K by batch size, tuned on what `core` measured, and drafts sampled from the head.
- `memory`: the graphs that vLLM would capture, and the plain engine as vLLM sets it up by default.

Engines live side by side in processes of their own and take turns, so that an arm is repeated minutes after its first
time, between the same neighbours. Each engine is warmed up by a rollout that goes through all its strategies at all
batch sizes; what a turn still loses to compilation and other stalls has a column of its own. A selector keeps what it
learned when its arm is repeated. Results are written after every rollout to
`rollout_<rung>.json`, `.md` and `.png`; `--resume FILE` goes on from an earlier JSON file with other parts. The model
behind the limit is described in `rollout/limit.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.results_file import about, note_of, save
from benchmarks.rollout.arms import FIXED_ARMS, Arm, arms_of
from benchmarks.rollout.limit import model
from benchmarks.rollout.process import EngineError, EngineProcess, Engines
from benchmarks.rollout.report import draw, middle, render
from benchmarks.rollout.setup import CELL_STEPS, Setup, add_arguments, setup_of

PARTS = ("core", "cells", "natural", "extra", "others", "memory")
BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (512, 2048, 8192)
TINY_BATCHES, TINY_CONTEXTS = (1, 8), (24, 96)
FIRST_TABLE = [[1, 8, 7], [9, 32, 5], [33, 64, 3], [65, 128, 1], [129, 256, 0]]
"""vLLM's table until `core` has measured a better one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement.

    Args:
        part: Part it belongs to.
        arm: What is rolled out.
        mode: `record`, `replayed`, `natural` or `cell`; `start` only starts the engine.
        turn: Which repetition.
        cell: Batch and context.
    """

    part: str
    arm: Arm
    mode: str
    turn: int = 0
    cell: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        at = f" {self.cell[0]} x {self.cell[1]}" if self.mode == "cell" else f" #{self.turn}"
        return f"{self.part}: {self.arm.name}, {self.mode}{at}"


def jobs_of(
    part: str, arms: dict[str, Arm], repeats: int, cells: Sequence[tuple[int, int]], best_fixed: str
) -> list[Job]:
    """The measurements of a part, turns interleaved so that what drifts hits all arms alike.

    Args:
        part: One of `PARTS`.
        arms: All arms by name.
        repeats: Turns.
        cells: (batch, context) of the cells.
        best_fixed: Name of the fixed arm that goes into the natural rollouts.
    """
    if part == "cells":
        return [Job(part, arms[name], "cell", cell=cell) for cell in cells for name in ("plain", "adaptive")]
    mine, mode, end = [arm for arm in arms.values() if arm.part == part], "replayed", []
    if part == "natural":
        mine, mode = [arms[name] for name in ("plain", "adaptive", best_fixed)], "natural"
    elif part == "others":
        mine.append(arms["plain"])
    elif part == "memory":
        end = [Job(part, Arm(name="every graph", part=part, engine="full_pool"), "start")]
    return [*(Job(part, arm, mode, turn) for turn in range(repeats) for arm in mine), *end]


@dataclass
class Campaign:
    """Runs jobs within a budget and keeps their results.

    Args:
        setup: What is rolled out.
        out: Results without their suffix.
        seconds: Budget.
        results: Everything measured so far.
    """

    setup: Setup
    out: Path
    seconds: float
    results: dict[str, Any]
    began: float = field(default_factory=time.perf_counter)
    took: dict[str, float] = field(default_factory=dict)
    pictured: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engines = Engines(self.setup)
        self.stream: list[int] = []
        self.ailing: set[str] = set()

    def say(self, what: str) -> None:
        """Print a line with the time."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {what}", flush=True)

    @property
    def left(self) -> float:
        """Seconds of the budget left."""
        return self.seconds - (time.perf_counter() - self.began)

    def run(self, jobs: Sequence[Job], later: Iterable[str] = ()) -> None:
        """Run jobs whose engines are then alive together; one that fails takes only its own arm with it.

        Args:
            jobs: What to run.
            later: Engines that jobs to come need.
        """
        if not jobs or self.left <= 0:
            return
        self.engines.need(dict.fromkeys(job.arm.engine for job in jobs), later)
        for job in jobs:
            if job.mode == "replayed" and "lengths" not in self.results:
                self.results["left_out"].append(f"{job}: no lengths were recorded")
                continue
            expected = self.took.get(f"{job.arm.name} {job.mode}", self.took.get(f"plain {job.mode}", 0.0))
            if self.left < expected or job.arm.name in self.ailing:
                self.results["left_out"].append(str(job))
                continue
            try:
                self.do(job, self.engines.get(job.arm.engine))
            except Exception as error:  # the other arms must not be lost with it
                text = str(error) if isinstance(error, EngineError) else traceback.format_exc(limit=-6)
                self.say(f"FAILED {job}\n{text}")
                self.results["failures"].append({"job": str(job), "error": text[-1500:]})
                if job.mode != "cell":
                    self.ailing.add(job.arm.name)
            self.results["engines"].update(self.engines.descriptions)
            self.write()

    def do(self, job: Job, engine: EngineProcess) -> None:
        """Run one job and keep its result."""
        limit, began = max(120.0, 10 * self.took.get("plain replayed", 12.0)), time.perf_counter()
        if job.mode == "start":
            self.say(f"{job}: started in {engine.ready()['start_seconds']} s")
            return
        if job.mode == "cell":
            self.measure_cell(job, engine, limit)
        else:
            result = engine.call(
                "rollout",
                limit,
                arm=job.arm.name,
                lengths=self.results["lengths"] if job.mode == "replayed" else None,
                seed=1000 + self.setup.seed + job.turn + (job.mode == "natural"),  # not the recorded one again
                texts=job.mode == "record",
            )
            self.keep(job, result)
            self.say(
                f"{job}: {result['seconds']:.2f} s, {result['tokens_per_s']:.0f} tokens/s, "
                f"{result.get('acceptance_length', 1.0):.2f} a step"
            )
        self.took[f"{job.arm.name} {job.mode}"] = time.perf_counter() - began

    def keep(self, job: Job, result: dict[str, Any]) -> None:
        """Add a rollout to the results."""
        if job.mode == "record":
            self.results.setdefault("lengths", result["lengths"])
            texts = result.pop("texts")
            prompts = [request.prompt_ids for request in self.setup.requests()]
            self.stream = [t for prompt, text in zip(prompts, texts, strict=True) for t in (*prompt, *text)]
        lengths, trace = result.pop("lengths"), result.pop("trace", None)
        if job.arm.name not in ("plain", "adaptive"):
            del result["curve"]
        if job.mode == "replayed" and lengths != self.results["lengths"]:
            raise EngineError(f"{job} wrote responses of other lengths than it was told.")
        if trace is not None and job.mode == "replayed":
            self.pictured = trace
        run = {"arm": job.arm.name, "part": job.part, "mode": job.mode, "turn": job.turn, **result}
        self.results["runs"].append(run)

    def measure_cell(self, job: Job, engine: EngineProcess, limit: float) -> None:
        """Measure a batch x context cell, if the cache holds it."""
        batch, context = job.cell
        gain = max(2, min(5, 512 // batch))  # tokens a step, amply; no selector here drafts more than 512 / batch
        longest = context + CELL_STEPS * gain
        if batch * longest > engine.ready()["kv_tokens"] or longest > self.setup.max_model_len:
            return
        if not self.stream:
            self.results["left_out"].append(f"{job}: no text; run it in one command with `core`")
            return
        found = engine.call("cell", limit, arm=job.arm.name, batch=batch, context=context, stream=self.stream)
        self.results["cells"].append({"arm": job.arm.name, "batch": batch, "context": context, **found})
        self.say(f"{job}: {found['tokens_per_s']:.0f} tokens/s")

    def arms(self) -> dict[str, list[dict[str, Any]]]:
        """Replayed runs by arm."""
        found: dict[str, list[dict[str, Any]]] = {}
        for run in self.results["runs"]:
            if run["mode"] == "replayed":
                found.setdefault(run["arm"], []).append(run)
        return found

    @property
    def best_fixed(self) -> str:
        """The fixed arm that replayed fastest so far."""
        seconds = {name: middle(self.arms().get(name, []), "seconds") for name in FIXED_ARMS}
        return min(FIXED_ARMS, key=lambda name: seconds[name] or float("inf"))

    def fit(self) -> None:
        """Make the model of the limit, if everything it needs was measured, and vLLM's table from it."""
        try:
            self.results["limit"] = model(self.arms(), self.results.get("lengths", []))
            self.engines.table = self.results["limit"]["best_k"]
        except ValueError as error:
            self.say(f"no limit yet: {error}")
        if not self.engines.table or all(k == 0 for *_, k in self.engines.table):
            self.engines.table = FIRST_TABLE

    def write(self) -> None:
        """Write everything measured so far."""
        save(self.out.with_suffix(".json"), self.results)
        self.out.with_suffix(".md").write_text(render(self.results))

    def finish(self) -> None:
        """Bring the model, the picture and the files up to date."""
        self.fit()
        self.write()
        self.draw()

    def draw(self) -> None:
        """Draw the last replayed rollout of the adaptive arm over the plain one's."""
        plain = self.arms().get("plain")
        if self.pictured and plain:
            with tempfile.TemporaryDirectory() as directory:
                draw(self.pictured, plain[-1]["curve"], Path(directory), self.out.with_suffix(".png"))


def run_all(campaign: Campaign, args: argparse.Namespace) -> None:
    """Record, then the parts in the order they were asked for."""
    arms = arms_of(campaign.setup.heads)
    parts = [part for part in PARTS if part in args.parts and ("adaptive" in arms or part not in ("cells", "natural"))]
    sizes = TINY_BATCHES if args.rung == "tiny" else BATCHES
    setup = campaign.setup
    contexts = [min(context, setup.max_model_len - 5 * CELL_STEPS) for context in setup.contexts]
    cells = [(batch, context) for context in contexts for batch in sizes if batch <= setup.num_requests]
    campaign.finish()  # of an earlier run that is gone on with
    for place, part in enumerate(parts):
        jobs = jobs_of(part, arms, args.repeats, cells, campaign.best_fixed)
        if args.arms:
            jobs = [job for job in jobs if job.arm.name in args.arms or job.mode == "start"]
        if "lengths" not in campaign.results or (part == "cells" and not campaign.stream):
            jobs.insert(0, Job("core", arms["plain"], "record"))
        to_come = (jobs_of(other, arms, 1, cells[:1], FIXED_ARMS[0]) for other in parts[place + 1 :])
        campaign.run(jobs, {job.arm.engine for others in to_come for job in others})
        campaign.finish()
    campaign.say("done")


def check_same(earlier: dict[str, Any], setup: Setup) -> None:
    """Exit if results of other work would be mixed with those to come."""
    for name in ("num_prompts", "group_size", "max_tokens", "dtype"):
        if earlier[name] != getattr(setup, name):
            sys.exit(f"`--resume`: measured with `{name}` {earlier[name]}, this run has {getattr(setup, name)}.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="none writes the report anew")
    parser.add_argument("--arms", nargs="+", default=[], help="measure only these arms of the parts")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each part; with three a stall moves no median")
    parser.add_argument("--resume", help="JSON file of an earlier run whose lengths and results are kept")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    args = parser.parse_args(arguments)
    contexts = TINY_CONTEXTS if args.rung == "tiny" else CONTEXTS
    setup = setup_of(args, contexts if "cells" in args.parts else ())
    results: dict[str, Any] = {"runs": [], "cells": [], "engines": {}, "failures": [], "left_out": []}
    if args.resume:
        results = json.loads(Path(args.resume).read_text()) | {"left_out": []}
        check_same(results["setup"], setup)
    results["about"] = [*results.get("about", []), about(args.rung, note_of(setup.policy, args.note), args.seed)]
    results.setdefault("setup", vars(setup) | {"max_model_len": setup.max_model_len})
    campaign = Campaign(setup, args.out / f"rollout_{args.rung}", args.seconds, results)
    try:
        run_all(campaign, args)
    finally:
        campaign.engines.close()
    print(render(results))
    if not campaign.arms().get("plain"):
        sys.exit("The plain engine was not measured.")


if __name__ == "__main__":
    main()
