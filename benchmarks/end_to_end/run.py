"""Time a GRPO iteration by stages, with speculation and drafter off and on, and under TRL.

    python -m benchmarks end_to_end --size 25m
    python -m benchmarks end_to_end --size 7b --lengths benchmarks/results/end_to_end_25m.json --modes replay \
        --iterations 5 --warmup 1

`--tiny` runs everything on a CPU with the quickstart's policy. Arms: the `plain` engine; `siblings`; a `frozen` head;
an `adaptive` one, trained along; an adaptive one from `random` weights, alone or beside siblings as in
recipes/adaptive_drafter.yaml (`random-siblings`); where asked for, a DSpark head in the place of these, on a GPU alone
(`random-block`, `random-block-siblings`); `trl`, GRPOTrainer with colocated vLLM and no speculation; in mode `natural`
also `plain`, `siblings` and `frozen` with a schedule, as in `plain+tail` and `frozen+partial`; `+recompute` and `+keep`
take weights amid the writing, at most an iteration ahead, in an engine that does not sleep; `+ray0`, `1`, `2` and `4`
train on half of `--devices` and write on the others, at most so many iterations ahead. In mode `replay` all arms write
responses of the same recorded lengths; the first plain run records them. In mode `natural` end tokens decide, over
`--seeds`: reward at equal steps and at equal time.

Each run has a process of its own. What is finished is on disk, and `--previous` goes on from it; on several GPUs, start
a command for each with seeds and a `--name` of its own, and let one without `--modes` join their files.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import sized_parser_of, take_size
from benchmarks.common.processes import end_process
from benchmarks.common.results import about, note_of, save
from benchmarks.common.shapes import SHAPES
from benchmarks.end_to_end.report import render
from benchmarks.end_to_end.work import SETTINGS, Diary, Work
from benchmarks.peers.trl_grpo import run_peer

ARMS = ("plain", "siblings", "frozen", "adaptive", "random", "random-siblings", "trl")
BLOCKS = ("random-block", "random-block-siblings")
WITH_HEAD = ("frozen", "adaptive")
SCHEDULES = ("tail", "partial", "recompute", "keep", "ray0", "ray1", "ray2", "ray4")
SCHEDULED = tuple(f"{arm}+{name}" for arm in ("plain", "siblings", "frozen") for name in SCHEDULES)
GIVEN = (
    *("group_size", "micro_batch_tokens", "micro_batch_size", "max_tokens", "lr", "draft_sampling", "devices"),
    *("strategy", "gradient_checkpointing", "lora_rank", "tensor_parallel", "gpu_memory_utilization"),
)
PROCESSES = multiprocessing.get_context("spawn")
MARGIN = 20.0  # seconds a process is given beyond the time it was told, to close


@dataclass
class Run:
    """Holds one arm with one seed, and its results."""

    arm: str
    mode: str
    seed: int
    setup_seconds: float = 0.0
    device: str = ""
    error: str = ""
    planned: dict[str, float] = field(default_factory=dict)
    iterations: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.arm} {self.mode} seed {self.seed}"

    @property
    def seconds(self) -> float:
        """Seconds of its iterations."""
        return sum(row["metrics"]["time/iteration"] for row in self.iterations)


class Bench:
    """Runs the runs of the command line while there is time, and saves after each.

    `work` is that of mode natural; that of mode replay is set when its lengths are known. `runs` are done, by the
    commands `earlier`.
    """

    def __init__(self, args: argparse.Namespace, work: Work, runs: Sequence[Run], earlier: Sequence[str] = ()) -> None:
        self.args, self.work, self.replayed, self.earlier = args, work, work, earlier
        self.runs, self.left_out = list(runs), list[str]()
        self._end = time.time() + args.seconds

    def run_all(self, runs: Sequence[Run]) -> None:
        """Do these runs, unless they are done; no run is begun that could not be measured."""
        for run in runs:
            if str(run) in map(str, self.runs):
                continue
            needed, left = self.seconds_needed(), self._end - time.time()
            if needed > left:
                self.left_out.append(f"{run} ({needed:.0f} s needed, {left:.0f} s left)")
            else:
                self.follow(run, left - MARGIN)
                self.runs.append(run)
            self.save()

    def seconds_needed(self) -> float:
        """Return what two measured iterations take in a run as slow as the slowest one so far."""
        count = self.args.warmup + 2
        known = [old.setup_seconds + count * old.seconds / len(old.iterations) for old in self.runs if old.iterations]
        return max(known, default=0.0) + MARGIN

    def follow(self, run: Run, seconds: float) -> None:
        """Do a run in a process of its own, and read its diary whatever became of it."""
        print(f"--- {run}: {seconds:.0f} s left", flush=True)
        work = replace(self.replayed if run.mode == "replay" else self.work, seed=run.seed)
        work = work.beside() if "+ray" in run.arm else work
        with tempfile.TemporaryDirectory() as folder:
            diary = Diary(Path(folder, "diary.jsonl"), time.time() + seconds)
            target: Callable[..., None] = run_peer if run.arm == "trl" else run_arm
            arguments: tuple[Any, ...] = (work, diary.path, diary.until)
            if run.arm != "trl":
                keep = run.arm == "plain" and run.mode == "natural" and run.seed == self.args.seeds[0]
                arguments = (work, run.arm, next(iter(self.args.head), None), diary.path, diary.until, keep)
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            ranks = [
                PROCESSES.Process(target=_be_rank, args=(rank, port, target, *arguments))
                for rank in range(work.devices)
            ]
            for process in ranks:
                process.start()
            until = time.time() + seconds + MARGIN
            if work.micro_batch_tokens is not None and run.arm == "plain":
                run.planned = planned_apart(work)  # while the ranks start
            for process in ranks:
                end_process(process, until - time.time())
            for told in diary.read():
                if "iteration" in told:
                    run.iterations.append(told)
                else:
                    run.setup_seconds, run.device = told["setup_seconds"], told["device"]
        if status := next((each.exitcode for each in ranks if each.exitcode), 0):
            run.error = f"exit status {status} after {len(run.iterations)} iterations"
        print(f"--- {run}: {len(run.iterations)} iterations in {run.seconds:.1f} s {run.error}", flush=True)

    def save(self) -> None:
        """Write everything known so far."""
        args, stem = self.args, self.args.out / f"end_to_end_{self.args.name}"
        tiny = "A tiny policy on a CPU: shows that it works, not how fast." * args.tiny
        record = about(args.name, note_of(self.work.policy, args.note, tiny), args.seeds[0])
        record |= {"warmup": args.warmup, "earlier": self.earlier, "left_out": self.left_out}
        results = {**record, "work": settings_of(self.work), "runs": [vars(run) for run in self.runs]}
        save(stem, results, render(results))


def _be_rank(rank: int, port: int, run: Callable[..., None], work: Work, *arguments: Any) -> None:
    """Run as one of the ranks that Lightning would start itself, which would run the command line anew.

    A process that is alone is no rank: TRL would wait for others.
    """
    faulthandler.enable()
    if work.devices > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run(work, *arguments)


def settings_of(work: Work) -> dict[str, Any]:
    """Return what all runs share."""
    return {name: value for name, value in vars(work).items() if name not in ("lengths", "seed")}


def recorded_lengths(runs: Sequence[Run]) -> list[list[int]] | None:
    """Return the lengths of the plain natural run, by iteration and request, or None."""
    for run in runs:
        lengths = [row["lengths"] for row in run.iterations if "lengths" in row]
        if run.arm == "plain" and run.mode == "natural" and lengths:
            return lengths
    return None


def read_runs(path: Path, work: Work | None = None) -> list[Run]:
    """Return the runs of a file of results that did not fail; failed ones are tried again.

    Raises:
        ValueError: They did other work than `work`; where files lie and how many iterations there are may differ.
    """
    results = json.loads(path.read_text())
    for name, value in {} if work is None else settings_of(work).items():
        if name not in ("policy", "train", "iterations") and results["work"].get(name, value) != value:
            raise ValueError(
                f"`--previous` {path} was measured with `{name}` {results['work'].get(name)}, this run has {value}; "
                "give this one a `--name` of its own."
            )
    names = Run.__dataclass_fields__
    found = [Run(**{name: value for name, value in run.items() if name in names}) for run in results["runs"]]
    return [run for run in found if not run.error]


def commands_of(path: Path) -> list[str]:
    """Return the commands behind a file of results, the first one first."""
    results = json.loads(path.read_text())
    return [*results.get("earlier", []), results["command"]]


def run_arm(*arguments: Any) -> None:
    """Run an arm in this process, the only one that has to wait for the import of all that it uses."""
    from benchmarks.end_to_end import arm

    arm.run_arm(*arguments)


def planned_apart(work: Work) -> dict[str, float]:
    """Return the forecast of a run's memory, without which no run has to do."""
    from benchmarks.end_to_end.planned import planned

    try:
        return planned(work)
    except Exception as error:
        print(f"No forecast: {error}", flush=True)
        return {}


