"""Measure the use of idle windows, and if training in them slows the rank that still writes.

    python -m benchmarks idle_windows --size 25m

`--tiny` runs it on two CPU processes with the quickstart's policy and a random head, to see that it works.

The last rank writes long responses, the others short ones, ends ignored. In the first iterations policy
and drafter learn, the drafter in every idle window. From then on both learning rates are 0, so that every iteration
does the same work, and the drafter is trained in every second window only. The pace of the last rank, in engine steps
per second, is counted while the windows of the others are open. Rank zero saves all results after every iteration.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from benchmarks.common.arguments import sized_parser_of, take_size
from benchmarks.common.results import about, heading, note_of, save, table
from benchmarks.common.statistics import middle, spread
from benchmarks.end_to_end.arm import modules_of, trainer_of
from benchmarks.end_to_end.work import SETTINGS, Work
from tlt_lightning.data.batch import Rollout
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.hooks import IdleWindow, RolloutCallback
from tlt_lightning.long_tail.budget import FixedBudget
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.speculation import FixedSelector

NUM_DRAFT_TOKENS = 3
ASKED = 0.98
"""Share of its pace that the rank that still writes must keep."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "25m": {"iterations": 16, "learning": 4, "short": 256, "long": 2048, "lr": 2e-4, "each": 8, "group_size": 8},
    "tiny": {"iterations": 9, "learning": 3, "short": 16, "long": 128, "lr": 5e-4, "each": 2, "group_size": 4},
}
"""By size; `each` is the prompts of a rank."""
IDLE, USED, STEPS = (f"drafter/{name}" for name in ("idle_seconds_available", "idle_seconds_used", "micro_steps"))

Rows = list[dict[str, Any]]


class Witness(RolloutCallback):
    """Ends the learning, and saves each iteration; stands before the drafter's callback."""

    def __init__(self, learning: int, tell: Callable[[Rows], None]) -> None:
        super().__init__()
        self.drafting: LongTailIdleCallback
        self._learning, self._tell = learning, tell
        self._is_measuring = False
        self._steps: list[float] = []
        self._opened: float | None = None
        self._pace: float | None = None
        self._rows: Rows = []

    def hold(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Stop an optimizer's changes once learning is over; a hook before each step."""
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
            self.drafting.budget = FixedBudget(0.0, every_n_iterations=2)

    @override
    def on_rollout_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, progress: RolloutProgress) -> None:
        self._steps.append(time.perf_counter())

    @override
    def on_rollout_idle(self, trainer: L.Trainer, pl_module: L.LightningModule, window: IdleWindow) -> None:
        self._opened = time.perf_counter()  # of the host, the same in all its processes

    @override
    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        ranks: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(ranks, (self._opened, self._steps))
        self._pace = pace_of([opened for opened, _ in ranks[:-1]], ranks[-1][1])

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        self._rows.append(row_of(iteration, metrics, trainer.world_size, self._learning) | {"pace": self._pace})
        if trainer.is_global_zero:
            self._tell(self._rows)


def pace_of(opened: Sequence[float | None], steps: Sequence[float]) -> float | None:
    """Return the late rank's engine steps per second while all others are idle.

    Args:
        opened: When the windows of the others opened, on the clock of `steps`; None for one that never did.
        steps: When the late rank's engine steps ended.
    """
    begins = [moment for moment in opened if moment is not None]
    counted = [step for step in steps if len(begins) == len(opened) and step >= max(begins)]
    return (len(counted) - 1) / (counted[-1] - counted[0]) if len(counted) > 1 else None


def row_of(iteration: int, metrics: Mapping[str, float], devices: int, learning: int) -> dict[str, Any]:
    """Return the row of an iteration, counted from 1, with times of a rank that waits.

    `metrics` are means over the ranks, of which the late one neither waits nor trains.
    """
    share = devices / (devices - 1)
    micro_steps = round(metrics[STEPS] * share, 6)
    kind = "learning" if iteration <= learning else "training" if micro_steps else "waiting"
    return {
        "iteration": iteration,
        "kind": "warm-up" if iteration == 1 else kind,
        "idle s": metrics[IDLE] * share,
        "used s": metrics[USED] * share,
        "micro-steps": micro_steps,
        "left late by ms": metrics.get("drafter/preemption_ms") if micro_steps else None,
        "acceptance length": metrics.get("speculation/acceptance_length"),
    }


