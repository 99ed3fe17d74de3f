"""Does a rank that trains the drafter in its idle window slow down the one that still writes? How much does it use?

    python -m benchmarks idle_windows --policy target/policy --head target/head --train target/train.jsonl

`--tiny` runs it on two CPU processes with the quickstart's policy and a random head, to see that it works.

The last rank writes long responses, the others short ones, ends ignored. In the first `--learning` iterations policy
and drafter learn, the drafter in every idle window. From then on both learning rates are 0, so that every iteration
does the same work, and the drafter is trained in every second window only. The pace of the last rank, in engine steps
per second, is counted while the windows of the others are open. Rank zero saves all results after every iteration.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from benchmarks.common.results_file import about, heading, note_of, save, table
from benchmarks.common.sizes import take_files
from benchmarks.end_to_end.arm import modules_of, trainer_of
from benchmarks.end_to_end.report import spread
from benchmarks.end_to_end.work import RUNGS, Work
from tlt_lightning.data.batch import Rollout
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.hooks import IdleWindow, RolloutCallback
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.speculation import FixedSelector

NUM_DRAFT_TOKENS = 3
ASKED = 0.98
"""Share of its pace that the rank that still writes must keep."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "25m": {"iterations": 16, "learning": 4, "short": 256, "long": 2048, "lr": 2e-4, "prompts": 8, "group_size": 8},
    "tiny": {"iterations": 9, "learning": 3, "short": 16, "long": 128, "lr": 5e-4, "prompts": 2, "group_size": 4},
}
"""By rung; `prompts` are those of a rank."""

Rows = list[dict[str, Any]]
Steps = Sequence[tuple[float, int]]
"""(seconds on the host's clock, requests still running) after each engine step of a rollout."""


class Witness(RolloutCallback):
    """Ends the learning, and tells all iterations so far after each; stands before the drafter's callback."""

    def __init__(self, learning: int, tell: Callable[[Rows], None]) -> None:
        super().__init__()
        self.drafting: LongTailIdleCallback
        self._learning, self._tell = learning, tell
        self._is_measuring = False
        self._steps: list[tuple[float, int]] = []
        self._opened: float | None = None
        self._paces: dict[str, float | None] = {}
        self._rows: Rows = []

    def hold(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Let an optimizer's step change nothing once learning is over; a hook that it runs before each step."""
        if self._is_measuring:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self.hold)

    @override
    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps, self._opened = [], None
        self._is_measuring = trainer.current_epoch >= self._learning
        if self._is_measuring:
            self.drafting.every_n_iterations = 2

    @override
    def on_rollout_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, progress: RolloutProgress) -> None:
        self._steps.append((time.perf_counter(), progress.running))

    @override
    def on_rollout_idle(self, trainer: L.Trainer, pl_module: L.LightningModule, window: IdleWindow) -> None:
        self._opened = time.perf_counter()  # of the host, the same in all its processes

    @override
    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        ranks: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(ranks, (self._opened, self._steps))
        self._paces = paces_of([opened for opened, _ in ranks[:-1]], ranks[-1][1])

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        after_training = bool(self._rows and self._rows[-1]["micro_steps"])
        row = row_of(iteration, metrics, trainer.world_size, self._learning, after_training=after_training)
        self._rows.append(row | self._paces)
        if trainer.is_global_zero:
            self._tell(self._rows)


def paces_of(opened: Sequence[float | None], steps: Steps) -> dict[str, float | None]:
    """The late rank's engine steps per second: while all others are idle, and of that until its first request is done.

    Until then all iterations do the same, step for step; how the batch shrinks afterwards is chance. `opened` says when
    the others' windows opened, on the clock of `steps`; None for one that never did.
    """
    begins = [moment for moment in opened if moment is not None]
    counted = [step for step in steps if len(begins) == len(opened) and step[0] >= max(begins)]
    full = max((running for _, running in steps), default=0)
    return {"pace": _rate(counted), "pace_full": _rate([step for step in counted if step[1] == full])}


def _rate(steps: Steps) -> float | None:
    return (len(steps) - 1) / (steps[-1][0] - steps[0][0]) if len(steps) > 1 else None


def row_of(
    iteration: int, metrics: Mapping[str, float], devices: int, learning: int, *, after_training: bool
) -> dict[str, Any]:
    """What is kept of an iteration, counted from 1; times and micro-steps are those of a rank that waits.

    `metrics` are means over the ranks, of which the late one neither waits nor trains. What an iteration did not log
    is still there from an earlier one: a decision is of this iteration only if the one before trained.
    """
    share = devices / (devices - 1)
    micro_steps = round(metrics["drafter/micro_steps"] * share, 6)
    kind = "learning" if iteration <= learning else "training" if micro_steps else "waiting"
    decision = metrics if after_training else {}
    published = decision.get("drafter/published")
    return {
        "iteration": iteration,
        "kind": "warm-up" if iteration == 1 else kind,
        "idle_s": metrics["drafter/idle_seconds_available"] * share,
        "used_s": metrics["drafter/idle_seconds_used"] * share,
        "micro_steps": micro_steps,
        "preemption_ms": metrics.get("drafter/preemption_ms") if micro_steps else None,
        "acceptance_length": metrics.get("speculation/acceptance_length"),
        "published_before": None if published is None else "yes" if published else "no",
        "held_out_old": decision.get("drafter/acceptance_before"),
        "held_out_new": decision.get("drafter/acceptance_after"),
        "policy_drift": metrics.get("drafter/policy_drift"),
    }


