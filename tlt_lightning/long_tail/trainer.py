"""The drafter's training inside the policy's run: micro-steps that stop at any time, and what of it is published.

Knows neither Trainer nor engine. What we do differently from TLT's spot trainer: weights are averaged over the workers
that trained, so that all engines serve the same drafter; nothing is published that is not better on held-out text.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR

from tlt_lightning.drafter.module import POLICY_ROWS, DrafterModule
from tlt_lightning.drafter.packing import PackedBatch, fill_pack, packs_of, plan_packs
from tlt_lightning.drafter.quality import DraftQuality, quality_of
from tlt_lightning.host_copy import HostCopy
from tlt_lightning.long_tail.buffer import DrafterBuffer

log = logging.getLogger(__name__)

_PACKS_PER_DRAW = 8  # sequences are drawn for several packs at once, which then leave few gaps
WARMUP_STEPS = 50
"""Micro-steps over which the learning rate rises to its full value."""

SumOverRanks = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Burst:
    """One stretch of training.

    Args:
        micro_steps: Packs trained on.
        loss: Sum of their losses.
        seconds: Wall-clock time.
        overrun: Seconds since training was last seen to be welcome: an upper bound on how late it stopped.
    """

    micro_steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    overrun: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether new weights are published.

    Args:
        before: What the published weights are worth on held-out text of now.
        after: What the weights trained since are worth on the same text.
    """

    before: DraftQuality
    after: DraftQuality

    @property
    def is_published(self) -> bool:
        """True if the new weights are better; the old ones are back otherwise."""
        return self.after.acceptance_length > self.before.acceptance_length

    @property
    def quality(self) -> DraftQuality:
        """What the weights in force are worth."""
        return self.after if self.is_published else self.before


