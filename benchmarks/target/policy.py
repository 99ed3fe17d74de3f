"""Train the benchmarks' policy, from scratch or from a pre-trained model, on fresh text and for a given time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.target.text import MAX_RESPONSE, Key, Streams, spelling_of
from recipes.assets.make_countdown import EOS, PAD, WORDS, make_tokenizer

UNTIMED_STEPS = 4  # kernels are compiled and memory is allocated
SHORT_ROWS = 0.6  # share of the time that rows are short
WARM_UP_STEPS = 50
REPORT_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sets the sizes of the policy, its text and its training.

    Args:
        shape: The policy's, as in a Qwen2 configuration; wide networks copy its width, so it should divide 3584.
        rows: Rows of text in a batch.
        length: Tokens of a row.
        short_length: Tokens of a row at first, a divisor of `length`; a batch has as many tokens of them.
        learning_rate: Of the policy, at its peak.
        workers: Processes that write text; 0 writes it between steps.
        head_length: Tokens of a row for the draft head, two more than a multiple of 128; a batch has two.
        head_learning_rate: Of the draft head, at its peak.
        prompts: Questions that responses are sampled to, in the end, four each.
        max_tokens: Longest of them.
        num_train: Questions for reinforcement learning.
        num_val: Held-out questions.
    """

    shape: dict[str, Any]
    rows: int
    length: int
    short_length: int
    learning_rate: float
    workers: int
    head_length: int
    head_learning_rate: float
    prompts: int
    max_tokens: int
    num_train: int
    num_val: int


LARGE = Scale(
    shape={"hidden_size": 512, "intermediate_size": 1184, "num_hidden_layers": 8, "num_attention_heads": 4},
    rows=8,
    length=MAX_RESPONSE + 128,  # room for any prompt
    short_length=384,
    learning_rate=1.2e-3,
    workers=10,
    head_length=4098,
    head_learning_rate=1e-3,
    prompts=256,
    max_tokens=MAX_RESPONSE,
    num_train=4096,
    num_val=256,
)
PRETRAINED = replace(LARGE, learning_rate=6e-4)
TINY = Scale(
    shape={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "initializer_range": 0.05,
    },
    rows=4,
    length=256,
    short_length=64,
    learning_rate=3e-3,
    workers=0,
    head_length=130,
    head_learning_rate=3e-3,
    prompts=4,
    max_tokens=32,
    num_train=16,
    num_val=8,
)


