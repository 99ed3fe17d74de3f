"""The work that every arm of `end_to_end/run.py` does, its reward, and how a finished iteration is told."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

Emit = Callable[[str, dict[str, Any]], None]

STAGES = ("sync", "rollout", "reward", "logprobs", "drafter", "update", "idle", "other")
"""Stages of an iteration; those that are neither rollout, log-probs, update nor drafter are its overhead."""

FIRST_HEAD = "drafter/first_"
"""Prefix of what the head that a run began with is worth, in arm `paired`."""

STARTED, ITERATION, FINISHED = "STARTED", "ITERATION", "FINISHED"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one run, the same for every arm.

    Args:
        policy: Directory of the policy.
        train: File of prompts, one JSON object with `prompt`, `answer` and `numbers` a line.
        iterations: Policy iterations, warm-up included.
        prompts: Prompts of an iteration.
        group_size: Responses to each.
        micro_batch_size: Sequences in one forward and backward pass, on average; an iteration is one optimizer step.
        max_prompt_tokens: Longest prompt.
        max_tokens: Longest response; 0 takes what the policy's context leaves, at most 4,096.
        lr: Learning rate, constant.
        precision: Of the trainer; the engine computes in bfloat16 unless it is `32-true`.
        lora_rank: Rank of LoRA adapters on a frozen bfloat16 policy; 0 trains all weights.
        gpu_memory_utilization: Share of the device for weights and KV cache while the engine is awake.
        kv_cache_gib: KV cache instead, on a CPU.
        sleep: Whether the engine gives its memory back while the policy is trained.
        drafter_lr: Learning rate of a drafter that is trained on from a good head.
        pack_tokens: Tokens of one training step of the drafter.
        draft_sampling: How a head drafts, as in `Speculation`.
        devices: Devices of the run, one process each.
        seed: Of everything.
        lengths: Tokens of every response, by iteration and request; None lets end tokens decide.
    """

    policy: str
    train: str
    iterations: int = 12
    prompts: int = 32
    group_size: int = 8
    micro_batch_size: int = 16
    max_prompt_tokens: int = 64
    max_tokens: int = 0
    lr: float = 1e-4
    precision: str = "bf16-mixed"
    lora_rank: int = 0
    gpu_memory_utilization: float = 0.5
    kv_cache_gib: float | None = None
    sleep: bool = False
    drafter_lr: float = 3e-4
    pack_tokens: int = 4096
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    devices: int = 1
    seed: int = 0
    lengths: list[list[int]] | None = None

    @property
    def accumulate(self) -> int:
        """Micro-batches of a device in the iteration's optimizer step."""
        return self.prompts * self.group_size // self.devices // self.micro_batch_size

    @property
    def is_tiny(self) -> bool:
        """True if it runs on a CPU."""
        return self.precision == "32-true"

    def fitted(self) -> Work:
        """The same with `max_tokens` filled in, and no more iterations than there are recorded lengths.

        Raises:
            ValueError: The devices cannot share the work, or the lengths are not those of such work.
        """
        work = self
        if work.prompts % work.devices or work.prompts // work.devices * work.group_size % work.micro_batch_size:
            raise ValueError(
                f"`--prompts` {work.prompts} x `--group-size` {work.group_size} cannot be dealt to `--devices` "
                f"{work.devices} in micro-batches of {work.micro_batch_size}; change one of them."
            )
        if not work.max_tokens:
            from transformers import AutoConfig

            context = AutoConfig.from_pretrained(work.policy).max_position_embeddings
            work = replace(work, max_tokens=min(4096, context - work.max_prompt_tokens))
        if work.lengths is None:
            return work
        wanted, written = work.prompts * work.group_size, min(map(len, work.lengths))
        if written < wanted:
            raise ValueError(
                f"`lengths` were recorded for {written} responses an iteration, this run writes {wanted}; lower "
                "`--prompts` or `--group-size`."
            )
        lengths = [each[:wanted] for each in work.lengths[: work.iterations]]
        if (longest := max(map(max, lengths))) > work.max_tokens:
            raise ValueError(f"`lengths` go up to {longest} tokens, `max_tokens` is {work.max_tokens}; raise it.")
        return replace(work, lengths=lengths, iterations=len(lengths))