class DrafterTrainer:
    """Trains a drafter on a buffer in micro-steps of one pack, each with an optimizer step.

    Args:
        drafter: Built; moved to `device`. Float32 weights; on a GPU its forward pass runs in bfloat16.
        buffer: What it learns from, and what it is judged by.
        pack_tokens: Tokens of a pack, a multiple of 128.
        device: Where to train.
        sum_over_ranks: Adds up a tensor over all workers, each of which has a trainer like this one; None if there is
            one worker. `average` and `settle` call it, so all workers must call those, in the same order.
    """

    def __init__(
        self,
        drafter: DrafterModule,
        buffer: DrafterBuffer,
        *,
        pack_tokens: int,
        device: torch.device,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> None:
        self.drafter = drafter.to(device)
        self.buffer = buffer
        self.pack_tokens = pack_tokens
        self.device = device
        self.optimizer: Any = drafter.configure_optimizers()
        # The first steps of a fresh Adam move every weight by the learning rate, whatever the gradient says of it.
        self._warmup = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
        self.version = 0
        """Counts what was published; 0 is what the run began with."""
        self.seen_version = -1
        """Newest policy version whose hidden states were trained on; -1 for none."""
        self.data_version = -1
        """The same of the published weights."""
        self.num_pending = 0
        """Micro-steps of all workers since the last decision."""
        self.num_stale = 0
        """Decisions in a row that published nothing."""
        self._sum_over_ranks = sum_over_ranks
        self._num_own = 0  # micro-steps of this worker that were not averaged yet
        self._packs: Iterator[PackedBatch] = iter(())
        self._published, self._candidate = HostCopy(), HostCopy()
        self._published.fill(self._weights().items())

    # Training

    def begin(self, seed: int) -> None:
        """Draw anew from the buffer; what is drawn from now on depends on `seed` and on what the buffer holds."""
        self._packs = self._draw(torch.Generator().manual_seed(seed))

    def train(self, may_go_on: Callable[[], bool]) -> Burst:
        """Train until `may_go_on()` is False, which is asked before each micro-step; needs data and `begin`."""
        burst, started = Burst(), time.perf_counter()
        asked = started
        while may_go_on():
            asked = time.perf_counter()
            burst.loss += self._micro_step()
            burst.micro_steps += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer's last step; the engine may want the device now
        now = time.perf_counter()
        burst.seconds, burst.overrun = now - started, now - asked if burst.micro_steps else 0.0
        self._num_own += burst.micro_steps
        if self._sum_over_ranks is None:
            self._count(burst.micro_steps)
        return burst

    def _count(self, micro_steps: int) -> None:
        if micro_steps:
            self.num_pending += micro_steps
            versions = (sequence.policy_version for sequence in self.buffer.training)  # the same on all workers
            self.seen_version = max(versions, default=self.seen_version)

    def _micro_step(self) -> float:
        with torch.enable_grad(), self._autocast():
            loss, _ = self.drafter.loss(next(self._packs))
        self.optimizer.zero_grad()
        loss.backward()
        value = loss.item()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        if math.isfinite(norm):
            self.optimizer.step()
            self._warmup.step()
        else:
            log.warning(
                "A micro-step of the drafter was left out: loss %s, norm of the gradient %s. Lower its learning rate.",
                value,
                norm,
            )
        return value

    def _draw(self, generator: torch.Generator) -> Iterator[PackedBatch]:
        while True:
            sequences = self.buffer.sample(_PACKS_PER_DRAW * self.pack_tokens, generator)
            plans = plan_packs([len(sequence) for sequence in sequences], self.pack_tokens)
            order = torch.randperm(len(plans), generator=generator).tolist()
            for plan in (plans[index] for index in order):
                pieces = [(sequences[piece.sequence], piece) for piece in plan]
                yield fill_pack(pieces, self.pack_tokens, self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    @torch.no_grad()
    def average(self) -> None:
        """Give all workers the mean of their weights, weighted by the micro-steps behind each; a collective.

        To be called before the buffer is given anything new.
        """
        if self._sum_over_ranks is None:
            return
        total = int(self._sum_over_ranks(torch.tensor(float(self._num_own), device=self.device)))
        share, self._num_own = self._num_own / max(total, 1), 0
        if total:
            self._load({name: self._sum_over_ranks(tensor * share) for name, tensor in self._weights().items()})
        self._count(total)

    # Publishing

    def settle(self) -> Decision | None:
        """Publish what was trained since the last decision, or take it back; a collective.

        The optimizer keeps what it has learned of the gradients' size: with moments that begin anew after each failure
        a few steps would fail again. None if nothing was trained, or if there is no held-out text to decide by.
        """
        if not self.num_pending:
            return None
        after = self._measure()
        if not after.num_steps:
            log.warning("There is no held-out text to judge the drafter by: its weights wait for the next iteration.")
            return None
        self._candidate.fill(self._weights().items())
        self._load(self._published.tensors)
        decision = Decision(self._measure(), after)
        if decision.is_published:
            self._load(self._candidate.tensors)
            self._published, self._candidate = self._candidate, self._published
            self.version += 1
            self.data_version = self.seen_version
        self.num_stale = 0 if decision.is_published else self.num_stale + 1
        self.num_pending = 0
        return decision

    def _measure(self) -> DraftQuality:
        """What the weights of now are worth on held-out text."""
        sums = torch.zeros(6, self.drafter.num_draft_tokens, dtype=torch.float64)
        with self._autocast():
            for batch in packs_of(self.buffer.held_out, self.pack_tokens, self.device):
                sums += self.drafter.measure(batch).sum(0)
        if self._sum_over_ranks is not None:
            sums = self._sum_over_ranks(sums.float().to(self.device)).cpu()
        return quality_of(sums)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine takes: the published weights, and rows of the policy's head where the drafter has its own."""
        for name, tensor in self.drafter.trainable_tensors():
            yield name, self._published.tensors.get(name, tensor)

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.drafter.trainable_tensors() if name != POLICY_ROWS}

    def _load(self, weights: dict[str, Tensor]) -> None:
        self.drafter.load_trainable(dict(self.drafter.trainable_tensors()) | weights)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, as tensors and primitives; that of this worker."""
        return {
            "weights": self._weights(),
            "optimizer": self.optimizer.state_dict(),
            "warmup": self._warmup.state_dict(),
            "published": self._published.tensors,
            "buffer": self.buffer.state_dict(),
            **{name: getattr(self, name) for name in _COUNTS},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` saved."""
        self._load(state_dict["weights"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._warmup.load_state_dict(state_dict["warmup"])
        self._published.fill(state_dict["published"].items())
        self.buffer.load_state_dict(state_dict["buffer"])
        for name in _COUNTS:
            setattr(self, name, state_dict[name])


_COUNTS = ("version", "seen_version", "data_version", "num_pending", "num_stale")