def summarise(rows: Rows) -> dict[str, list[float]]:
    """Return the late rank's paces in windows with and without training, and their ratios."""
    waiting, training = (
        {row["iteration"]: row["pace"] for row in rows if row["kind"] == kind and row["pace"] is not None}
        for kind in ("waiting", "training")
    )
    beside = {i: [waiting[j] for j in (i - 1, i + 1) if j in waiting] for i in training}  # slow drift cancels
    ratios = [training[i] / statistics.mean(paces) for i, paces in beside.items() if paces]
    return {"others wait": list(waiting.values()), "others train": list(training.values()), "ratio": ratios}


def verdict(rows: Rows) -> list[str]:
    """Say if the late rank keeps its pace, and the share of idle time that is used."""
    kept = middle(summarise(rows)["ratio"])
    if kept is None:
        return ["Not measured: it takes an iteration that trains and one beside it that does not."]
    training = [row for row in rows if row["kind"] == "training"]
    used, idle = (sum(row[name] for row in training) for name in ("used s", "idle s"))
    return [
        f"Asked: at least {ASKED}; the median is {kept:.4f}: {'kept' if kept >= ASKED else '**not kept**'}. "
        f"Iterations that train use {used / idle:.0%} of the idle time."
    ]


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    work, rows = results["work"], results["iterations"]
    lines = heading("Training in idle windows beside a rank that still writes", results)
    lines += [
        f"{work['devices']} ranks with a device each write {work['each'] * work['group_size']} responses each, the "
        f"last rank {work['long']} tokens long, the others {work['short']}, {NUM_DRAFT_TOKENS} drafts a step. In "
        f"the first {work['learning']} iterations policy (rate {work['lr']:g}) and drafter learn; then both rates "
        "are 0, and the drafter is trained in every second idle window with all else the same. A ratio is the pace of "
        "an iteration that trains over the mean of those beside it, in which the others only waited. Medians with "
        "quartiles. The first iteration warms up.",
        "",
    ]
    paces = summarise(rows)
    cells = [spread(values, 1 if name.startswith("others") else 4) for name, values in paces.items()]
    lines += table(["late rank, engine steps/s", *paces], [["while others are idle", *cells]])
    return [*lines, *verdict(rows), "", *table(list(rows[0]), [list(row.values()) for row in rows])]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = sized_parser_of(__doc__)
    parser.add_argument("--devices", type=int, default=2, help="ranks, with a device each; the last one is late")
    args = parser.parse_args(arguments)
    take_size(args, trains=True)
    present = args.devices if args.tiny else torch.cuda.device_count()
    if not 2 <= args.devices <= present:
        parser.error(f"`--devices` {args.devices} must be at least 2, and {present} are in sight; try `--tiny`")
    return argparse.Namespace(**vars(args), **DEFAULTS[args.size])


def work_of(args: argparse.Namespace) -> Work:
    """Return the work: equal lengths in all iterations, short for all ranks but the last."""
    each = args.each * args.group_size
    lengths = [args.short] * each * (args.devices - 1) + [args.long] * each
    settings = {name: getattr(args, name) for name in ("iterations", "group_size", "lr", "devices", "seed")}
    settings |= {"prompts": args.each * args.devices, "max_tokens": args.long}
    settings["lengths"] = [lengths] * args.iterations
    return Work(policy=args.policy, train=args.prompts, **{**SETTINGS[args.size], **settings}).fitted()


def main(arguments: Sequence[str]) -> None:
    """Train, and save after every iteration; Lightning starts this anew for each further rank."""
    args = parse(arguments)
    work = work_of(args)
    note = note_of(args.policy, args.note, "A tiny policy on CPUs: shows that it works, not how fast." * args.tiny)

    def tell(rows: Rows) -> None:
        settings = {name: getattr(args, name) for name in ("devices", "each", *DEFAULTS["25m"])}
        results = {**about(args.size, note, args.seed, on_cpu=args.tiny), "work": settings, "iterations": rows}
        save(args.out / f"idle_windows_{args.size}", results, render(results))

    L.seed_everything(work.seed, verbose=False)
    witness = Witness(args.learning, tell)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=work.drafter_lr, weight_decay=0.0)
        made.register_step_pre_hook(witness.hold)
        return made

    drafter = DrafterModule(work.policy, head=next(iter(args.head), None), optimizer=optimizer)
    witness.drafting = LongTailIdleCallback(drafter, pack_tokens=work.pack_tokens, budget=FixedBudget(0.0))
    selector = FixedSelector(NUM_DRAFT_TOKENS)
    speculation = Speculation(cold_head=True, selector=selector, max_draft_tokens=NUM_DRAFT_TOKENS)
    module, data = modules_of(work, speculation)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(work, folder, [witness, witness.drafting]).fit(module, data)
    if torch.distributed.get_rank() == 0:
        print(Path(args.out, f"idle_windows_{args.size}.md").read_text())
