"""Log an iteration's metrics, and measure accuracy over held-out prompts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from math import comb
from typing import Any, SupportsFloat

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from tlt_lightning.data.batch import Rollout
from tlt_lightning.data.dynamic_sampling import has_spread, split_groups
from tlt_lightning.ranks import gather_over_ranks

Numbers = Mapping[str, tuple[str, float]]
"""By name, how a number is reduced and its value."""

Laps = list[tuple[str, float]]
"""Stages in the order in which they passed, and the seconds of each."""

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "sum": sum,
}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of `k` samples is correct, estimated without bias.

    Chen et al. 2021: 1 - C(n - c, k) / C(n, k), with n samples of which c are correct.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class PassAtK(Metric):
    """Computes accuracy and pass@k over prompts that were each answered several times.

    Example:
        >>> metric = PassAtK()
        >>> metric.update([(0, True), (0, False), (1, True), (1, True)])
        >>> {name: value.item() for name, value in metric.compute().items()}
        {'accuracy': 0.75, 'pass@2': 1.0}
    """

    full_state_update = False
    num_samples: list[Tensor]
    num_correct: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_samples", default=[], dist_reduce_fx="cat")
        self.add_state("num_correct", default=[], dist_reduce_fx="cat")

    @override
    def update(self, samples: Sequence[tuple[int, bool]]) -> None:
        """Add whole groups: `samples` are (group, whether it is correct)."""
        groups: dict[int, list[bool]] = {}
        for group, correct in samples:
            groups.setdefault(group, []).append(correct)
        self.num_samples.append(torch.tensor([len(group) for group in groups.values()], device=self.device))
        self.num_correct.append(torch.tensor([sum(group) for group in groups.values()], device=self.device))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return `accuracy`, and `pass@k` for k = 2, 4, 8, ... up to the smallest group."""
        counts = torch.stack([dim_zero_cat(self.num_samples), dim_zero_cat(self.num_correct)], dim=1).tolist()
        k, results = 2, {"accuracy": sum(c / n for n, c in counts) / len(counts)}
        while k <= min(n for n, _ in counts):
            results[f"pass@{k}"] = sum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
            k *= 2
        return {name: torch.tensor(value, device=self.device) for name, value in results.items()}


class HeldOutMetrics(nn.Module):
    """Computes accuracy, pass@k, mean reward and mean length over held-out prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.reward, self.length = PassAtK(), MeanMetric(), MeanMetric()

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add whole groups."""
        self.accuracy.update([(rollout.group, rollout.is_correct) for rollout in rollouts])
        self.reward.update(torch.tensor([rollout.reward for rollout in rollouts]))
        self.length.update(torch.tensor([float(len(rollout.response.token_ids)) for rollout in rollouts]))

    def read(self, stage: str) -> dict[str, float]:
        """Return the metrics under `stage`/ over all ranks, and start over."""
        means = {"reward": self.reward.compute(), "length": self.length.compute()}
        metrics = {f"{stage}/{name}": float(value) for name, value in {**self.accuracy.compute(), **means}.items()}
        for metric in (self.accuracy, self.reward, self.length):
            metric.reset()
        return metrics


