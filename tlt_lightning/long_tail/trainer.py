"""Train a drafter inside the policy's run, in micro-steps that stop at any time.

Unlike TLT's spot trainer: weights are averaged over the ranks that trained, so
that all engines serve the same drafter; passes over the same text are capped; a lack of memory ends no run.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from tlt_lightning.drafter.module import POLICY_ROWS, DrafterModule
from tlt_lightning.drafter.packing import PACK_MULTIPLE, PackedBatch, fill_pack, packs_of, plan_packs
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail import curriculum
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.metrics import IterationLog
from tlt_lightning.training.optimization import apply_changed, fuse_on_gpu, settings_of

log = logging.getLogger(__name__)

_PACKS_PER_DRAW = 8  # sequences are drawn for several packs at once, which then leave few gaps
MAX_GRAD_NORM = 0.5  # as in the recipe of the warm-up, and in SpecForge
WARMUP_STEPS = 50
"""Micro-steps over which the learning rate of a head that drafts rises to its full value."""

MakePack = Callable[[], PackedBatch]


@dataclass(slots=True)
class TrainingStretch:
    """Counts losses, seconds and packs without memory of one stretch of training.

    `overrun` is the seconds since training was last seen to be welcome: an upper bound on how late it stopped.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    overrun: float = 0.0
    num_out_of_memory: int = 0

    def write(self, iteration_log: IterationLog) -> None:
        """Log how many losses there are, and those that are numbers: the others' steps were left out."""
        iteration_log.sum("drafter/micro_steps", len(self.losses))
        for loss in filter(math.isfinite, self.losses):
            iteration_log.mean("drafter/loss", loss)
        if self.num_out_of_memory:
            iteration_log.sum("drafter/out_of_memory", self.num_out_of_memory)


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Holds what was measured before a run: seconds of a training step, and of judging a token of text."""

    step: float
    judged_token: float


@dataclass(eq=False)
class DrafterTrainer:
    """Trains a drafter on a buffer in micro-steps of one pack, each with an optimizer step.

    A head that began with random weights follows `curriculum`.

    Args:
        drafter: Built; moved to `device`. Float32 weights; on a GPU its forward pass runs in bfloat16.
        buffer: Source of the packs.
        pack_tokens: Tokens of a pack, a multiple of 128.
        device: Device to train on.
        num_ranks: Ranks that train, each of which calls what is a collective.
        sum_over_ranks: Returns the sum of all ranks' tensors, on the device of this one's; a collective.
    """

    drafter: DrafterModule
    buffer: DrafterBuffer
    _: KW_ONLY
    pack_tokens: int
    device: torch.device
    num_ranks: int = 1
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda own: own

    def __post_init__(self) -> None:
        self._is_mixed = self.device.type == "cuda"
        self.drafter.to(self.device)
        self.drafter.compute_on(self.device, is_mixed=self._is_mixed)
        self.seen_version = -1
        """Newest policy version whose hidden states were trained on; -1 for none."""
        self.num_pending = 0
        """Micro-steps of all ranks since the last decision about publishing."""
        self._num_own, self._num_moved = 0, 0  # micro-steps not averaged yet, and those that were not left out
        self.num_seen = 0
        """Tokens trained on since `begin`."""
        self._draft_length = curriculum.FIRST_DRAFTS if self.drafter.head_path is None else None
        self._generator = torch.Generator()
        self._packs: Iterator[MakePack] = iter(())
        self._ahead: tuple[MakePack, PackedBatch] | None = None  # made while the device was at work
        self.renew_optimizer()

    def renew_optimizer(self) -> None:
        """Make a fresh optimizer, without the gradients of the past."""
        self.optimizer: Any = self.drafter.configure_optimizers()
        self._optimizer_settings = settings_of(self.optimizer)
        fuse_on_gpu(self.optimizer, self.device)
        # The first steps of a fresh Adam move every weight by the learning rate, whatever the gradient says of it.
        rising = curriculum.RISING_STEPS if self.drafter.head_path is None else WARMUP_STEPS
        self._warmup = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / rising))

    def weights(self) -> dict[str, Tensor]:
        """Return the trained tensors by name, live."""
        return {name: tensor for name, tensor in self.drafter.trainable_tensors() if name != POLICY_ROWS}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy `weights` into the trained tensors."""
        self.drafter.load_trainable(dict(self.drafter.trainable_tensors()) | weights)

    def choose_vocabulary(self, counts: Tensor, policy: nn.Module) -> None:
        """Let a new head draft the tokens that are commonest on all ranks, before it is trained; a collective.

        `counts` are how often this rank has seen each token, (V,).
        """
        self.drafter.choose_vocabulary(self.sum_over_ranks(counts))
        self.drafter.refresh_target(policy)

    # Training

    @property
    def step_tokens(self) -> int:
        """Tokens of a micro-step: a pack, or a part of one if the head began with random weights."""
        if self._draft_length is None:
            return self.pack_tokens
        return curriculum.step_tokens(self._draft_length, self.pack_tokens)

    @property
    def num_passes(self) -> float:
        """Passes over the buffer since `begin`."""
        return self.num_seen / max(1, self.buffer.num_tokens)

    def begin(self, seed: int) -> None:
        """Draw anew from the buffer; `seed` and the buffer fix all draws from now on."""
        self._generator = torch.Generator().manual_seed(seed)
        self.num_seen = 0
        self._packs, self._ahead = self._draw(), None

    def train(self, may_go_on: Callable[[], bool]) -> TrainingStretch:
        """Train until `may_go_on()`, asked before each micro-step, is False; after data and `begin`."""
        stretch, started = TrainingStretch(), time.perf_counter()
        asked = started
        while may_go_on():
            asked = time.perf_counter()
            try:
                stretch.losses.append(self._micro_step())
                continue
            except torch.OutOfMemoryError as error:
                message = str(error)
            # Here, not in the handler: its traceback holds the tensors of the step.
            stretch.num_out_of_memory += 1
            self._free()
            log.warning("The drafter had no memory for a training step and stops for now: %s", message)
            break
        if self._ahead is not None:  # its turn comes, but until then it takes no memory
            self._packs, self._ahead = chain([self._ahead[0]], self._packs), None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer's last step; the engine may want the device now
        now, num_steps = time.perf_counter(), len(stretch.losses)
        stretch.seconds, stretch.overrun = now - started, now - asked if asked > started else 0.0
        self._num_own += num_steps
        if self.num_ranks == 1:
            self._count(num_steps)
        return stretch

    def try_step(self) -> TrainingCosts:
        """Compute the gradients of random text and drop them; judge its drafts; return what both take.

        On a GPU once on whole packs and the longest drafts: so nothing is compiled in the time that training and
        decisions are charged with, and memory is known to suffice. Then as the first steps will be, on a CPU on the
        smallest pack.

        Raises:
            MisconfigurationException: The device has no memory for a pack.
        """
        num_tokens = self.step_tokens if self._is_mixed else PACK_MULTIPLE
        try:
            if self._is_mixed:
                self._try(self.pack_tokens)
            self.drafter.most_steps = self._draft_length
            step, judging = self._try(num_tokens)
        except torch.OutOfMemoryError as error:
            raise MisconfigurationException(
                f"`LongTailIdleCallback(pack_tokens={self.pack_tokens})`: a training step of the drafter does not fit "
                f"beside policy and engine: {error} Lower `pack_tokens`, or leave more memory (`engine.kv_cache_gib`)."
            ) from error
        finally:
            self.optimizer.zero_grad()
        return TrainingCosts(step * self.step_tokens / num_tokens, judging / num_tokens)

    def _try(self, num_tokens: int) -> tuple[float, float]:
        """Return the seconds of a pass with gradients, and of judging, over a pack of random text."""
        width, generator = self.drafter.target_config.hidden_size, torch.Generator().manual_seed(0)
        ids = torch.randint(self.drafter.target_config.vocab_size, (num_tokens + 2,), generator=generator)
        states = torch.randn(num_tokens + 2, 4 * width, generator=generator).bfloat16()
        text = PolicyText(ids, states[:, : 3 * width], states[:, 3 * width :], prompt_length=1)
        started = time.perf_counter()
        pack = next(packs_of([text], num_tokens, self.device))
        self._backward(pack).item()  # waits for the device
        trained = time.perf_counter()
        with self.autocast():
            self.drafter.measure(pack)
        return trained - started, time.perf_counter() - trained

    def _count(self, micro_steps: int) -> None:
        if micro_steps:
            self.num_pending += micro_steps
            versions = (sequence.policy_version for sequence in self.buffer.training)  # the same on all ranks
            self.seen_version = max(versions, default=self.seen_version)

    @property
    def learns_first_drafts(self) -> bool:
        """True while a new head learns the shortest drafts: what it was worth an iteration ago says little."""
        return self._draft_length == curriculum.FIRST_DRAFTS

    def note_quality(self, acceptance_length: float) -> None:
        """Learn how well the trained weights draft: the better a new head, the longer are the drafts that it learns."""
        if self._draft_length is not None:
            self._draft_length = curriculum.next_drafts(self._draft_length, acceptance_length)

    def _backward(self, batch: PackedBatch) -> Tensor:
        with torch.enable_grad(), self.autocast():
            loss, _ = self.drafter.loss(batch, compares=False)
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    def _make_pack(self) -> tuple[MakePack, PackedBatch]:
        make = next(self._packs)
        return make, make()

    def _micro_step(self) -> float:
        self.drafter.most_steps = self._draft_length
        (_, batch), self._ahead = self._ahead or self._make_pack(), None
        loss = self._backward(batch)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        total_norm = clip_grad_norm_(parameters, MAX_GRAD_NORM)
        self._ahead = self._make_pack()
        value, norm = torch.stack([loss.float(), total_norm.float()]).tolist()  # here alone the host waits
        if math.isfinite(norm):
            self.optimizer.step()
            self._warmup.step()
            self._num_moved += 1
        else:
            log.warning(
                "A micro-step of the drafter was left out: loss %s, norm of the gradient %s. Lower its learning rate.",
                value,
                norm,
            )
        self.num_seen += self.step_tokens
        return value

    def _free(self) -> None:
        """Give up the memory of gradients and of packs that were made ahead."""
        self.optimizer.zero_grad()
        self._packs, self._ahead = self._draw(), None
        torch.cuda.empty_cache()

    def _draw(self) -> Iterator[MakePack]:
        num_tokens = self.step_tokens
        while True:
            sequences = self.buffer.sample(_PACKS_PER_DRAW * num_tokens, self._generator)
            plans = plan_packs([len(sequence) for sequence in sequences], num_tokens)
            for index in torch.randperm(len(plans), generator=self._generator).tolist():
                pieces = [(sequences[piece.sequence], piece) for piece in plans[index]]
                yield partial(fill_pack, pieces, num_tokens, self.device)

    def autocast(self) -> torch.autocast:
        """Compute in bfloat16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_mixed)

    @torch.no_grad()
    def average(self) -> None:
        """Average the weights over all ranks by the micro-steps that moved them; a collective.

        Call it before the buffer takes anything new.
        """
        if self.num_ranks == 1:
            return
        own = torch.tensor([self._num_own, self._num_moved])
        total, num_moved = map(int, self.sum_over_ranks(own).tolist())
        share, self._num_own, self._num_moved = self._num_moved / max(num_moved, 1), 0, 0
        if num_moved:
            self.load_weights({name: self.sum_over_ranks(each * share) for name, each in self.weights().items()})
        self._count(total)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact resume of this rank needs, as tensors and primitives."""
        return {
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_name": type(self.optimizer).__name__,
            "optimizer_settings": self._optimizer_settings,
            "warmup": self._warmup.state_dict(),
            "draft_length": self._draft_length,
            "buffer": self.buffer.state_dict(),
            "seen_version": self.seen_version,
            "num_pending": self.num_pending,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` saved."""
        self.load_weights(state_dict["weights"])
        name, saved = type(self.optimizer).__name__, state_dict["optimizer_name"]
        if name == saved:
            self.optimizer.load_state_dict(state_dict["optimizer"])
            fuse_on_gpu(self.optimizer, self.device)
            self._warmup.load_state_dict(state_dict["warmup"])
            settings = state_dict["optimizer_settings"], self._optimizer_settings
            apply_changed(self.optimizer, [self._warmup], *settings, "drafter's optimizer")
        else:
            log.warning("The drafter's optimizer begins anew: it is %s, that of the checkpoint was %s.", name, saved)
        self._draft_length = state_dict["draft_length"]
        self.buffer.load_state_dict(state_dict["buffer"])
        self.seen_version, self.num_pending = state_dict["seen_version"], state_dict["num_pending"]