def plan(args: argparse.Namespace, *, has_lengths: bool) -> tuple[list[Run], list[Run]]:
    """Return the run that must record lengths, if any, and all runs, most wanted first."""
    first = args.seeds[0]
    replays = [Run(arm, "replay", first) for arm in args.arms] if "replay" in args.modes else []
    natural = [Run(arm, "natural", seed) for seed in args.seeds for arm in args.natural_arms]
    recording = [Run("plain", "natural", first)] if replays and not has_lengths else []
    return recording, replays + (natural if "natural" in args.modes else [])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = sized_parser_of(__doc__)
    parser.add_argument("--name", help="of the result files; the size by default")
    parser.add_argument("--draft-sampling", choices=["greedy", "probabilistic"], default="greedy", help="of heads")
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, *BLOCKS), help="arms of mode replay")
    parser.add_argument("--natural-arms", nargs="+", choices=(*ARMS, *BLOCKS, *SCHEDULED), help="arms of mode natural")
    parser.add_argument("--modes", nargs="*", choices=["replay", "natural"], default=["replay", "natural"])
    parser.add_argument("--seeds", nargs="+", type=int, help="mode replay takes the first; `--seed` and the next two")
    parser.add_argument("--iterations", type=int, default=12, help="of each run of mode replay, warm-up included")
    parser.add_argument("--natural-iterations", type=int, help="of each run of mode natural; as many by default")
    parser.add_argument("--warmup", type=int, default=2, help="first iterations of a run that no number counts")
    parser.add_argument("--prompts-per-iteration", dest="num_prompts", type=int, help="prompts of an iteration")
    parser.add_argument("--group-size", type=int, help="responses to each prompt")
    parser.add_argument("--micro-batch-tokens", type=int, help="most tokens in a forward and backward pass")
    parser.add_argument("--micro-batch-size", type=int, help="sequences in one of TRL's")
    parser.add_argument("--max-tokens", type=int, help="longest response")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--lora-rank", type=int, help="of adapters; 0 trains all weights")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again")
    parser.add_argument("--devices", type=int, default=1, help="ranks, with a device each, or engines; TRL's has one")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp", help="of several ranks")
    parser.add_argument("--tensor-parallel", type=int, help="devices of an engine")
    parser.add_argument("--engine-share", type=float, dest="gpu_memory_utilization", help="of a device's memory")
    parser.add_argument("--shape", choices=list(SHAPES), help="write random weights of it to `--policy`, if not there")
    parser.add_argument("--lengths", type=Path, help="results of another size whose recorded lengths are replayed")
    parser.add_argument("--cut-lengths", type=int, help="tokens at which replayed lengths are cut")
    parser.add_argument("--previous", type=Path, nargs="*", default=[], help="results to go on from")
    args = parser.parse_args(arguments)
    if args.shape and not Path(args.policy, "config.json").exists():
        from benchmarks.common.random_policy import write_random

        write_random(SHAPES[args.shape], args.policy)
    take_size(args, trains=True)
    args.name, args.seeds = args.name or args.size, args.seeds or [args.seed, args.seed + 1, args.seed + 2]
    args.arms = args.arms or [arm for arm in ARMS if args.head or arm not in WITH_HEAD]
    args.natural_arms = args.natural_arms or ["plain", "adaptive" if args.head else "siblings"]
    if needing := [arm for arm in (*args.arms, *args.natural_arms) if arm.split("+")[0] in WITH_HEAD and not args.head]:
        parser.error(f"the arms {needing} need `--head`")
    if args.devices < 2 and any("+ray" in arm for arm in args.natural_arms):
        parser.error(f"`--devices` {args.devices} leaves none to engines beside the trainer: give 2 or more")
    return args


