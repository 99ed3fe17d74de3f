"""Time the steps of vLLM's own runner at one draft length, at steady batch sizes, and count what they write."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.block_drafts.head import head_config
from benchmarks.common.engine import WITHOUT_WEIGHTS, BenchEngine
from benchmarks.common.shapes import SHAPES
from benchmarks.micro.step_time import save_configs
from tlt_lightning.engine import RolloutProgress
from tlt_lightning.rollout import Request, Sampling

SETTLE = 16
CONTEXT = 128  # tokens of a prompt where weights are random
START_SECONDS = 300.0
Cells = dict[str, list[float]]


@dataclass(frozen=True)
class Turn:
    """Lets engines start side by side, and measure one after the other while the rest stand still.

    Args:
        barrier: Which all meet at.
        lock: Of the one that measures.
    """

    barrier: Any
    lock: Any

    def of(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function with this turn; if its engine does not start, the others need not wait for it."""
        try:
            return function(self, *arguments)
        except BaseException:
            with suppress(BrokenBarrierError):
                self.barrier.wait(START_SECONDS)
            raise

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait until all have started, and until no other one measures."""
        with suppress(BrokenBarrierError):
            self.barrier.wait(START_SECONDS)
        with self.lock:
            yield


def watch(batch: int, steps: int, rounds: int, cells: Cells) -> Generator[None, RolloutProgress, None]:
    """Enter milliseconds per step, of the fastest round, and tokens per step and request of all under the batch."""
    fastest, written = float("inf"), 0
    for _ in range(SETTLE):
        yield
    for _ in range(rounds):
        before = (yield).tokens
        began = time.perf_counter()
        for _ in range(steps):
            progress = yield
        fastest = min(fastest, 1e3 * (time.perf_counter() - began) / steps)
        written += progress.tokens - before
    cells[str(batch)] = [fastest, written / (rounds * steps * batch)]


def write_naturally(engine: BenchEngine, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> dict[str, float]:
    """Return what a rollout of `prompts`, all at once, writes to its natural ends."""
    rows: list[RolloutProgress] = []
    engine.ignores_ends = False
    requests = [Request(id=i, prompt_ids=prompt) for i, prompt in enumerate(prompts)]
    began = time.perf_counter()
    for _ in engine.generate(requests, Sampling(max_tokens=max_tokens), seed=seed, on_progress=rows.append):
        pass
    seconds = time.perf_counter() - began
    # All requests write one token in the step of their prompts.
    steps = [(before.running, after.tokens - before.tokens) for before, after in pairwise(rows) if before.tokens]
    return {
        "tokens per step": sum(tokens for _, tokens in steps) / sum(running for running, _ in steps),
        "tokens/s": rows[-1].tokens / seconds,
    }


def make_engine(args: Any, arm: str, num_drafts: int, head: str | None, arguments: dict[str, Any]) -> BenchEngine:
    """Return an engine that drafts by vLLM alone, in every step as much."""
    if head is not None:
        speculative = {"method": arm.partition("-")[0], "model": head, "num_speculative_tokens": num_drafts}
        arguments = arguments | {"speculative_config": speculative | {"draft_sample_method": args.draft_sampling}}
    sizes = sorted({batch * rows for batch in args.batches for rows in (1, num_drafts + 1)})
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_gib": 4.0, "gpu_memory_utilization": 0.1}
    arguments = arguments | {"max_num_batched_tokens": max(2048, sizes[-1])}
    if torch.cuda.is_available():  # no graphs but those that these batches need, all of them full
        arguments = arguments | {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    else:
        settings |= {"dtype": "float32", "kv_cache_gib": 0.25, "enforce_eager": True}
    return BenchEngine(**settings, max_num_seqs=max(args.batches), sleep=False, arguments=arguments)


def measure(engine: BenchEngine, args: Any, num_drafts: int, prompts: Sequence[list[int]], most: int) -> dict[str, Any]:
    """Return milliseconds and tokens per step of each batch size; no response is longer than `most`."""
    cells: Cells = {}
    # Were all drafts accepted, each request would write what it may at most.
    steps = min(args.steps, (most // (num_drafts + 1) - 3 * SETTLE) // args.rounds - 1)
    for batch in args.batches:
        asked = [Request(id=i, prompt_ids=prompts[i % len(prompts)]) for i in range(batch)]
        engine.follow(asked, most, watch(batch, steps, args.rounds, cells))
        engine.forget_prompts()
    return {"cells": cells, **engine.describe()}


def serve(turn: Turn, args: Any, arm: str, num_drafts: int, head: str | None) -> dict[str, Any]:
    """Roll out with the policy and the head in the directory `head`, None for none."""
    from tlt_lightning.policy import load_tokenizer

    tokenizer = load_tokenizer(args.policy)
    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()[: max(args.batches)]]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    engine = make_engine(args, arm, num_drafts, head, {"enable_prefix_caching": False})
    max_model_len = AutoConfig.from_pretrained(args.policy).max_position_embeddings
    engine.setup(args.policy, max_model_len=max_model_len, seed=args.seed)
    engine.policy_version = 0  # vLLM has read the policy's files
    with turn.taken():
        most = max_model_len - max(map(len, prompts))
        found = measure(engine, args, num_drafts, prompts, most)
        natural = write_naturally(engine, prompts, min(args.max_tokens, most), args.seed)
    engine.close()
    found["natural"] = natural
    return found


def time_steps(turn: Turn, args: Any, arm: str, num_drafts: int) -> dict[str, Any]:
    """Time a policy of the shape `args.shape` and a head of random weights, of which no draft is accepted."""
    # While the last prompts are read, the first requests write already.
    most = (3 * SETTLE + (args.steps + 1) * args.rounds) * (num_drafts + 1)
    with tempfile.TemporaryDirectory() as folder:
        policy, head = save_configs(SHAPES[args.shape], Path(folder))
        if arm not in ("plain", "eagle3"):
            kind, num_layers, block_size = arm.split("-")
            target = AutoConfig.from_pretrained(policy)
            head_config(kind, policy, target, int(num_layers), int(block_size)).save_pretrained(head)
        engine = make_engine(args, arm, num_drafts, None if arm == "plain" else head, WITHOUT_WEIGHTS)
        engine.setup(policy, max_model_len=CONTEXT + most, seed=args.seed)
        prompts = [[(7 * batch + place) % 500 + 2 for place in range(CONTEXT)] for batch in range(max(args.batches))]
        with turn.taken():
            found = measure(engine, args, num_drafts, prompts, most)
    engine.close()
    return found
