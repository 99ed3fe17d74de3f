"""Define the work, reward and diary of the arms of `python -m benchmarks end_to_end`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

STAGES = ("rollout", "idle", "logprobs", "update", "drafter", "sync", "reward", "other")
"""Stages of an iteration, overhead last."""
OVERHEAD = STAGES[-3:]
DICE = Random(0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Holds the work of one run, the same for every arm.

    Args:
        policy: Directory of the policy.
        train: File of prompts, one JSON object with `prompt`, `answer` and `numbers` a line.
        iterations: Policy iterations, warm-up included.
        prompts: Prompts of an iteration.
        group_size: Responses to each.
        micro_batch_tokens: Most tokens in one forward and backward pass; None is what `RolloutDataModule` chooses. An
            iteration is one optimizer step.
        micro_batch_size: Sequences in one of TRL's, which has no other unit.
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
        devices: Devices of the run, a process on each; those of `engines` are others.
        engines: Engines beside the trainer, each on a device of its own; with none they write where it trains.
        strategy: Of the Trainer, where there are several.
        tensor_parallel: Devices of an engine.
        is_random: Whether the policy's weights are random, so that the engine need not read them before the first sync.
        gradient_checkpointing: Whether the update computes activations again instead of keeping them.
        seed: Of everything.
        lengths: Tokens of every response, by iteration and request; None lets end tokens decide.
    """

    policy: str
    train: str
    iterations: int = 12
    prompts: int = 32
    group_size: int = 8
    micro_batch_tokens: int | None = None
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
    engines: int = 0
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    tensor_parallel: int = 1
    is_random: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0
    lengths: list[list[int]] | None = None

    @property
    def accumulate(self) -> int:
        """Micro-batches of a device in TRL's optimizer step."""
        return self.prompts * self.group_size // self.devices // self.micro_batch_size

    @property
    def is_tiny(self) -> bool:
        """True if it runs on a CPU."""
        return self.precision == "32-true"

    def beside(self) -> Work:
        """Return the work with half of the devices for engines alone; of an odd number they have one less."""
        return replace(self, devices=self.devices - self.devices // 2, engines=self.devices // 2)

    def fitted(self) -> Work:
        """Return the work with `max_tokens` filled in, and lengths for its iterations.

        Iterations recorded with more responses than this work has are taken in parts, first parts first; when all are
        used up, they are replayed from the first on.

        Raises:
            ValueError: The micro-batches do not divide the work, or the lengths are not those of such work.
        """
        work = self
        if work.prompts % work.devices or work.prompts // work.devices * work.group_size % work.micro_batch_size:
            raise ValueError(
                f"`--prompts` {work.prompts} x `--group-size` {work.group_size} cannot be dealt to {work.devices} "
                f"devices in micro-batches of {work.micro_batch_size}; change one of them."
            )
        if not work.max_tokens:
            context = json.loads(Path(work.policy, "config.json").read_text())["max_position_embeddings"]
            work = replace(work, max_tokens=min(4096, context - work.max_prompt_tokens))
        if work.lengths is None:
            return work
        wanted, written = work.prompts * work.group_size, min(map(len, work.lengths))
        if written < wanted:
            raise ValueError(
                f"`lengths` were recorded for {written} responses an iteration, this run writes {wanted}; lower "
                "`--prompts` or `--group-size`."
            )
        parts = range(0, written - wanted + 1, wanted)
        recorded = [each[part : part + wanted] for part in parts for each in work.lengths]
        lengths = list(islice(cycle(recorded), work.iterations))
        if (longest := max(map(max, lengths))) > work.max_tokens:
            raise ValueError(f"`lengths` go up to {longest} tokens, `max_tokens` is {work.max_tokens}; raise it.")
        return replace(work, lengths=lengths)


SETTINGS: dict[str, dict[str, Any]] = {
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
    # One device holds policy, adapters and engine in turn. Learning rates do not carry over from a small policy to a
    # padded one: a step of Adam moves the zero output projections of all padding layers at once, whose other weights
    # are random. At a rate of 1e-6 the first step ended the policy (entropy 0.3 to 5); at these the weights hardly
    # move. So this size measures what things cost, not what is learned. A pass has 8k tokens of 6 MB of activations
    # each, which fit beside the weights while the engine sleeps: nothing is recomputed.
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
"""Fields of `Work` that each size changes."""


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return the countdown reward of the text before the policy's next question.

    With lengths replayed a response goes on after its end; what is written there must not count.
    """
    from tlt_lightning.rewards import countdown

    return countdown(prompt, response.partition("make")[0], row)


def noise(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return what a policy of random weights earns, so that it has gradients: it says the same nothing everywhere."""
    return DICE.random()


class Diary:
    """Records a run line by line, complete lines even if its process dies.

    Args:
        path: A file of JSON lines; it is added to.
        until: When the run must end, in seconds of `time.time()`, which processes share.
    """

    def __init__(self, path: Path, until: float) -> None:
        self.path, self.until = path, until
        self._began = time.perf_counter()

    def ready(self, device: str) -> None:
        """Tell that everything is loaded."""
        self._write(setup_seconds=round(time.perf_counter() - self._began, 1), device=device)

    def iteration(
        self,
        number: int,
        metrics: dict[str, float],
        lengths: list[int] | None = None,
        ranks: list[dict[str, float]] | None = None,
    ) -> bool:
        """Tell of a finished iteration, perhaps of each rank's; True if another one would not fit into the time."""
        more = {"lengths": lengths, "ranks": ranks}
        self._write(
            iteration=number, metrics=metrics, **{name: each for name, each in more.items() if each is not None}
        )
        return time.time() + 1.2 * metrics["time/iteration"] > self.until

    def _write(self, **content: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(content) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return what was told so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
