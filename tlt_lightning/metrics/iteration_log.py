"""Log an iteration's numbers, and the time and memory of its stages."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import SupportsFloat

import lightning as L
from torch import Tensor

from tlt_lightning.metrics.peak_memory import PeakMemory
from tlt_lightning.ranks.reduce import gather_over_ranks

Numbers = Mapping[str, tuple[str, float]]
"""Pair the way to reduce each number with its value, by name."""

Laps = Sequence[tuple[str, float]]
"""Stages in the order in which they passed, and the seconds of each."""

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "sum": sum,
}


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
        self.laps_by_engine: dict[str, Laps] = {}
        """Stages of engines beside the ranks meanwhile, by name."""
        self.peak_memory = PeakMemory()
        self.clear()

    def clear(self) -> None:
        """Drop everything and begin with an iteration now."""
        self._numbers: dict[str, tuple[str, list[float | Tensor]]] = {}
        self._laps: list[tuple[str, float]] = []
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
        self.charge(stage, now - self._last)
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
            self.charge(stage, seconds)
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

    def close(self, trainer: L.Trainer, engines: Mapping[str, Laps] | None = None) -> dict[str, float]:
        """Return the iteration's metrics over all ranks, in one collective; `open` begins the next.

        `engines` has the stages of this rank's engines, if they are beside it.
        """
        of_rank = self.read(), self._laps, engines or {}
        self._numbers, self._laps, self._peaks, self._is_open = {}, [], {}, False
        if trainer.world_size > 1:
            # Lightning synchronises what others logged with `sync_dist` when it is first read. A progress bar may have
            # done so on rank zero, which now waits for the other ranks: they must read it before they meet it here.
            _ = trainer.callback_metrics
        ranks, laps, beside = zip(*gather_over_ranks(trainer, of_rank), strict=True)
        self.laps_by_rank = list(laps)
        self.laps_by_engine = {name: own for each in beside for name, own in each.items()}
        self.by_rank = [{name: value for name, (_, value) in numbers.items()} for numbers in ranks]
        return combine(ranks)

    def open(self) -> None:
        """Begin the next iteration, which takes the time since the last lap."""
        self._is_open = True

    def charge(self, stage: str, seconds: float) -> None:
        """Add seconds to `stage` that passed outside any lap."""
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
    found: dict[str, tuple[str, list[float]]] = {}
    for numbers in ranks:
        for name, (kind, value) in numbers.items():
            found.setdefault(name, (kind, []))[1].append(value)
    return {name: REDUCTIONS[kind](values) for name, (kind, values) in sorted(found.items())}