def log_rollouts(log: IterationLog, rollouts: Sequence[Rollout]) -> None:
    """Log lengths, kept drafts, truncation, rewards and the share of groups without a learning signal."""
    lengths = torch.tensor([float(len(rollout.response.token_ids)) for rollout in rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    log.sum("rollout/tokens", lengths.sum())
    kept, proposed = Counter[str](), Counter[str]()
    for rollout in rollouts:
        kept += Counter(rollout.response.num_kept)
        for _, drafter, num_drafted, _ in rollout.response.drafts:
            proposed[drafter] += num_drafted
    for name, counts in (("kept", kept), ("proposed", proposed)):
        for who, count in counts.items():
            log.sum(f"speculation/{name}_{who}", count)
    log.mean("rollout/length_mean", lengths.mean())
    for percent in (50, 90, 99):
        log.mean(f"rollout/length_p{percent}", lengths.quantile(percent / 100))
    log.max("rollout/length_max", lengths.max())
    log.mean("rollout/truncated", sum(rollout.is_truncated for rollout in rollouts) / len(rollouts))
    log.mean("reward/mean", rewards.mean())
    log.mean("reward/std", rewards.std(correction=0))
    log.mean("reward/zero_std_groups", zero_std_share(rollouts))
    for name in rollouts[0].rewards:
        log.mean(f"reward/{name}", sum(rollout.rewards[name] for rollout in rollouts) / len(rollouts))


def zero_std_share(rollouts: Sequence[Rollout]) -> float:
    """Return the share of groups whose rewards are all equal: their normalised advantages are 0."""
    groups = split_groups(rollouts)
    return sum(not has_spread(group) for group in groups) / len(groups)


def tail_share(trace: Sequence[tuple[float, int]], num_requests: int) -> float:
    """Return the share of a rollout's time in which at most a tenth of its requests, or one, ran.

    Args:
        trace: (seconds since the start, unfinished requests) after each engine step.
        num_requests: Requests of the rollout.
    """
    if not trace or trace[-1][0] <= 0:
        return 0.0
    limit = max(1.0, 0.1 * num_requests)
    start = next((seconds for seconds, unfinished in trace if unfinished <= limit), trace[-1][0])
    return 1.0 - start / trace[-1][0]


class PeakMemory:
    """Measures the most bytes that this process has held on its GPU since the last `take`.

    PyTorch still counts the tensors of a sleeping engine, whose memory is unmapped; after `followed` they are left out.
    """

    def __init__(self) -> None:
        self._most, self._unmapped = 0.0, 0.0

    @property
    def _is_measured(self) -> bool:  # asking would claim memory of a GPU that the run does not use
        return torch.cuda.is_available() and torch.cuda.is_initialized()

    def take(self) -> float | None:
        """Return the peak since the last call, None without a GPU."""
        self._note()
        if not self._is_measured:
            return None
        most, self._most = self._most, 0.0
        return most

    @contextmanager
    def followed(self, unmapped: Callable[[], float]) -> Iterator[None]:
        """Follow an engine that falls asleep or wakes in the block; `unmapped` returns its bytes that are unmapped."""
        self._note()
        yield
        self._note()
        self._unmapped = unmapped()

    def _note(self) -> None:
        if not self._is_measured:
            return
        self._most = max(self._most, torch.cuda.max_memory_allocated() - self._unmapped)
        torch.cuda.reset_peak_memory_stats()


class IterationLog:
    """Logs an iteration's numbers on one rank, and the time and the most memory of its stages.

    Whoever knows a number writes it, from the start of training to the last batch's end; `RLModule` then closes the log
    and hands the metrics to the loggers, `trainer.callback_metrics` and `on_iteration_end`. A number may come several
    times, and on some ranks only. Tensors are read when the log is closed, so writing one waits for no device.

    Example:
        >>> log = IterationLog()
        >>> log.mean("reward/mine", 1.0)
        >>> log.mean("reward/mine", 2.0)
        >>> log.sum("rollout/retries", 3)
        >>> combine([log.read()])
        {'reward/mine': 1.5, 'rollout/retries': 3.0}
    """

    def __init__(self) -> None:
        self.by_rank: list[dict[str, float]] = []
        """Numbers of each rank in the iteration that was closed last."""
        self.laps_by_rank: list[Laps] = []
        """Stages of each rank in that iteration, one after the other."""
        self.peak_memory = PeakMemory()
        self.clear()

    def clear(self) -> None:
        """Drop everything and begin with an iteration now."""
        self._numbers: dict[str, tuple[str, list[float | Tensor]]] = {}
        self._laps: Laps = []
        self._peaks: dict[str, float] = {}
        self.peak_memory.take()
        self._last = time.perf_counter()
        self._is_open = True

    def mean(self, name: str, value: float | Tensor) -> None:
        """Log the mean of the values that the iteration has, then of the ranks that have any."""
        self._note("mean", name, value)

    def max(self, name: str, value: float | Tensor) -> None:
        """Log the largest value of the iteration and of all ranks."""
        self._note("max", name, value)

    def sum(self, name: str, value: float | Tensor) -> None:
        """Log the sum over the iteration and over all ranks."""
        self._note("sum", name, value)

    def update(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Log the mean of each of `metrics`, or the largest value of a name that ends in `_max`."""
        for name, value in metrics.items():
            self._note("max" if name.endswith("_max") else "mean", name, value)

    def lap(self, stage: str) -> None:
        """Charge time and peak memory since the last lap to `stage`: stages add up to the iteration."""
        now = time.perf_counter()
        self._charge(stage, now - self._last)
        if (peak := self.peak_memory.take()) is not None:
            self._peaks[stage] = max(self._peaks.get(stage, 0.0), peak)
        self._last = now

    @contextmanager
    def apart(self, stage: str) -> Iterator[None]:
        """Charge what is done meanwhile to `stage`; the stage around it goes on without that time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._charge(stage, seconds)
            self._last += seconds

    def seconds(self, stage: str) -> float:
        """Return the seconds charged to `stage` in this iteration."""
        return sum(seconds for name, seconds in self._laps if name == stage)

    def read(self) -> Numbers:
        """Return this rank's numbers by name, each with its reduction; times in seconds, memory in GiB."""
        numbers = {name: (kind, REDUCTIONS[kind]([float(v) for v in vs])) for name, (kind, vs) in self._numbers.items()}
        seconds = {stage: self.seconds(stage) for stage in dict(self._laps)}
        seconds |= {"iteration": sum(seconds.values())} if seconds else {}
        peaks = {f"memory/peak_{stage}": ("max", value / 2**30) for stage, value in self._peaks.items()}
        return numbers | peaks | {f"time/{stage}": ("mean", value) for stage, value in seconds.items()}

    def close(self, trainer: L.Trainer) -> dict[str, float]:
        """Return the iteration's metrics over all ranks, in one collective; `open` begins the next."""
        own = self.read(), self._laps
        self._numbers, self._laps, self._peaks, self._is_open = {}, [], {}, False
        if trainer.world_size > 1:
            # Lightning synchronises what others logged with `sync_dist` when it is first read. A progress bar may have
            # done so on rank zero, which now waits for the other ranks: they must read it before they meet it here.
            _ = trainer.callback_metrics
        ranks, laps = zip(*gather_over_ranks(trainer, own), strict=True)
        self.laps_by_rank = list(laps)
        self.by_rank = [{name: value for name, (_, value) in numbers.items()} for numbers in ranks]
        return combine(ranks)

    def open(self) -> None:
        """Begin the next iteration, which takes the time since the last lap."""
        self._is_open = True

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the iteration so far, as primitives, for a checkpoint within it."""
        numbers = {name: (kind, [float(value) for value in values]) for name, (kind, values) in self._numbers.items()}
        return {"numbers": numbers, "laps": list(self._laps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the numbers of an iteration that was saved by `state_dict`."""
        self._numbers = {name: (kind, list(values)) for name, (kind, values) in state["numbers"].items()}
        laps = state["laps"] if "laps" in state else state["seconds"].items()  # as checkpoints had them until 2026-11
        self._laps = [(stage, seconds) for stage, seconds in laps]

    def _charge(self, stage: str, seconds: float) -> None:
        if self._laps and self._laps[-1][0] == stage:
            seconds += self._laps.pop()[1]
        self._laps.append((stage, seconds))

    def _note(self, kind: str, name: str, value: float | Tensor) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"`{name}` comes after the iteration's log was closed: write it before `on_train_epoch_end`."
            )
        known, values = self._numbers.setdefault(name, (kind, []))
        if known != kind:
            raise ValueError(f"`{name}` was logged as `{known}` and now as `{kind}`; choose one of them.")
        is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)
        if not is_number:
            raise TypeError(f"`{name}` has to be a number, or a tensor that holds one, got {value!r:.200}.")
        values.append(value.detach() if isinstance(value, Tensor) else value)


def combine(ranks: Sequence[Numbers]) -> dict[str, float]:
    """Combine the numbers of all ranks, each by its reduction over the ranks that have it."""
    parts: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    for numbers in ranks:
        for name, (kind, value) in numbers.items():
            parts.setdefault(name, []).append(value)
            kinds[name] = kind
    return {name: REDUCTIONS[kinds[name]](parts[name]) for name in sorted(parts)}


def end_step(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sums of the metrics of a step's micro-batches, or their largest (`_max`); empty their list."""
    names, zero = set().union(*parts), torch.zeros(())
    metrics = {
        name: reduce(torch.maximum if name.endswith("_max") else torch.add, [part.get(name, zero) for part in parts])
        for name in names
    }
    parts.clear()
    return metrics
