"""What a whole GRPO iteration costs, stage by stage, with speculation and drafter off and on, and under TRL.

    python -m benchmarks end_to_end --rung 25m
    python -m benchmarks end_to_end --rung 7b --lengths benchmarks/results/end_to_end_25m.json --modes replay \
        --iterations 5 --warmup 1

`--tiny` runs everything on a CPU with the quickstart's policy. Arms: the `plain` engine; `siblings`; a `frozen` head;
an `adaptive` one, trained along; `paired`, which is that and also says how the head it began with would have drafted;
an adaptive one from `random` weights; `trl`, GRPOTrainer with colocated vLLM and no speculation. In mode `replay` all
arms write responses of the same recorded lengths; the first plain run records them. In mode `natural` end tokens
decide, over `--seeds`: reward at equal steps and at equal time.

Each run has a process of its own. What is finished is on disk, and `--previous` goes on from it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.results_file import about, note_of, save
from benchmarks.common.sizes import take_files
from benchmarks.end_to_end.picture import draw
from benchmarks.end_to_end.report import write_report
from benchmarks.end_to_end.runs import Run, commands_of, read_runs, recorded_lengths, settings_of
from benchmarks.end_to_end.work import FINISHED, ITERATION, RUNGS, STARTED, Work, write_spec

RESULTS = Path(__file__).parents[1] / "results"
OURS, PEER = "benchmarks.end_to_end.arm", "benchmarks.peers.trl_grpo"
ARMS = ("plain", "siblings", "frozen", "adaptive", "paired", "random", "trl")
WITH_HEAD = ("frozen", "adaptive", "paired")
MARGIN = 20.0  # seconds a process is given beyond the time it was told, to close


class Excerpt:
    """What is shown of a failed process: the ends of its first tracebacks, and its last lines.

    Alone the last lines would not do: after a Python error torch may print a hundred frames of C++.
    """

    def __init__(self) -> None:
        self._tracebacks: list[deque[str]] = []
        self._is_inside = False
        self._last = deque[str](maxlen=20)

    def add(self, line: str) -> None:
        """Take in a line; ranks may have put their number before it."""
        self._last.append(line)
        if "Traceback (most recent call last)" in line:
            self._is_inside = True
            self._tracebacks.append(deque(maxlen=16))
        elif not self._is_inside:
            return
        self._tracebacks[-1].append(line)
        self._is_inside = re.match(r"(\[.*?\]:|\(.*?\))?\s*(Traceback|\s\s)", line) is not None

    def lines(self) -> list[str]:
        """The excerpt."""
        return [*(line for lines in self._tracebacks[:3] for line in lines), "[...]", *self._last]


class Bench:
    """Runs what was asked for, as long as there is time, and saves after each run."""

    def __init__(self, args: argparse.Namespace, work: Work, runs: Sequence[Run], earlier: Sequence[str] = ()) -> None:
        self.args, self.work, self.replayed, self.earlier = args, work, work, earlier
        self.runs, self.left_out = list(runs), list[str]()
        self._end = time.perf_counter() + args.seconds
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._specs = tempfile.TemporaryDirectory()
        self._slots: queue.Queue[int] = queue.Queue()
        for slot in range(args.parallel):
            self._slots.put(slot)

    def run_all(self, runs: Sequence[Run]) -> None:
        """Do these runs, `--parallel` at a time."""
        wanted = [run for run in runs if run.key not in {old.key for old in self.runs}]
        with ThreadPoolExecutor(self.args.parallel) as pool:
            list(pool.map(self._run, wanted))

    def _run(self, run: Run) -> None:
        if not self._has_time(run):
            return
        slot = self._slots.get()
        try:
            self._follow(run, slot)
            if run.arm == "trl" and run.error and not run.iterations and self._has_time(run):
                run.note, run.error = f"with vLLM's V1 model runner; with V2 it did not start ({run.error})", ""
                self._follow(run, slot, VLLM_USE_V2_MODEL_RUNNER="0")
        finally:
            self._slots.put(slot)
        with self._lock:
            if run.iterations or run.error:
                self.runs.append(run)
            self.save()

    def _has_time(self, run: Run) -> bool:
        """True if the run would get two iterations to measure, were it as slow as the slowest one so far."""
        count = self.args.warmup + 2
        known = [old.setup_seconds + count * old.seconds / len(old.iterations) for old in self.runs if old.iterations]
        needed, left = max(known, default=0.0) + MARGIN, self._end - time.perf_counter()
        if needed < left:
            return True
        self._say(f"{run.name}: left out, it may need {needed:.0f} s and {left:.0f} s are left")
        with self._lock:
            self.left_out.append(f"{run.name} ({needed:.0f} s needed, {left:.0f} s left)")
        return False

    def _follow(self, run: Run, slot: int, **environment: str) -> None:
        """Start the process of a run and listen to it."""
        seconds = self._end - time.perf_counter() - MARGIN
        self._say(f"{run.name}: starting, {seconds:.0f} s left")
        work = replace(self.replayed if run.mode == "replay" else self.work, seed=run.seed)
        choices: dict[str, Any] = {"until": time.time() + seconds}
        if run.arm != "trl":
            keep = run.arm == "plain" and run.mode == "natural" and run.seed == self.args.seeds[0]
            choices |= {"arm": run.arm, "head": self.args.head, "keep_lengths": keep}
        module = PEER if run.arm == "trl" else OURS
        spec = Path(self._specs.name) / f"{slot}.json"
        write_spec(spec, work, **choices)
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(spec)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self._environment(slot), **environment},
        )
        assert process.stdout is not None
        killer = threading.Timer(seconds + MARGIN, process.kill)
        killer.start()
        finished, output = False, Excerpt()
        for line in process.stdout:
            kind, _, content = line.rstrip().partition(" ")
            if kind in (STARTED, ITERATION, FINISHED):
                finished |= kind == FINISHED
                self._take(run, kind, json.loads(content))
            elif line.strip():
                output.add(line.rstrip())
        status = process.wait()
        killer.cancel()
        if not finished:
            run.error = f"exit status {status} after {len(run.iterations)} iterations"
            self._say(f"{run.name}: {run.error}\n  " + "\n  ".join(output.lines()))

    def _take(self, run: Run, kind: str, content: dict[str, Any]) -> None:
        if kind == STARTED:
            run.setup_seconds, run.device = content["setup_seconds"], content["device"]
            self._say(f"{run.name}: ready after {run.setup_seconds:.0f} s on {run.device}")
        elif kind == ITERATION:
            run.iterations.append(content)
            stages = {name[5:]: value for name, value in content["metrics"].items() if name.startswith("time/")}
            total = stages.pop("iteration")
            parts = ", ".join(f"{name} {value:.2f}" for name, value in stages.items() if value >= 0.005)
            self._say(f"{run.name}: iteration {content['iteration']} {total:.2f} s ({parts})")

    def _environment(self, slot: int) -> dict[str, str]:
        each = self.args.devices
        here = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(each * self.args.parallel)))).split(",")
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        # No more than its own: with others in sight TRL refuses to start.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(here[slot * each : (slot + 1) * each])
        return environment

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", flush=True)

    def save(self) -> None:
        """Write everything known so far."""
        args, work = self.args, self.work
        notes = [args.note]
        if work.is_tiny:
            notes.append("A tiny policy on a CPU: shows that it works, not how fast.")
        if args.devices > 1:
            notes.append(f"Each run on {args.devices} devices, one process each.")
        if args.parallel > 1:
            notes.append(f"{args.parallel} runs at a time, on devices of their own.")
        record = {**about(args.name, note_of(work.policy, *notes), args.seeds[0]), "warmup": args.warmup}
        record |= {"earlier": self.earlier, "left_out": self.left_out, "work": settings_of(work)}
        results = {**record, "runs": [vars(run) for run in self.runs]}
        out = Path(args.out)
        save(out / f"end_to_end_{args.name}.json", results)
        write_report(results, out)
        draw(results, out / f"end_to_end_{args.name}.png")


def plan(args: argparse.Namespace, *, has_lengths: bool) -> list[list[Run]]:
    """The runs in phases, the most wanted first; those of a phase may run at the same time.

    Args:
        args: The command line's.
        has_lengths: Whether there are lengths to replay, or the first plain run is to record them.
    """
    first = args.seeds[0]
    natural = [Run(arm, "natural", seed) for seed in args.seeds for arm in args.natural_arms]
    replays = [Run(arm, "replay", first) for arm in args.arms]
    phases: list[list[Run]] = [[], []]
    if "replay" in args.modes:
        phases[1] += replays
        if not has_lengths:
            phases[0].append(Run("plain", "natural", first))
    if "natural" in args.modes:
        phases[0 if args.parallel > 1 else 1] += [run for run in natural if run.key not in {r.key for r in phases[0]}]
    return phases


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", choices=list(RUNGS), default="25m", help="settings that the others below change")
    parser.add_argument("--name", help="of the result files; the rung by default")
    parser.add_argument("--policy", help="directory of the policy; the rung's by default, as are the next two")
    parser.add_argument("--train", help="file of prompts to train on")
    parser.add_argument("--head", help="directory of an EAGLE-3 head, for the arms that need one")
    parser.add_argument("--draft-sampling", choices=["greedy", "probabilistic"], default="greedy", help="of heads")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="arms of mode replay")
    parser.add_argument("--natural-arms", nargs="+", choices=ARMS, help="arms of mode natural")
    parser.add_argument("--modes", nargs="+", choices=["replay", "natural"], default=["replay", "natural"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="mode replay takes the first")
    parser.add_argument("--iterations", type=int, default=12, help="of each run of mode replay, warm-up included")
    parser.add_argument("--natural-iterations", type=int, help="of each run of mode natural; as many by default")
    parser.add_argument("--warmup", type=int, default=2, help="first iterations of a run that no number counts")
    parser.add_argument("--prompts", type=int, help="prompts of an iteration")
    parser.add_argument("--group-size", type=int, help="responses to each prompt")
    parser.add_argument("--micro-batch-size", type=int, help="sequences in a forward and backward pass")
    parser.add_argument("--max-tokens", type=int, help="longest response")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--lengths", help="results of another rung whose recorded lengths are replayed")
    parser.add_argument("--previous", help="results of this rung to go on from; runs that are in it are not repeated")
    parser.add_argument("--devices", type=int, default=1, help="devices of each run, one process each")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each on devices of its own")
    parser.add_argument("--seconds", type=float, default=540.0, help="time for everything; runs are cut to fit")
    parser.add_argument("--note", default="", help="said below the title, for instance that the model is padded")
    parser.add_argument("--out", default=os.environ.get("OUT", str(RESULTS)), help="directory of the results")
    parser.add_argument("--tiny", dest="rung", action="store_const", const="tiny", help="--rung tiny: on a CPU")
    args = parser.parse_args()
    args.name = args.name or args.rung
    take_files(args)
    possible = [arm for arm in ARMS if args.head or arm not in WITH_HEAD]
    if args.devices > 1:
        possible.remove("trl")
    args.arms = args.arms or possible
    args.natural_arms = args.natural_arms or ["plain", "adaptive" if args.head else "siblings"]
    if needing := [arm for arm in (*args.arms, *args.natural_arms) if arm in WITH_HEAD and not args.head]:
        parser.error(f"the arms {needing} need `--head`")
    if args.devices > 1 and "trl" in (*args.arms, *args.natural_arms):
        parser.error("the arm `trl` runs on one device; leave it out of `--arms`, or set `--devices 1`")
    import torch

    if args.rung != "tiny" and torch.cuda.device_count() < (wanted := args.devices * args.parallel):
        parser.error(
            f"`--devices` {args.devices} x `--parallel` {args.parallel} take {wanted} GPUs, and "
            f"{torch.cuda.device_count()} are in sight; lower them, or try it with `--tiny`"
        )
    return args


def main() -> None:
    """Run everything that fits into the time."""
    args = parse()
    given = ("prompts", "group_size", "micro_batch_size", "max_tokens", "lr", "draft_sampling", "devices")
    chosen = {name: getattr(args, name) for name in given if getattr(args, name) is not None}
    settings = {**RUNGS[args.rung], **chosen, "iterations": args.natural_iterations or args.iterations}
    work = Work(policy=args.policy, train=args.train, **settings).fitted()
    bench = Bench(args, work, read_runs(args.previous, work), commands_of(args.previous))
    lengths = recorded_lengths(read_runs(args.lengths) if args.lengths else bench.runs)
    first, second = plan(args, has_lengths=lengths is not None)
    bench.run_all(first)
    if any(run.mode == "replay" for run in second):
        lengths = lengths or recorded_lengths(bench.runs)
        if lengths is None:
            raise SystemExit("There are no lengths to replay: the plain run that records them failed, see above.")
        bench.replayed = replace(work, lengths=lengths, iterations=args.iterations).fitted()
    bench.run_all(second)
    bench.save()
    print((Path(args.out) / f"end_to_end_{args.name}.md").read_text())


if __name__ == "__main__":
    main()