def neighbour_ratios(paces: Mapping[int, float], others: Mapping[int, float], distance: int) -> list[float]:
    """Each pace over the mean of `others`, all by iteration, `distance` before and after it: slow drift cancels."""
    around = {i: [others[j] for j in (i - distance, i + distance) if j in others] for i in paces}
    return [paces[i] / statistics.mean(beside) for i, beside in around.items() if beside]


def paces_compared(rows: Rows, name: str) -> dict[str, list[float]]:
    """The late rank's paces by what the others did, their ratios, and those of waiting iterations among themselves."""
    waiting, training = (
        {row["iteration"]: row[name] for row in rows if row["kind"] == kind and row[name] is not None}
        for kind in ("waiting", "training")
    )
    ratios = {"ratio": neighbour_ratios(training, waiting, 1), "noise": neighbour_ratios(waiting, waiting, 2)}
    return {"others wait": list(waiting.values()), "others train": list(training.values()), **ratios}


def windows_of(rows: Rows, kind: str) -> dict[str, Any]:
    """What an early rank made of its windows in iterations of this kind, on average; empty if they never trained."""
    chosen = [row for row in rows if row["kind"] == kind]
    late = [row["preemption_ms"] for row in chosen if row["preemption_ms"] is not None]
    if not late:
        return {}
    names = ("idle_s", "used_s", "micro_steps")
    idle, used, micro_steps = (statistics.mean(row[name] for row in chosen) for name in names)
    return {
        "iterations": f"{len(chosen)} {kind}",
        **{"idle_s": idle, "used_s": used, "share_used": used / idle},
        **{"micro_steps_a_window": micro_steps, "s_a_micro_step": used / micro_steps},
        **{"preemption_ms_median": statistics.median(late), "preemption_ms_max": max(late)},
    }


def summarise(rows: Rows) -> dict[str, Any]:
    """The answers: is the late rank slowed, and how much of the idle time is used?"""
    paces = {name: paces_compared(rows, name) for name in ("pace", "pace_full")}
    return {**paces, "windows": [found for kind in ("learning", "training") if (found := windows_of(rows, kind))]}


def verdict(ratios: Sequence[float]) -> str:
    """Whether the late rank keeps its pace, in a sentence."""
    if not ratios:
        return "Not measured: it takes an iteration that trains and one beside it that does not."
    middle = statistics.median(ratios)
    return f"Asked: at least {ASKED}; the median is {middle:.4f}: {'kept' if middle >= ASKED else '**not kept**'}."


def render(results: dict[str, Any]) -> str:
    """The report in Markdown."""
    work, summary = results["work"], results["summary"]
    lines = heading("Training in idle windows beside a rank that still writes", results)
    lines += [
        f"{work['devices']} ranks with a device each write {work['responses']} responses each, the last rank "
        f"{work['long']} tokens long, the others {work['short']}, drafting {NUM_DRAFT_TOKENS} tokens in every step. In "
        f"the first {work['learning']} iterations policy (rate {work['lr']:g}) and drafter ({work['drafter_lr']:g}) "
        "learn; then both rates are 0, and the drafter is trained in every second idle window with all else the same. "
        "A ratio is the pace of an iteration that trains over the mean of those beside it, in which the others only "
        "waited; `noise` compares the latter among themselves. Medians with quartiles. The first iteration warms up.",
        "",
        *_pace_table(summary),
        verdict(summary["pace"]["ratio"]),
        "",
        "Of the early ranks, on average:",
        "",
        *_table(summary["windows"]),
        *_table(results["iterations"]),
        "`pace` and `pace_full`: the late rank's engine steps per second, as above; `preemption_ms`: at most so late a "
        "window was left; `acceptance_length`: tokens per step and request in the rollout; `published_before` and "
        "`held_out`: the decision on what the iteration before trained.",
    ]
    return "\n".join(lines)


def _pace_table(summary: dict[str, Any]) -> list[str]:
    digits = {"others wait": 1, "others train": 1, "ratio": 4, "noise": 4}
    lines: list[list[Any]] = []
    for name, when in (("pace", "while others are idle (counts)"), ("pace_full", "until its first request is done")):
        found = summary[name]
        cells = [spread(found[column], some) if found[column] else None for column, some in digits.items()]
        lines.append([when, len(found["ratio"]), *cells])
    return table(["late rank, engine steps/s", "pairs", *digits], lines)


