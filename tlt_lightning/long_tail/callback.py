"""Train the drafter beside the policy, in the time that the long tail leaves idle."""

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from tlt_lightning.arguments import Positive, checked
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.drafter.vocabulary import count_tokens
from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.attach import ServedHead
from tlt_lightning.long_tail.base import DrafterCallback
from tlt_lightning.long_tail.budget import AdaptiveBudget, TrainingBudget
from tlt_lightning.long_tail.plan import DrafterPlan
from tlt_lightning.long_tail.publishing import held_out_sample
from tlt_lightning.long_tail.trainer import TrainingCosts, TrainingStretch
from tlt_lightning.metrics import IterationLog
from tlt_lightning.policy import causal_lm
from tlt_lightning.ranks.idle_windows import IdleWindow
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.seeds import iteration_seed

_LEAST_STATES = 0.1  # of an iteration's tokens: some are held out, and a decision needs several prompts


class LongTailIdleCallback(DrafterCallback):
    """Trains a drafter beside the policy, and publishes it whenever it drafts better.

    1. At the start the engine, a `VLLMEngine` whose selector may choose the drafter `learned`, loads the head that
       training starts from; a random one drafts nothing yet.
    2. During a rollout a rank that is done trains while others still write, and stops within one pack of their end.
    3. After the rollout the ranks' weights are averaged by how much each has trained. After the first one a new head
       of a reduced vocabulary is given the tokens that end a text and the commonest of all ranks', for good.
    4. After the update the hidden states of the policy's own passes go to the buffer, and all ranks train on what the
       iteration's budget leaves over.
    5. Before the next rollout the trained weights are published and pushed to the engine if they draft held-out text
       better than the published ones. Training goes on from them either way.

    `dirpath/final` is the head published last, `dirpath/start-<rank>` the one that the run started from. A run goes on
    from a checkpoint, also within an iteration up to its last step, exactly with a `FixedBudget` and no idle windows,
    which depend on the clock; on another number of ranks it goes on inexactly, and with another `drafter.head` the
    drafter begins anew. docs/metrics.md lists the metrics, `drafter/...`.

    Args:
        drafter: Drafter to train, and its optimizer, whose learning rate rises over the first 50 training steps, or 10
            of a random head. A random head first learns drafts of 3 tokens, from packs of a quarter of `pack_tokens`;
            once it makes 2 tokens per engine step, drafts 1.5 times as long as that number, from packs of half.
        pack_tokens: Tokens of one training step, a multiple of 128. Memory and the time until an idle window is left
            grow with it.
        buffer_gib: Each rank's host memory for hidden states, in GiB, twice that while it takes over an iteration's;
            a 7B policy takes 28.7 kB a token. Each rank saves it beside the checkpoint, rank zero in it.
        budget: Decides how many of an iteration's tokens are trained on; None is an `AdaptiveBudget`, which trains as
            much as pays.
        max_passes: With several ranks, passes over the buffer in the idle windows of one iteration.
        dirpath: Where the finished drafter goes; None is `drafter` in the Trainer's `default_root_dir`.

    Example:
        >>> from tlt_lightning import DrafterModule
        >>> callback = LongTailIdleCallback(DrafterModule("Qwen/Qwen2.5-0.5B-Instruct"))  # doctest: +SKIP
    """

    data: ClassVar[str] = "RolloutDataModule"

    @checked()
    def __init__(
        self,
        drafter: DrafterModule,
        pack_tokens: int = 4096,
        buffer_gib: Positive = 1.0,
        budget: TrainingBudget | None = None,
        max_passes: Positive = 2.0,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(drafter, pack_tokens, buffer_gib, dirpath)
        self.budget = AdaptiveBudget() if budget is None else budget
        self.max_passes = max_passes
        self._served = ServedHead(drafter)
        self._plan = DrafterPlan()
        self._costs: TrainingCosts | None = None
        self._seconds_tried = 0.0  # before the first iteration, which will be charged with them

    # 1. The start

    @override
    def on_engine_setup(self, trainer: L.Trainer, pl_module: Any, engine: RolloutEngine) -> None:
        """Build the drafter, and set it as the head that the engine loads."""
        start = self.folder(trainer) / f"start-{trainer.global_rank}"  # one per rank: none waits for another
        self._served.attach(engine, pl_module.policy_path, start)
        self.count_memory(pl_module)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._follow_sampling(trainer)
        self._plan = DrafterPlan()  # that of a checkpoint comes later

    def _follow_sampling(self, trainer: L.Trainer) -> None:
        """Judge drafts by the sampling of now, which a callback may change in each iteration."""
        self.drafter.acceptance = self.drafter.acceptance.of(trainer.datamodule.sampling)  # type: ignore[attr-defined]

    @override
    def expected_speedup(self, quality: DraftQuality) -> float | None:
        return self._served.expected_speedup(quality)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1 or not self.budget.is_empty:
            rank_zero_info("A training step of the drafter is tried and timed, before the first iteration.")
            started = time.perf_counter()
            self._costs = self.training.try_step()
            self._seconds_tried = time.perf_counter() - started
            rank_zero_info(
                "A training step of the drafter takes %.3g s, judging 1,000 tokens of text %.3g s.",
                *(self._costs.step, 1000 * self._costs.judged_token),
            )

    # 2. A rollout, and the decision before it (5.)

    @override
    def on_rollout_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.training and not self._plan.is_of(trainer.current_epoch):
            pl_module.iteration_log.charge("drafter_trial", self._seconds_tried)
            self._seconds_tried = 0.0
            self._begin_iteration(trainer, pl_module)
            pl_module.iteration_log.lap("drafter")
        elif self.publisher.version > self._served.version:  # the run was resumed, and validates first
            if self._plan.iteration != trainer.current_epoch:  # else the checkpoint has the policy's rows
                self.drafter.refresh_target(pl_module.policy)
            self._served.push(self.publisher)

    def _begin_iteration(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Publish and push what was trained, while all ranks are here and none writes yet."""
        started = time.perf_counter()
        self.drafter.refresh_target(pl_module.policy)
        self._follow_sampling(trainer)
        if self._plan.iteration != trainer.current_epoch:  # else the run was resumed within it
            self._plan = self._decide(trainer)
        self._plan.started = started
        pl_module.iteration_log.update(self._plan.metrics)
        is_newer = self.publisher.version > self._served.version
        if is_newer or (not self._served.is_cold and self._policy_rows_move(pl_module)):
            self._served.push(self.publisher)
        pl_module.iteration_log.mean("drafter/version", self._served.version)
        if self.publisher.data_version >= 0:
            pl_module.iteration_log.mean("drafter/policy_lag", trainer.global_step - self.publisher.data_version)
        pl_module.hidden_state_request = None
        if self._trains(trainer):
            # Nobody knows yet how much idle windows will take of the next iteration's.
            share = max(self._plan.share or 0.0, _LEAST_STATES) if trainer.world_size == 1 else 1.0
            width, seed = self.drafter.target_config.hidden_size, iteration_seed(trainer, "drafter", "choose")
            pl_module.hidden_state_request = self.buffer.request(self.drafter.layer_ids, width, share, seed)
        self.training.begin(iteration_seed(trainer, "drafter", "idle"))

    def _decide(self, trainer: L.Trainer) -> DrafterPlan:
        """Publish what was trained if it is better, and decide how much this iteration trains."""
        remaining = None if (last := trainer.max_epochs) in (None, -1) else last - trainer.current_epoch - 1
        if (decision := self.publisher.publish_if_better()) is not None:
            self.budget.note_decision(decision, remaining)
        share = self.budget.decide(trainer.current_epoch, remaining)
        metrics = {**({} if decision is None else decision.metrics()), **self.budget.metrics()}
        return DrafterPlan(trainer.current_epoch, share, metrics)

    def _policy_rows_move(self, pl_module: Any) -> bool:
        head = causal_lm(pl_module.policy).get_output_embeddings()
        return self.drafter.has_policy_rows and any(parameter.requires_grad for parameter in head.parameters())

    @override
    def on_rollout_idle(self, trainer: L.Trainer, pl_module: Any, window: IdleWindow) -> None:
        def may_go_on() -> bool:
            return window.is_open() and self.training.num_passes < self.max_passes

        if trainer.training and self._can_train(trainer):
            stretch = self._train(may_go_on, pl_module.iteration_log)
            pl_module.iteration_log.sum("drafter/idle_seconds_used", stretch.seconds)
            if stretch.losses and not window.is_open():
                pl_module.iteration_log.max("drafter/preemption_ms", 1e3 * stretch.overrun)

    # 3. After the rollout

    @override
    def on_rollout_scored(self, trainer: L.Trainer, pl_module: Any, batch: RolloutBatch) -> None:
        iteration_log = pl_module.iteration_log
        iteration_log.lap("other")
        if self.drafter.needs_vocabulary:
            counts = count_tokens(batch.input_ids, batch.lengths, self.drafter.target_config.vocab_size)
            self.training.choose_vocabulary(counts, pl_module.policy)
        self.training.average()
        iteration_log.sum("drafter/idle_seconds_available", iteration_log.seconds("idle"))
        for name in ("micro_steps", "tokens", "idle_seconds_used"):  # where nothing was trained
            iteration_log.sum(f"drafter/{name}", 0)
        counts = self.training.sum_over_ranks(torch.tensor([int(batch.lengths.sum()), self.training.num_seen]))
        self._plan.num_tokens, self._plan.num_trained = map(int, counts.tolist())
        iteration_log.mean("drafter/budget_tokens", (self._plan.share or 0.0) * self._plan.num_tokens)
        iteration_log.lap("drafter")

    # 4. After the update

    @override
    def on_hidden_states(self, trainer: L.Trainer, pl_module: Any, texts: Sequence[PolicyText]) -> None:
        self.buffer.add(texts)
        self.training.begin(iteration_seed(trainer, "drafter", "scored"))
        step_seconds = self._note_costs() if self._trains(trainer) else 0.0
        can_train, iteration_log = self._can_train(trainer), pl_module.iteration_log
        seconds = self._train_rest(trainer, iteration_log, step_seconds) if can_train else 0.0
        self.training.average()
        iteration_log.mean("drafter/seconds_not_hidden", seconds)
        iteration_log.lap("drafter")

    def _train_rest(self, trainer: L.Trainer, iteration_log: IterationLog, step_seconds: float) -> float:
        """Train on what idle windows left of the budget, shared among the ranks; return the seconds."""
        rest = (self._plan.share or 0.0) * self._plan.num_tokens - self._plan.num_trained
        steps_left = max(1, round(rest / trainer.world_size / self.training.step_tokens)) if rest > 0 else 0
        now = time.perf_counter()
        ends = now + self.budget.limit(now - (self._plan.started or now)) - step_seconds

        def may_go_on() -> bool:
            nonlocal steps_left
            steps_left -= 1
            return steps_left >= 0 and time.perf_counter() < ends

        return self._train(may_go_on, iteration_log).seconds

    def _note_costs(self) -> float:
        """Tell the budget what a training step and a decision take, before it pays; return the step's seconds.

        A collective: they are means over the ranks, which decide the same.
        """
        if self._costs is None:
            return 0.0
        decision = 2 * self._costs.judged_token * sum(map(len, held_out_sample(self.buffer.held_out)))
        seconds = self.training.sum_over_ranks(torch.tensor([self._costs.step, decision])) / self.training.num_ranks
        step, decision = seconds.tolist()
        self.budget.note_costs(step, decision)
        return step

    def _train(self, may_go_on: Callable[[], bool], iteration_log: IterationLog) -> TrainingStretch:
        before = self.training.num_seen
        stretch = self.training.train(may_go_on)
        stretch.write(iteration_log)
        iteration_log.sum("drafter/tokens", self.training.num_seen - before)
        return stretch

    def _trains(self, trainer: L.Trainer) -> bool:
        """Return True if this iteration trains the drafter: with nobody to wait for, not on a share of 0."""
        return self._plan.share is not None and (self._plan.share > 0 or trainer.world_size > 1)

    def _can_train(self, trainer: L.Trainer) -> bool:
        return self._trains(trainer) and len(self.buffer) > 0

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        self.budget.note_iteration(self._plan.measured(metrics, is_cold=self._served.is_cold))
        if self._plan.share == 0 and self._can_train(trainer) and iteration > 1 and not metrics["drafter/micro_steps"]:
            rank_zero_info("The drafter was not trained in iteration %d: no rank had idle time.", iteration)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._served.detach()

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {"budget": self.budget.state_dict(), "plan": self._plan.state_dict()}
        return {**state, **own} if (state := super().state_dict()) else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.budget.load_state_dict(state_dict["budget"])
        self._plan = DrafterPlan.restore(state_dict["plan"])