def make_policy(scale: Scale) -> Qwen2ForCausalLM:
    """Make the untrained policy, in float32; each attention head has keys and values of its own."""
    config = Qwen2Config(
        **scale.shape,
        num_key_value_heads=scale.shape["num_attention_heads"],
        vocab_size=len(WORDS),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=WORDS.index(EOS),
        pad_token_id=WORDS.index(PAD),
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def next_token_loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Return the mean loss over all tokens of `batch` (B, S) but the first; bfloat16 on CUDA."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = model(input_ids=batch, use_cache=False).logits
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Make an AdamW that decays the matrices inside the layers alone."""
    device = next(model.parameters()).device.type
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [parameter for name, parameter in named if parameter.ndim > 1 and "layers." in name]
    others = [parameter for name, parameter in named if parameter.ndim < 2 or "layers." not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=device == "cuda")


class Clock:
    """Schedules the learning rate as a cosine over a given time, from the first steps on.

    Args:
        seconds: Time to train.
        learning_rate: Rate at the peak.
    """

    def __init__(self, seconds: float, learning_rate: float) -> None:
        self.seconds, self.learning_rate, self.steps = seconds, learning_rate, 0
        self._began: float | None = None

    @property
    def elapsed(self) -> float:
        """Return the seconds on the clock."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    @property
    def progress(self) -> float:
        """Return the share of the time that is over."""
        return self.elapsed / self.seconds

    def tick(self, optimizer: torch.optim.Optimizer) -> bool:
        """Set the learning rate of the step that begins now; False if there is no time for it."""
        if self.steps == UNTIMED_STEPS:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._began = time.perf_counter()
        progress = self.progress
        if progress >= 1:
            return False
        self.steps += 1
        warm = min(1.0, self.steps / WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * warm * (1 + math.cos(math.pi * progress)) / 2
        return True


def optimise(model: nn.Module, loss_of: Callable[[], Tensor], clock: Clock, tokens: int) -> dict[str, Any]:
    """Minimise `loss_of()` with AdamW until the time of `clock` is over.

    Args:
        model: On the device that it stays on; parameters that need no gradient are left alone.
        loss_of: Draws a batch of `tokens` tokens and gives its loss.
        clock: Says how fast to learn, and when to stop.
        tokens: Tokens of a batch.

    Returns:
        Steps, tokens, tokens per second, the loss over the last steps, and the curve of the loss.

    Raises:
        RuntimeError: The loss is not a number.
    """
    optimizer = make_optimizer(model, clock.learning_rate)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses: list[Tensor] = []
    curve: list[dict[str, float]] = []

    def report() -> int:
        loss = torch.stack(losses[-REPORT_STEPS:]).mean().item()
        if not math.isfinite(loss):
            raise RuntimeError(f"The loss is {loss} after {clock.steps} steps; lower the learning rate.")
        rate = round(max(0, clock.steps - UNTIMED_STEPS) * tokens / max(clock.elapsed, 1e-3))
        curve.append({"step": clock.steps, "seconds": round(clock.elapsed, 2), "loss": round(loss, 5)})
        print(f"step {clock.steps}  loss {loss:.4f}  {rate:,} tokens/s  {clock.elapsed:.0f} s", flush=True)
        return rate

    while clock.tick(optimizer):
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if clock.steps % REPORT_STEPS == 0 or clock.steps == UNTIMED_STEPS:
            report()
    done = {"steps": clock.steps, "tokens": clock.steps * tokens, "tokens_per_s": report()}
    return {**done, "loss": curve[-1]["loss"], "curve": curve}


def train_policy(
    scale: Scale, held_out: Collection[Key], seconds: float, device: str, seed: int, path: Path, base: Path | None
) -> Any:
    """Train a policy on fresh text for `seconds` after start-up; return `optimise`'s record.

    It begins with the weights and tokenizer of `base`, or from scratch. Its prompts have no chat template. Rows are
    short at first. A policy that sees only long ones, where the question asked last is one of dozens, learns
    the form of a search but not in this time that it ends where the target is reached.
    """
    tokenizer = AutoTokenizer.from_pretrained(base) if base else make_tokenizer()
    tokenizer.chat_template = None
    shapes, spelling = {"short": scale.short_length, "long": scale.length}, spelling_of(tokenizer)
    streams = {
        name: iter(
            DataLoader(
                Streams(scale.rows * scale.length // length, length, held_out, seed + number, spelling),
                batch_size=None,
                num_workers=scale.workers,
            )
        )
        for number, (name, length) in enumerate(shapes.items())
    }
    for stream in streams.values():
        next(stream)  # the workers are forked before CUDA is touched
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) if base else make_policy(scale)
    model.to(device).train()  # type: ignore[arg-type]
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)  # one layer is compiled for each of the two shapes, all run it
    clock = Clock(seconds, scale.learning_rate)

    def loss() -> Tensor:
        is_long = clock.progress > SHORT_ROWS or clock.steps <= UNTIMED_STEPS // 2
        batch = next(streams["long" if is_long else "short"])
        batch = (batch.pin_memory() if device == "cuda" else batch).to(device, non_blocking=True).long()
        return next_token_loss(model, batch)

    result = optimise(model, loss, clock, scale.rows * scale.length)
    model.save_pretrained(path)  # in float32
    tokenizer.save_pretrained(path)
    return result
