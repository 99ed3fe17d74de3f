"""Time a rollout under every way to speculate, against plain vLLM and the limit.

    python -m benchmarks rollout --size 25m
    python -m benchmarks rollout --tiny         # on a CPU, to see that it works

rolls out `num_prompts` x `group_size` responses at temperature 1 and top-p 1, in these parts, most important first:

- `core`: lengths are recorded once by a plain rollout; then the plain engine, every fixed K, TLT's rule, BEG-MAB and
  the adaptive selector write responses of exactly these lengths, ends ignored, so that all do the same work.
- `others`: vLLM's own table of K by batch size, tuned on what `core` measured, and drafts sampled from the head.
- `stock`: vLLM's own EAGLE-3 with 3 and 5 drafts in every step.
- `heads`: the further ones of `--head`, also of DSpark, which a GPU alone serves. `lookups`: siblings and n-grams, with
  a head and without. `fp8`: 8-bit engines.

Engines live side by side in processes of their own and take turns, so that an arm is repeated minutes after its first
time, between the same neighbours. Each engine is warmed up by a rollout that goes through all its strategies at all
batch sizes; what a turn still loses to compilation and other stalls has a column of its own. A selector keeps what it
learned when its arm is repeated. Results are written after every rollout to `rollout_<size>.json`, `.md` and `.png`;
`--resume FILE` goes on from an earlier JSON file with other parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.arguments import sized_parser_of, take_size
from benchmarks.common.results import about, note_of, save
from benchmarks.rollout.arms import Arm, arms_of
from benchmarks.rollout.limit import model
from benchmarks.rollout.picture import draw
from benchmarks.rollout.process import EngineError, EngineProcess, Engines
from benchmarks.rollout.report import by_arm, render
from benchmarks.rollout.setup import Setup, add_arguments, setup_of

PARTS = ("core", "others", "stock", "heads", "lookups", "fp8")


class Job(NamedTuple):
    """Names one measurement: its part, arm, kind (`record` or `replayed`) and turn."""

    part: str
    arm: Arm
    mode: str
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.part}: {self.arm.name}, {self.mode} #{self.turn}"


def jobs_of(parts: Sequence[str], arms: dict[str, Arm], repeats: int) -> list[Job]:
    """Return the measurements of parts, turns interleaved so that drift hits all arms alike."""
    chosen = [arm for part in parts for arm in arms.values() if arm.part == part]
    return [Job(arm.part, arm, "replayed", turn) for turn in range(repeats) for arm in chosen]


class Campaign:
    """Runs jobs within a budget and keeps their results.

    Args:
        setup: Policy, prompts and engine settings.
        out: Path of the results without suffix.
        seconds: Budget.
        results: Results so far.
    """

    def __init__(self, setup: Setup, out: Path, seconds: float, results: dict[str, Any]) -> None:
        self.setup, self.out, self.seconds, self.results = setup, out, seconds, results
        self.engines = Engines(setup)
        self._began, self._took = time.perf_counter(), dict[str, float]()
        self._ailing: set[str] = set()
        self.fit()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run jobs whose engines live together; a failed one ends only its own arm."""
        if not jobs or self._left <= 0:
            self.results["left_out"] += map(str, jobs)
            return
        self.engines.need(dict.fromkeys(job.arm.engine for job in jobs))
        for job in jobs:
            expected = self._took.get(f"{job.arm.name} {job.mode}", self._took.get(f"plain {job.mode}", 0.0))
            no_lengths = job.mode == "replayed" and "lengths" not in self.results
            if self._left < expected or job.arm.name in self._ailing or no_lengths:
                self.results["left_out"].append(str(job))
                continue
            began = time.perf_counter()
            try:
                said = self.do(job, self.engines.get(job.arm.engine))
            except EngineError as error:  # the other arms must not be lost with it
                said = f"FAILED\n{error}"
                self.results["failures"].append({"job": str(job), "error": str(error)[-1500:]})
                self._ailing.add(job.arm.name)
            self._took[f"{job.arm.name} {job.mode}"] = time.perf_counter() - began
            print(f"[{time.perf_counter() - self._began:6.1f} s] {job}: {said}", flush=True)
            self.write()
        self.fit()
        self.write()
        draw(self.results, self.out.with_name(self.out.name + ".png"))

    @property
    def _left(self) -> float:
        return self.seconds - (time.perf_counter() - self._began)

    def do(self, job: Job, engine: EngineProcess) -> str:
        """Run one job, keep its result and say it."""
        lengths = self.results["lengths"] if job.mode == "replayed" else None
        result = engine.call("rollout", arm=job.arm.name, lengths=lengths, seed=1000 + self.setup.seed + job.turn)
        written = result.pop("lengths")
        if job.mode == "record":
            self.results.setdefault("lengths", written)
        if job.mode == "replayed" and written != lengths:
            raise EngineError(f"{job} wrote responses of other lengths than it was told.")
        rows = result.pop("rows")
        if job.mode == "replayed" and job.arm.name in ("plain", "adaptive"):
            self.results["pictured"][job.arm.name] = rows
        run = {"arm": job.arm.name, "part": job.part, "mode": job.mode, "turn": job.turn}
        self.results["runs"].append(run | result)
        tau = result.get("acceptance_length", 1.0)
        return f"{result['seconds']:.2f} s, {result['tokens_per_s']:.0f} tokens/s, {tau:.2f} a step"

    def fit(self) -> None:
        """Model the limit, if everything it needs was measured, and take vLLM's table from it."""
        try:
            self.results["limit"] = model(by_arm(self.results), self.results.get("lengths", []))
            self.engines.table = self.results["limit"]["best_k"]
        except ValueError as error:
            print(f"no limit yet: {error}", flush=True)

    def write(self) -> None:
        """Write everything measured so far."""
        self.results["engines"].update(self.engines.descriptions)
        save(self.out, self.results, render(self.results))