RUNGS: dict[str, dict[str, Any]] = {
    # 4 x 4 responses of at most 48 tokens, to see that everything works
    "tiny": {
        "prompts": 4,
        "group_size": 4,
        "micro_batch_size": 4,
        "max_tokens": 48,
        "lr": 5e-4,
        "precision": "32-true",
        "kv_cache_gib": 0.25,
        "pack_tokens": 128,
    },
    "25m": {},
    # One device holds policy, adapters and engine in turn. 128 responses, because with them a rollout takes the share
    # of an iteration that is reported for reasoning models. Learning rates do not carry over from a small policy to a
    # padded one: a step of Adam moves the zero output projections of all padding layers at once, whose other weights
    # are random. At a rate of 1e-6 the first step ended the policy (entropy 0.3 to 5); at these the weights hardly
    # move. So this rung measures what things cost, not what is learned. The largest micro-batch has some 5k tokens of
    # 6 MB of activations each, which fit beside the weights while the engine sleeps: nothing is recomputed. Twice as
    # large ones are a tenth padding and, in one run each, take as long; half as large ones launch more kernels.
    "7b": {
        "prompts": 16,
        "lr": 1e-9,
        "drafter_lr": 1e-9,
        "micro_batch_size": 4,
        "lora_rank": 32,
        "gpu_memory_utilization": 0.6,
        "sleep": True,
    },
}


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """The countdown reward of what comes before the policy starts on a question of its own.

    With lengths replayed a response goes on after its end; what is written there must not count.
    """
    from tlt_lightning.rewards import countdown

    return countdown(prompt, response.partition("make")[0], row)


def emit(kind: str, content: dict[str, Any]) -> None:
    """Tell the process that started this one."""
    print(f"\n{kind} {json.dumps(content)}", flush=True)


def read_spec() -> dict[str, Any]:
    """What `end_to_end/run.py` asks of this process, `work` already a `Work`."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    return {**spec, "work": Work(**spec["work"])}


def write_spec(path: Path, work: Work, **choices: Any) -> None:
    """Write the file that `read_spec` reads: no pipe, since each rank of a run reads it."""
    path.write_text(json.dumps({"work": asdict(work), **choices}))


class MemoryWatch:
    """Peak device memory by stage: what the whole device has in use, sampled, and what torch had allocated.

    `used` is what `nvidia-smi` shows: weights, KV cache, graphs, caches of the allocator, contexts. `allocated` counts
    live tensors, those of a sleeping engine included, whose memory is unmapped.

    Args:
        seconds: Between two samples.
    """

    def __init__(self, seconds: float = 0.02) -> None:
        import torch

        self.peaks: dict[str, dict[str, float]] = {}
        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._used = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(seconds,), daemon=True)
        if self._cuda is not None:
            self._thread.start()

    def _sample(self, seconds: float) -> None:
        assert self._cuda is not None
        while not self._stop.wait(seconds):
            self._look()

    def _look(self) -> None:
        assert self._cuda is not None
        free, total = self._cuda.mem_get_info()
        self._used = max(self._used, total - free)

    def end_stage(self, stage: str) -> None:
        """Book the peaks since the last call under `stage`."""
        if self._cuda is None:
            return
        self._look()
        peaks = self.peaks.setdefault(stage, {"used": 0.0, "allocated": 0.0})
        used, self._used = self._used, 0
        allocated = self._cuda.max_memory_allocated()
        self._cuda.reset_peak_memory_stats()
        peaks["used"] = max(peaks["used"], used / 2**30)
        peaks["allocated"] = max(peaks["allocated"], allocated / 2**30)

    def read(self) -> dict[str, dict[str, float]]:
        """Return the peaks in GiB since the last `read`, and start over."""
        peaks, self.peaks = self.peaks, {}
        return peaks

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()


class Deadline:
    """Says when to stop so that a run ends within its time.

    Args:
        until: End of the time, in seconds of `time.time()`, which parent and child share.
    """

    def __init__(self, until: float) -> None:
        self._until = until

    def is_near(self, iteration_seconds: float) -> bool:
        """True if another iteration like one of `iteration_seconds` would not fit."""
        return time.time() + 1.2 * iteration_seconds > self._until
