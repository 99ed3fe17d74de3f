"""LongTailIdleCallback: the drafter follows the policy, and learns in the time that the long tail leaves idle."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import check_num_tokens
from tlt_lightning.engine.base import RolloutEngine, RolloutProgress
from tlt_lightning.hidden_states import HiddenStateRequest, PolicyText
from tlt_lightning.hooks import IdleWindow, RolloutCallback
from tlt_lightning.long_tail.attach import check_engine, serve
from tlt_lightning.long_tail.books import DrafterBooks
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.checkpoint import gather_others, make_group, state_of_rank
from tlt_lightning.long_tail.policy_drift import PolicyDrift
from tlt_lightning.long_tail.record import DrafterArchive
from tlt_lightning.long_tail.trainer import DrafterTrainer
from tlt_lightning.policy import causal_lm, response_logps
from tlt_lightning.seeds import run_seed, seed_of

log = logging.getLogger(__name__)


class LongTailIdleCallback(RolloutCallback):
    """Trains a drafter beside the policy, and hands it to the engine whenever it drafts better than the one in use.

    With several workers it trains while a worker waits for the others' rollouts, and stops within one pack of the end
    of the wait; the workers' weights are then averaged by how much each has trained. A single worker never waits: it
    trains after each update, on a share of the iteration's tokens. Hidden states come out of the policy's own passes.
    Everything needed to go on is in the run's checkpoints, every worker's hidden states and optimizer included. On
    another number of workers a run goes on too, but not exactly.

    The engine must be a `VLLMEngine` that speculates, with a selector that may choose the drafter `learned`. Without
    `drafter.head` the run starts from a random head. It drafts nothing before it was trained and published; until then
    the engine's other drafters (siblings, n-grams) work alone, afterwards whoever pays most.

    Logged each iteration under `drafter/`, as means over the workers: `loss`, `micro_steps`, `idle_seconds_available`,
    `idle_seconds_used`, `preemption_ms` (at most so late was an idle window left); at each decision to publish
    `acceptance_before` and `acceptance_after` (tokens per engine step on held-out text: of the published weights, of
    the new ones), `published` (1 if the new ones were better), `snapshot_ms`, and `top1_pos_<k>` and `top3_pos_<k>` of
    what is published; of what the engine uses, `version` and `policy_lag` (optimizer steps since the policy it learned
    from); and `policy_drift` (KL of the policy from what it was in the first iteration). `time/drafter` is what all
    this cost; time in idle windows costs nothing and is part of `time/idle`.

    Args:
        drafter: What is trained, with its optimizer, whose learning rate rises over the first 50 training steps.
        pack_tokens: Tokens of one training step, a multiple of 128. Memory and the time until an idle window is left
            grow with it.
        buffer_gib: Each worker's host memory for hidden states, in GiB, and twice that while an iteration's are taken
            over; a 7B policy takes 28.7 kB a token. Checkpoints grow by it times the number of workers, and so does the
            host memory of rank zero while it saves one.
        share: With a single worker, train on this share of an iteration's tokens; above 1 sees them several times, 0
            never trains. A tenth took 0.5 of 7.5 seconds with the benchmarks' policy of 23 million weights.
        tail_requests: With a single worker, begin with that share already between engine steps once no more requests
            than this are left; 0 trains after the rollout alone.
        every_n_iterations: Train in every n-th iteration only.
        patience: Stop training after this many decisions in a row that published nothing; None never stops.
        dirpath: Where snapshots, the finished drafter and its picture go; None is `drafter` in the Trainer's
            `default_root_dir`.

    Example:
        >>> from tlt_lightning import DrafterModule
        >>> drafter = DrafterModule("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
        >>> trainer = L.Trainer(callbacks=[LongTailIdleCallback(drafter)])  # doctest: +SKIP
    """

    def __init__(
        self,
        drafter: DrafterModule,
        pack_tokens: int = 4096,
        buffer_gib: float = 1.0,
        share: float = 0.1,
        tail_requests: int = 0,
        every_n_iterations: int = 1,
        patience: int | None = None,
        dirpath: str | None = None,
    ) -> None:
        for name, value, least in (
            ("share", share, 0),
            ("tail_requests", tail_requests, 0),
            ("every_n_iterations", every_n_iterations, 1),
            ("patience", 1 if patience is None else patience, 1),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        if buffer_gib <= 0:
            raise ValueError(f"`buffer_gib` must be positive, got {buffer_gib}.")
        check_num_tokens(pack_tokens, "pack_tokens")
        self.drafter = drafter
        self.buffer = DrafterBuffer(int(buffer_gib * 2**30))
        self.pack_tokens = pack_tokens
        self.share = share
        self.tail_requests = tail_requests
        self.every_n_iterations = every_n_iterations
        self.patience = patience
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.archive = DrafterArchive(drafter)
        self._head_dir: tempfile.TemporaryDirectory[str] | None = None
        self._engine: RolloutEngine | None = None
        self._served = 0
        self._trainer: DrafterTrainer | None = None
        self._drift = PolicyDrift()
        self._iteration = -1
        self._num_tokens = 0  # of the iteration's texts
        self._books = DrafterBooks()
        self._group: ProcessGroup | None = None

    # Set-up

    def on_engine_setup(self, trainer: L.Trainer, pl_module: Any, engine: RolloutEngine) -> None:
        """Build the drafter, and have the engine load it."""
        vllm, speculation = check_engine(engine, self.drafter, pl_module.policy_path)
        if self._head_dir is None:
            self._head_dir = tempfile.TemporaryDirectory(prefix="tlt-drafter-")  # one per rank: none waits for another
        serve(vllm, speculation, self.drafter, Path(self._head_dir.name))
        self._engine, self._served = engine, 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._engine is None:
            raise MisconfigurationException("`LongTailIdleCallback` needs a `RolloutDataModule`.")
        if self._trainer is None:
            add_up = partial(trainer.strategy.reduce, reduce_op="sum") if trainer.world_size > 1 else None
            self._group = make_group() if trainer.world_size > 1 else None
            self._trainer = DrafterTrainer(
                self.drafter,
                self.buffer,
                pack_tokens=self.pack_tokens,
                device=trainer.strategy.root_device,
                sum_over_ranks=add_up,
            )

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._iteration = -1  # an earlier run may have ended in the iteration that this one begins with
        if trainer.is_global_zero:
            self.archive.open(self.dirpath or Path(trainer.default_root_dir) / "drafter")

    # An iteration

    @override
    def on_rollout_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.training and self._iteration != trainer.current_epoch:
            self._begin_iteration(trainer, pl_module)
            pl_module.iteration_log.lap("drafter")
        elif self._loop.version > self._served:
            self._push()  # the run was resumed, and validates first

    def _begin_iteration(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Decide on what was trained since the last rollout, while all workers are here and none writes yet."""
        self._iteration = epoch = trainer.current_epoch
        self._books = DrafterBooks()
        self._decide(trainer, pl_module)
        is_cold = self.drafter.head_path is None and self._loop.version == 0
        if not is_cold and (self._loop.version > self._served or self._policy_rows_move(pl_module)):
            self._push()
        if self._loop.data_version >= 0:
            self._books.noted["drafter/policy_lag"] = trainer.global_step - self._loop.data_version
        is_alone = trainer.world_size == 1
        wants_states = self.trains(trainer, epoch if is_alone else epoch + 1)
        pl_module.hidden_state_request = self._request(trainer) if wants_states else None
        self._loop.begin(_seed("idle", trainer))

    def _request(self, trainer: L.Trainer) -> HiddenStateRequest:
        """Ask for no more texts than fit into the buffer, or than are trained on and held out where that is known."""
        bytes_per_token = 4 * 2 * self.drafter.target_config.hidden_size + 8  # four bfloat16 states, and the token
        share = self.share / (1 - self.buffer.held_out_share) if trainer.world_size == 1 else 1.0
        max_tokens = self.buffer.max_bytes // bytes_per_token
        return HiddenStateRequest(self.drafter.layer_ids, max_tokens, share, _seed("choose", trainer))

    def _push(self) -> None:
        assert self._engine is not None
        self._engine.update_drafter(self._loop.published(), self._loop.version)
        self._served = self._loop.version

    def _policy_rows_move(self, pl_module: Any) -> bool:
        head = causal_lm(pl_module.policy).get_output_embeddings()
        return self.drafter.has_policy_rows and any(parameter.requires_grad for parameter in head.parameters())

    def _decide(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.drafter.refresh_target(pl_module.policy)
        decision = self._loop.settle()
        if decision is None:
            return
        self._books.decided(decision)
        self._books.noted |= self.archive.decided(decision, self._loop.version)
        if self._is_over and trainer.is_global_zero:
            log.info("The drafter has not improved in %d decisions: it is trained no more.", self._loop.num_stale)

    @override
    def on_rollout_progress(self, trainer: L.Trainer, pl_module: Any, progress: RolloutProgress) -> None:
        if progress.waiting or not 0 < progress.running <= self.tail_requests:
            return
        is_ours = trainer.training and trainer.world_size == 1 and self._can_train(trainer)
        if is_ours and self._serial_steps(progress.tokens) > self._books.micro_steps:
            pl_module.iteration_log.lap("rollout")
            self._train_serially(1)
            pl_module.iteration_log.lap("drafter")

    @override
    def on_rollout_idle(self, trainer: L.Trainer, pl_module: L.LightningModule, window: IdleWindow) -> None:
        if trainer.training and self._can_train(trainer):
            self._books.idle.append(self._loop.train(window.is_open))

    @override
    def on_rollout_scored(self, trainer: L.Trainer, pl_module: Any, batch: RolloutBatch) -> None:
        pl_module.iteration_log.lap("other")
        self._loop.average()
        self._books.noted["drafter/policy_drift"] = self._drift.measure(batch, partial(_logps, trainer, pl_module))
        self._num_tokens = int(batch.lengths.sum())
        if pl_module.hidden_state_request is None:
            self._log_books(pl_module)
        pl_module.iteration_log.lap("drafter")

    @override
    def on_hidden_states(self, trainer: L.Trainer, pl_module: Any, texts: Sequence[PolicyText]) -> None:
        self.buffer.add(texts)
        self._loop.begin(_seed("scored", trainer))
        if trainer.world_size == 1 and self._can_train(trainer):
            self._train_serially(self._serial_steps(self._num_tokens) - self._books.micro_steps)
        self._log_books(pl_module)
        pl_module.iteration_log.lap("drafter")

    def _serial_steps(self, num_tokens: int) -> int:
        return max(1, round(self.share * num_tokens / self.pack_tokens)) if self.share else 0

    def _train_serially(self, num_steps: int) -> None:
        left = iter(range(num_steps))
        self._books.serial.append(self._loop.train(lambda: next(left, None) is not None))

    def trains(self, trainer: L.Trainer, epoch: int) -> bool:
        """Whether the drafter is trained in iteration `epoch`, counted from 0, as far as is known now."""
        is_frozen = trainer.world_size == 1 and self.share == 0
        return not is_frozen and not self._is_over and (epoch + 1) % self.every_n_iterations == 0

    def _can_train(self, trainer: L.Trainer) -> bool:
        return self.trains(trainer, trainer.current_epoch) and len(self.buffer) > 0

    @property
    def _is_over(self) -> bool:
        return self.patience is not None and self._loop.num_stale >= self.patience

    # Its ends

    def _log_books(self, pl_module: Any) -> None:
        log = pl_module.iteration_log
        log.update({**self._books.metrics(log.seconds("idle")), "drafter/version": float(self._served)})

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        self.archive.record(iteration, metrics)
        is_unused = trainer.world_size > 1 and self._can_train(trainer) and not metrics["drafter/micro_steps"]
        if is_unused and trainer.is_global_zero and iteration > 1:
            log.info(
                "The drafter was not trained in iteration %d: the workers finished together and none had idle time.",
                iteration,
            )

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._decide(trainer, pl_module)
        pl_module.hidden_state_request = None
        self.archive.finish(is_trained=self.drafter.head_path is not None or self._loop.version > 0)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.archive.abandon()

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._trainer is None:
            return {}
        history = {iteration: dict(values) for iteration, values in self.archive.history.items()}
        return {"trainer": self._trainer.state_dict(), "drift": self._drift.state_dict(), "history": history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loop.load_state_dict(state_dict["trainer"])
        self._drift.load_state_dict(state_dict["drift"])
        self.archive.history = {int(iteration): dict(values) for iteration, values in state_dict["history"].items()}

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._group is not None and not trainer.interrupted:  # the others may not come after an error
            state = checkpoint["callbacks"][self.state_key]
            state["others"] = gather_others(state, self._group)

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint["callbacks"].get(self.state_key)) is not None:
            checkpoint["callbacks"][self.state_key] = state_of_rank(state, trainer.global_rank, trainer.world_size)

    @property
    def _loop(self) -> DrafterTrainer:
        assert self._trainer is not None, "used before `setup`"
        return self._trainer


def _logps(trainer: L.Trainer, pl_module: Any, batch: RolloutBatch) -> Tensor:
    part = move_data_to_device(batch, pl_module.device)
    with trainer.precision_plugin.forward_context():
        return response_logps(pl_module.policy, part)[0]


def _seed(stage: str, trainer: L.Trainer) -> int:
    """A seed that a resumed run finds again, of its own for each iteration and rank."""
    return seed_of(run_seed(), "drafter", stage, trainer.current_epoch, trainer.global_rank)
