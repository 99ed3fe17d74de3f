"""Measure how many requests a second a rank of the trainer passes to its engines on Ray and back, and what limits it.

    python -m benchmarks ray_throughput --engines 1 2 4 8

The engines are without a model, each in a process of its own, and answer at once: only what is around them is measured.
Requests are asked for all at once, as a synchronous schedule does, or each as soon as one is answered, as under
AsyncRollout with groups of one. Seconds of the CPU are of the rank's process alone, so that engines on the same cores
hardly matter: their inverse is the most that a rank can do with a core of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from benchmarks.common.arguments import parser_of
from benchmarks.common.cheap_engine import CheapEngine
from benchmarks.common.results import about, heading, save, table
from tlt_lightning import RayEngine
from tlt_lightning.engine.base import OnProgress, RolloutProgress
from tlt_lightning.rollout import Request, Response, Sampling

PROMPT_TOKENS = 128
UNDER_WAY = 64  # of each engine, where they are asked for one by one


class ReadyEngine(CheapEngine):
    """Answers every request at once, with as many tokens as it may have."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[Request] = deque()

    @override
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        self.add(requests)
        tokens, logps, finished = [7] * sampling.max_tokens, [-1.0] * sampling.max_tokens, 0
        while self._waiting:
            request, finished = self._waiting.popleft(), finished + 1
            yield Response(request.id, [*tokens], [*logps], "length", (self.policy_version,))  # nothing is shared
            if on_progress is not None:
                on_progress(RolloutProgress(len(self._waiting), 0, finished, finished * len(tokens), len(tokens), 0.0))

    @override
    def add(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)


def main(arguments: list[str]) -> None:
    """Write with each number of engines, both ways."""
    import ray

    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=4000, help="of each measurement")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024], help="of a response")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.engines, args.requests, args.tokens = [2], 200, [64]
    ray.init(address="local", num_cpus=max(args.engines), include_dashboard=False, log_to_driver=False)
    rows = []
    for count in args.engines:
        engine = RayEngine(ReadyEngine(), num_engines=count)
        engine.setup("", max_model_len=1, seed=0)
        engine.update_weights([], 0)
        for tokens in args.tokens:
            for one_by_one in (False, True):
                measure(engine, 10 * count, tokens, one_by_one=one_by_one)  # all processes have imported what they need
                rows.append(measure(engine, args.requests, tokens, one_by_one=one_by_one))
                print(rows[-1], flush=True)
        engine.close()
    ray.shutdown()
    record = {**about("throughput", args.note, args.seed, on_cpu=True), "rows": rows}
    lead = f"{args.requests} requests of {PROMPT_TOKENS} tokens; CPU is of the rank's process, by request."
    report = [*heading("Ray", record), lead, "", *table(HEADER, [cells(row) for row in rows])]
    save(args.out / "ray_throughput", record, report)
    print("\n".join(report))


def measure(engine: RayEngine, number: int, tokens: int, *, one_by_one: bool) -> dict[str, Any]:
    """Return what `number` requests took, with responses of so many tokens."""
    requests = deque(Request(each, [5] * PROMPT_TOKENS, group=each) for each in range(number))
    first = min(number, UNDER_WAY * engine.num_hosts) if one_by_one else number
    started, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    asked = [requests.popleft() for _ in range(first)]
    for _ in engine.generate(asked, Sampling(max_tokens=tokens), seed=0):
        if requests:
            engine.add([requests.popleft()])
    return {
        "engines": engine.num_hosts,
        "tokens": tokens,
        "one_by_one": one_by_one,
        "per_second": number / (time.perf_counter() - started),
        "cpu_ms": (time.process_time() - cpu) / number * 1e3,
        "thread_ms": (time.thread_time() - thread) / number * 1e3,
    }


HEADER = (
    "engines",
    "tokens of a response",
    "asked for",
    "requests/s here",
    "CPU ms",
    "of it, main thread",
    "most a core does",
)


def cells(row: dict[str, Any]) -> list[Any]:
    """Return the cells of a measurement; Ray's own threads run beside the main one, which is the limit."""
    way = "one by one" if row["one_by_one"] else "at once"
    spent = [f"{row[name]:.2f}" for name in ("cpu_ms", "thread_ms")]
    return [row["engines"], row["tokens"], way, f"{row['per_second']:,.0f}", *spent, f"{1e3 / row['thread_ms']:,.0f}"]