def main(arguments: Sequence[str]) -> None:
    """Run everything that fits into the time."""
    args = parse(arguments)
    chosen = {name: getattr(args, name) for name in GIVEN if getattr(args, name) is not None}
    settings = {**SETTINGS[args.size], **chosen, "iterations": args.natural_iterations or args.iterations}
    settings["is_random"] = args.shape is not None
    if args.cut_lengths and args.max_tokens is None:
        settings["max_tokens"] = args.cut_lengths
    if args.num_prompts is not None:
        settings["prompts"] = args.num_prompts
    work = Work(policy=args.policy, train=args.prompts, **settings).fitted()
    runs = [run for path in args.previous for run in read_runs(path, work)]
    bench = Bench(args, work, runs, [command for path in args.previous for command in commands_of(path)])
    lengths = recorded_lengths(read_runs(args.lengths) if args.lengths else bench.runs)
    recording, wanted = plan(args, has_lengths=lengths is not None)
    bench.run_all(recording)
    if any(run.mode == "replay" for run in wanted):
        lengths = lengths or recorded_lengths(bench.runs)
        if lengths is None:
            raise SystemExit("There are no lengths to replay: the plain run that records them failed, see above.")
        if args.cut_lengths:
            lengths = [[min(length, args.cut_lengths) for length in each] for each in lengths]
        bench.replayed = replace(work, lengths=lengths, iterations=args.iterations).fitted()
    bench.run_all(wanted)
    bench.save()
    print((args.out / f"end_to_end_{args.name}.md").read_text())