def _table(items: Rows) -> list[str]:
    lines = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in item.values()] for item in items]
    return table(list(items[0]), lines) if items else []


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", choices=list(DEFAULTS), default="25m", help="settings that the others below change")
    parser.add_argument("--policy", help="directory of the policy; the rung's by default, as are the next two")
    parser.add_argument("--head", help="directory of its EAGLE-3 head; the tiny rung trains a random one")
    parser.add_argument("--train", help="file of prompts to train on")
    parser.add_argument("--devices", type=int, default=2, help="ranks, with a device each; the last one is late")
    parser.add_argument("--iterations", type=int, help="in all, the first, which warms up, included")
    parser.add_argument("--learning", type=int, help="first iterations, in which policy and drafter learn")
    parser.add_argument("--short", type=int, help="tokens of the early ranks' responses")
    parser.add_argument("--long", type=int, help="tokens of the last rank's responses")
    parser.add_argument("--lr", type=float, help="learning rate of the policy")
    parser.add_argument("--seed", type=int, default=0)
    results = os.environ.get("OUT", str(Path(__file__).parents[1] / "results"))
    parser.add_argument("--out", default=results, help="directory of the results")
    parser.add_argument("--tiny", dest="rung", action="store_const", const="tiny", help="--rung tiny: on a CPU")
    args = parser.parse_args()
    take_files(args)
    for name, value in DEFAULTS[args.rung].items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if problem := problem_of(args, 0 if args.rung == "tiny" else torch.cuda.device_count()):
        parser.error(problem)
    return args


def problem_of(args: argparse.Namespace, present: int) -> str | None:
    """What is wrong with the arguments on a machine with `present` GPUs, and how to mend it; None if nothing is."""
    if args.devices < 2:
        return f"`--devices` is {args.devices}; somebody has to wait for somebody: give at least 2"
    if args.rung != "tiny" and present < args.devices:
        return f"`--devices` {args.devices} takes as many GPUs, and {present} are in sight; try it with `--tiny`"
    if not 0 < args.short < args.long:
        return f"`--short` {args.short} must be positive and less than `--long` {args.long}"
    if args.learning < 1 or args.iterations < args.learning + 3:
        return f"`--iterations` {args.iterations} must be 3 more than `--learning` {args.learning}, which is at least 1"
    missing = [path for path in (args.train, args.head) if path is not None and not Path(path).exists()]
    return f"{missing[0]} is not there; `target/run.py --out target` makes the rung's files" if missing else None


def work_of(args: argparse.Namespace) -> Work:
    """The same lengths in every iteration, short ones for all ranks but the last."""
    each = args.prompts * args.group_size
    lengths = [args.short] * each * (args.devices - 1) + [args.long] * each
    settings = {name: getattr(args, name) for name in ("iterations", "group_size", "lr", "devices", "seed")}
    settings |= {"prompts": args.prompts * args.devices, "max_tokens": args.long}
    settings["lengths"] = [lengths] * args.iterations
    return Work(policy=args.policy, train=args.train, **{**RUNGS[args.rung], **settings}).fitted()


def run(work: Work, head: str | None, learning: int, tell: Callable[[Rows], None]) -> L.Trainer:
    """Train; on several ranks Lightning starts this script once more for each."""
    L.seed_everything(work.seed, verbose=False)
    witness = Witness(learning, tell)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=work.drafter_lr, weight_decay=0.0)
        made.register_step_pre_hook(witness.hold)
        return made

    drafter = DrafterModule(work.policy, head=head, optimizer=optimizer)
    witness.drafting = LongTailIdleCallback(drafter, pack_tokens=work.pack_tokens)
    selector, longest = FixedSelector(NUM_DRAFT_TOKENS), NUM_DRAFT_TOKENS
    module, data = modules_of(work, Speculation(cold_head=True, selector=selector, max_draft_tokens=longest))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(work, folder, [witness, witness.drafting])
        trainer.fit(module, data)
    return trainer


def main() -> None:
    """Run, and save what is known after every iteration."""
    args = parse()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    work = work_of(args)
    settings = {name: getattr(args, name) for name in ("devices", "iterations", "learning", "short", "long", "lr")}
    settings |= {"responses": args.prompts * args.group_size, "drafter_lr": work.drafter_lr, "head": args.head}
    note = note_of(args.policy, "A tiny policy on CPUs: shows that it works, not how fast." * work.is_tiny)
    report = Path(args.out) / f"idle_windows_{args.rung}.md"

    def tell(rows: Rows) -> None:
        record = about(args.rung, note, args.seed, on_cpu=work.is_tiny)
        results = {**record, "work": settings, "summary": summarise(rows), "iterations": rows}
        save(report.with_suffix(".json"), results)
        report.write_text(render(results))

    if run(work, args.head, args.learning, tell).is_global_zero:
        print(report.read_text())


if __name__ == "__main__":
    main()
