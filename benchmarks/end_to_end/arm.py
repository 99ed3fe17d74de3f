"""Run one arm of `python -m benchmarks end_to_end` in this process, a GRPO run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from typing_extensions import override

from benchmarks.common.engine import BenchEngine
from benchmarks.common.results import hardware
from benchmarks.end_to_end.work import Diary, Work, noise, score
from tlt_lightning import RayEngine, RLModule, RolloutDataModule
from tlt_lightning.adapters import LoRA
from tlt_lightning.callbacks.progress_bar import RolloutProgressBar
from tlt_lightning.data.prompts import PromptSource
from tlt_lightning.engine.base import OnProgress
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.gallery.policy_drift import PolicyDrift
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.metrics import IterationLog
from tlt_lightning.objectives import GRPO
from tlt_lightning.rewards import RewardTerm
from tlt_lightning.rollout import Request, Response, Rollout, Sampling
from tlt_lightning.schedules import AsyncRollout, PartialRollout, TailBatching
from tlt_lightning.speculation import CostModelSelector

KEPT = (
    "time/",
    "rollout/",
    "schedule/",
    "reward/mean",
    "reward/zero",
    "speculation/",
    "drafter/",
    "mismatch/",
    "train/",
    "memory/",
    "engine/",
)
"""Metrics that go into the results."""

OF_A_DEVICE_ALONE = 0.85
"""Share of a device that an engine takes where nobody trains."""

BESIDE = "ray"
"""Of arms whose engines are beside the trainer, before the most iterations that they write ahead."""

SCHEDULES: dict[str, Callable[[], TailBatching | PartialRollout | AsyncRollout] | None] = {
    "": None,
    "tail": TailBatching,
    "partial": PartialRollout,
    "recompute": partial(AsyncRollout, extra=0.5),  # as many under way as in partial rollouts
    "keep": partial(AsyncRollout, extra=0.5),
    **{f"{BESIDE}{bound}": partial(AsyncRollout, max_staleness=bound, extra=float(bound)) for bound in (0, 1, 2, 4)},
}
"""By the part of an arm's name behind `+`.

In `recompute` and `keep` weights come amid the writing: the names say what becomes of keys and values of requests that
run. Of `ray` engines have the devices on which nobody trains.
"""


class ReplayEngine(BenchEngine):
    """Replays the lengths of responses, so that all arms write equally much.

    Set `lengths` before `generate`: tokens by rollout and request.
    """

    lengths: list[list[int]] | None = None
    _num_rollouts = 0

    @override
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        if self.lengths is not None:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            lengths, first = self.lengths[self._num_rollouts], rank * len(requests)
            requests = [replace(each, max_tokens=lengths[first + place]) for place, each in enumerate(requests)]
        self._num_rollouts += 1
        yield from super().generate(requests, sampling, seed=seed, on_progress=on_progress)


class Recorder(RolloutCallback):
    """Writes every finished iteration into the diary, and ends the run when the time is up.

    With `keep_lengths` each response's length is recorded too.
    """

    def __init__(self, diary: Diary, *, keep_lengths: bool) -> None:
        super().__init__()
        self._diary, self._keep_lengths = diary, keep_lengths
        self._lengths: list[int] = []

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._diary.ready(hardware())

    @override
    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        self._lengths = [len(rollout.response.token_ids) for rollout in rollouts]

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        is_over = False
        if trainer.is_global_zero:
            metrics |= device_seconds(pl_module.iteration_log.laps_by_engine)  # type: ignore[union-attr,arg-type]
            kept = {name: round(value, 6) for name, value in metrics.items() if name.startswith(KEPT)}
            ranks = ranks_of(cast("RLModule", pl_module).iteration_log) if trainer.world_size > 1 else None
            is_over = self._diary.iteration(iteration, kept, self._lengths if self._keep_lengths else None, ranks)
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(is_over, all=False)


def device_seconds(laps_by_engine: Mapping[str, Sequence[tuple[str, float]]]) -> dict[str, float]:
    """Return the seconds of an iteration by engine beside the trainer and by stage."""
    found: dict[str, float] = {}
    for engine, laps in laps_by_engine.items():
        for stage, seconds in laps:
            name = f"engine/{engine.removeprefix('engine ')}/{stage}"
            found[name] = found.get(name, 0.0) + seconds
    return found


def ranks_of(log: IterationLog) -> list[dict[str, float]]:
    """Return each rank's share of the iteration that was closed last: seconds by stage, and tokens of its update."""
    names = {"used": "drafter/idle_seconds_used", "tokens": "train/tokens"}
    ranks = []
    for laps, numbers in zip(log.laps_by_rank, log.by_rank, strict=True):
        seconds = {stage: sum(spent for name, spent in laps if name == stage) for stage in ("rollout", "idle")}
        told = {name: numbers[metric] for name, metric in names.items() if metric in numbers}
        ranks.append({name: round(value, 3) for name, value in (seconds | told).items()})
    return ranks