def run_all(campaign: Campaign, args: argparse.Namespace) -> None:
    """Record, then the parts in the order of `PARTS`; arms that were named take turns, whatever their parts."""
    arms = arms_of(campaign.setup.heads)
    parts = [part for part in PARTS if part in args.parts]
    for together in [parts] if args.arms else [[part] for part in parts]:
        jobs = jobs_of(together, arms, args.repeats)
        jobs = [job for job in jobs if not args.arms or job.arm.name in args.arms]
        if "lengths" not in campaign.results:
            jobs.insert(0, Job("core", arms["plain"], "record"))
        campaign.run(jobs)


def check_same(earlier: dict[str, Any], setup: Setup) -> None:
    """Exit if results of other work would be mixed with those to come."""
    for name in ("num_prompts", "group_size", "max_tokens", "dtype"):
        if earlier[name] != getattr(setup, name):
            sys.exit(f"`--resume`: measured with `{name}` {earlier[name]}, this run has {getattr(setup, name)}.")


def main(arguments: Sequence[str]) -> None:
    """Measure and write the report."""
    parser = sized_parser_of(__doc__)
    add_arguments(parser)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="none writes the report anew")
    parser.add_argument(
        "--arms", nargs="+", default=[], help="measure only these arms of the parts; all their engines live at once"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each part; with three a stall moves no median")
    parser.add_argument("--resume", type=Path, help="JSON file of an earlier run whose lengths and results are kept")
    args = parser.parse_args(arguments)
    take_size(args, trains=False)
    setup = setup_of(args)
    results: dict[str, Any] = {"runs": [], "engines": {}, "failures": [], "pictured": {}}
    if args.resume:
        results = json.loads(args.resume.read_text())
        check_same(results["setup"], setup)
    results["about"] = [*results.get("about", []), about(args.size, note_of(args.policy, args.note), args.seed)]
    results = {"setup": asdict(setup) | {"max_model_len": setup.max_model_len}} | results | {"left_out": []}
    campaign = Campaign(setup, args.out / f"rollout_{args.size}", args.seconds, results)
    try:
        run_all(campaign, args)
    finally:
        campaign.engines.close()
    campaign.write()
    print("\n".join(render(results)))
    if not by_arm(results).get("plain"):
        sys.exit("The plain engine was not measured.")