def speculation_of(arm: str, head: str | None, work: Work) -> Speculation | None:
    """Return how `arm` speculates; None for the plain engine."""
    if arm == "plain":
        return None
    if arm == "siblings":
        return Speculation(siblings=True, selector=CostModelSelector(drafters=("sibling",)))
    has_siblings = arm.endswith("-siblings")
    return Speculation(
        head=head if arm == "frozen" else None,
        cold_head=arm != "frozen",  # the callback that trains the head brings it
        siblings=has_siblings,
        selector=CostModelSelector(drafters=("learned", "mixed", "sibling") if has_siblings else ("learned",)),
        draft_sampling=work.draft_sampling,
    )


def callbacks_of(arm: str, head: str | None, work: Work) -> list[L.Callback]:
    """Return the callbacks of arms with a head: they tell how far the policy drifts, and train the head as pays.

    A frozen head is not trained; there the drift matters where lengths come naturally.
    """
    if arm == "frozen" and work.lengths is None:
        return [PolicyDrift()]
    is_random = arm.startswith("random")
    if arm != "adaptive" and not is_random:
        return []
    from tlt_lightning.drafter.architectures.dspark import DSpark
    from tlt_lightning.drafter.module import DrafterModule
    from tlt_lightning.long_tail.callback import LongTailIdleCallback

    drafter = DrafterModule(
        work.policy,
        head=None if is_random else head,
        optimizer=None
        if is_random
        else lambda parameters: torch.optim.AdamW(parameters, lr=work.drafter_lr, weight_decay=0.0),
        architecture=DSpark() if "block" in arm else None,
    )
    return [LongTailIdleCallback(drafter, pack_tokens=work.pack_tokens), PolicyDrift()]


def optimizer_of(work: Work) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what builds the policy's optimizer."""
    return lambda groups: torch.optim.AdamW(groups, lr=work.lr, weight_decay=0.0)


def modules_of(
    work: Work,
    speculation: Speculation | None,
    schedule: TailBatching | PartialRollout | AsyncRollout | None = None,
    kv_on_update: Literal["recompute", "keep"] = "recompute",
) -> tuple[RLModule, RolloutDataModule]:
    """Return the policy and its data."""
    num_responses = work.prompts * work.group_size // work.devices * work.tensor_parallel
    stays_awake = isinstance(schedule, AsyncRollout)
    engine = ReplayEngine(
        dtype="float32" if work.is_tiny else "bfloat16",
        max_num_seqs=num_responses if schedule is None else ceil(num_responses * (1 + (schedule.extra or 0.0))),
        # An engine that stays awake leaves the update its room: a pass of one response of full length.
        gpu_memory_utilization=work.gpu_memory_utilization * (0.6 if work.sleep and stays_awake else 1.0),
        kv_cache_gib=work.kv_cache_gib,
        enforce_eager=work.is_tiny,
        sleep=work.sleep and not stays_awake,
        speculation=speculation,
        tensor_parallel=work.tensor_parallel,
        kv_on_update=kv_on_update,
        arguments={"load_format": "dummy"} if work.is_random else None,
    )
    engine.lengths, engine.ignores_ends = work.lengths, work.lengths is not None
    data = RolloutDataModule(
        engine=RayEngine(engine, num_engines=work.engines) if work.engines else engine,
        rewards=[RewardTerm(function=noise if work.is_random else score, name="countdown")],
        train=PromptSource(path=work.train),
        group_size=work.group_size,
        prompts_per_iteration=work.prompts,
        schedule=schedule,
        micro_batch_tokens=work.micro_batch_tokens,
        sampling=Sampling(max_tokens=work.max_tokens),
        max_prompt_tokens=work.max_prompt_tokens,
    )
    module = RLModule(
        work.policy,
        GRPO(),
        optimizer=optimizer_of(work),
        lora=LoRA(rank=work.lora_rank, alpha=2 * work.lora_rank, base_dtype="bfloat16") if work.lora_rank else None,
        gradient_checkpointing=work.gradient_checkpointing,
    )
    return module, data


def trainer_of(
    work: Work, folder: str, callbacks: Sequence[L.Callback], loggers: Sequence[Logger] | None = None
) -> L.Trainer:
    """Return the Trainer, which writes to `folder`; without `loggers` it logs nothing."""
    return L.Trainer(
        accelerator="cpu" if work.is_tiny else "gpu",
        devices=work.devices,
        strategy="auto" if work.devices == 1 else work.strategy,
        precision=work.precision,  # type: ignore[arg-type]
        max_epochs=work.iterations,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=loggers or False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[RolloutProgressBar(), *callbacks],
    )


def run_arm(work: Work, arm: str, head: str | None, path: Path, until: float, keep_lengths: bool) -> None:
    """Train for `work.iterations` or until the time is up, and write a diary to `path`."""
    diary = Diary(path, until)
    L.seed_everything(work.seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        arm, _, name = arm.partition("+")
        schedule = SCHEDULES[name]
        speculation = speculation_of(arm, head, work)
        kv_on_update: Literal["recompute", "keep"] = "keep" if name == "keep" else "recompute"
        module, data = modules_of(work, speculation, schedule and schedule(), kv_on_update)
        # As on the command line, but for checkpoints, which the peer does not write either.
        loggers = [CSVLogger(folder, flush_logs_every_n_steps=1), TensorBoardLogger(folder)]
        callbacks = [*callbacks_of(arm, head, work), Recorder(diary, keep_lengths=keep_lengths)]
        trainer_of(work, folder, callbacks, loggers).fit(module, data)
