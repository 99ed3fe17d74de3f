"""RolloutDataModule: one epoch is one policy iteration, its batches are made by the policy itself."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from tlt_lightning.checks import check_context, check_sizes, check_trainer
from tlt_lightning.data.batch import Prompt, Rollout, RolloutBatch
from tlt_lightning.data.collate import collate, plan_minibatches
from tlt_lightning.data.collector import RolloutCollector
from tlt_lightning.data.dynamic_sampling import DynamicSampling, has_spread, split_groups
from tlt_lightning.data.idle import IdleWindows
from tlt_lightning.data.liveness import Liveness
from tlt_lightning.data.loader import RolloutLoader
from tlt_lightning.data.prompts import PromptCursor, PromptSource, load_prompts
from tlt_lightning.engine.base import RolloutEngine, Sampling
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics import combine_over_ranks, rollout_metrics
from tlt_lightning.objectives.ppo import explained_variance
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rewards import RewardPool, RewardTerm
from tlt_lightning.seeds import run_seed, seed_of
from tlt_lightning.timing import LapClock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tlt_lightning.module import RLModule

log = logging.getLogger(__name__)


class RolloutDataModule(L.LightningDataModule):
    """Rolls out the policy on prompts, scores the responses, and yields the minibatches of an iteration.

    Args:
        engine: Writes the responses, for example `tlt_lightning.engine.VLLMEngine`.
        rewards: Reward functions and their weights. The first one also decides what counts as correct in `val/accuracy`
            and pass@k: a score above one half.
        train: Prompts to learn from.
        val: Held-out prompts for `validate`, `predict` and the validation during `fit`.
        group_size: Responses to each prompt.
        prompts_per_iteration: Prompts of one iteration, over all ranks.
        micro_batch_size: Sequences in one forward and backward pass on one rank, on average: long ones share a pass
            with few others and short ones with many, so that the largest pass is as small as it can be. An optimizer
            step takes `Trainer(accumulate_grad_batches)` passes.
        inner_epochs: Passes over an iteration's rollouts.
        dynamic_sampling: Draw further prompts in place of those whose responses all earned the same (DAPO); None keeps
            them, and they teach nothing.
        sampling: How responses are sampled in training.
        val_sampling: How they are in validation and prediction; None is as in training.
        val_group_size: Responses to each held-out prompt; k for pass@k goes up to it.
        max_prompt_tokens: Longest prompt.
        long_prompts: `drop` leaves longer prompts out and reports them, `error` refuses to start.
        reward_workers: Threads that run reward functions during the rollout.
        reward_timeout: Seconds one call of a reward function may take.
        reward_on_error: Score of a response whose reward function raised or took too long.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: list[RewardTerm],
        train: PromptSource | None = None,
        val: PromptSource | None = None,
        group_size: int = 8,
        prompts_per_iteration: int = 32,
        micro_batch_size: int = 8,
        inner_epochs: int = 1,
        dynamic_sampling: DynamicSampling | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        val_sampling: Sampling | None = None,
        val_group_size: int = 1,
        max_prompt_tokens: int = 512,
        long_prompts: Literal["drop", "error"] = "drop",
        reward_workers: int = 4,
        reward_timeout: float = 10.0,
        reward_on_error: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {
            "group_size": group_size,
            "prompts_per_iteration": prompts_per_iteration,
            "micro_batch_size": micro_batch_size,
            "inner_epochs": inner_epochs,
            "val_group_size": val_group_size,
            "max_prompt_tokens": max_prompt_tokens,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        if not rewards:
            raise ValueError("`rewards` is empty; give at least one reward function.")
        if sampling.temperature == 0:
            raise ValueError("`sampling.temperature` 0 writes the same response to a prompt every time; use 1.0.")
        self.engine = engine
        self.rewards = rewards
        self.train_source, self.val_source = train, val
        self.group_size = group_size
        self.prompts_per_iteration = prompts_per_iteration
        self.micro_batch_size = micro_batch_size
        self.inner_epochs = inner_epochs
        self.dynamic_sampling = dynamic_sampling
        self.sampling = sampling
        self.val_sampling = val_sampling or sampling
        self.val_group_size = val_group_size
        self.max_prompt_tokens = max_prompt_tokens
        self.long_prompts = long_prompts
        self.reward_workers, self.reward_timeout, self.reward_on_error = reward_workers, reward_timeout, reward_on_error
        self.clock = LapClock()
        self.liveness: Liveness | None = None
        self.cursor: PromptCursor | None = None
        self._metrics: dict[str, float] = {}

    # Set-up and tear-down

    @override
    def setup(self, stage: str) -> None:
        """Read the prompts, then load the engine: while the accelerator is empty, and after all checks have passed."""
        check_trainer(self._trainer)
        if stage == "fit":
            check_sizes(self._trainer, self, self._module.objective)
        self._rank, self._world_size = self._trainer.global_rank, self._trainer.world_size
        self._seed = run_seed()
        policy = self._module.policy_path
        max_model_len = self.max_prompt_tokens + max(self.sampling.max_tokens, self.val_sampling.max_tokens)
        check_context(policy, max_model_len)
        self.tokenizer = load_tokenizer(policy)
        self.train_prompts = self._load_prompts("train", self.train_source, needed=stage == "fit")
        self.val_prompts = self._load_prompts("val", self.val_source, needed=stage != "fit")
        self.cursor = PromptCursor(len(self.train_prompts), self._seed)
        self.pool = RewardPool(
            self.rewards, num_workers=self.reward_workers, timeout=self.reward_timeout, on_error=self.reward_on_error
        )
        self.liveness = Liveness(self._trainer) if self._world_size > 1 else None
        self.idle = None if self.liveness is None else IdleWindows(self.liveness)
        call_rollout_hook(self._trainer, "on_engine_setup", self.engine)
        self.engine.setup(policy, max_model_len=max_model_len, seed=self._seed + self._rank)
        # What is logged has been combined over the ranks, at which Lightning advises to do it.
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*")

    def _load_prompts(self, name: str, source: PromptSource | None, *, needed: bool) -> list[Prompt]:
        if source is None:
            if needed:
                raise MisconfigurationException(f"`data.{name}` is not set; give at least `data.{name}.path`.")
            return []
        prompts = load_prompts(
            source, self.tokenizer, max_prompt_tokens=self.max_prompt_tokens, too_long=self.long_prompts
        )
        if name == "val" and len(prompts) < self._world_size:
            raise MisconfigurationException(
                f"`data.val` has {len(prompts)} prompts, fewer than {self._world_size} ranks; give every rank one."
            )
        return prompts

    @override
    def teardown(self, stage: str) -> None:
        self.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.liveness is not None:
            self.liveness.report(exception)
        try:
            self.close()  # Lightning runs no teardown after an exception
        except Exception:  # a broken device must not hide the error that broke it
            log.exception("The engine could not be closed after the error that ended the run.")

    def close(self) -> None:
        """Free the engine and stop the reward workers; safe to call twice."""
        if self.liveness is not None:
            self.liveness.close()
        if hasattr(self, "pool"):
            self.pool.close()
        self.engine.close()  # last: on a broken device it may raise

    @override
    def state_dict(self) -> dict[str, Any]:
        assert self.cursor is not None, "`state_dict` before `setup`"
        return {"cursor": self.cursor.position, "engine": self.engine.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.cursor is not None, "`load_state_dict` before `setup`"
        self.cursor.position = state_dict["cursor"]
        self.engine.load_state_dict(state_dict["engine"])

    # Loaders

    @override
    def train_dataloader(self) -> RolloutLoader[RolloutBatch]:
        num_sequences = self.prompts_per_iteration // self._world_size * self.group_size
        return RolloutLoader(num_sequences // self.micro_batch_size * self.inner_epochs, self._train_batches)

    @override
    def val_dataloader(self) -> RolloutLoader[list[Rollout]] | list[Any]:
        return RolloutLoader(1, self._val_rollouts) if self.val_prompts else []

    @override
    def predict_dataloader(self) -> RolloutLoader[list[Rollout]]:
        return RolloutLoader(1, self._val_rollouts)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(batch, RolloutBatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch  # held-out rollouts are text and stay where they are

    # One iteration

    def _train_batches(self) -> Iterator[RolloutBatch]:
        self.clock.lap("other")
        module = self._module
        rollouts = self._train_rollouts()
        batch = collate(rollouts, pad_id=self._pad_id, temperature=self.sampling.temperature)
        self.clock.lap("other")
        single_update = self.inner_epochs * self._steps_per_pass(batch) == 1
        batch = module.score(batch, self.micro_batch_size, single_update=single_update)
        batch.advantages, batch.returns = module.objective.advantages(batch, self._sum_over_ranks)
        if batch.values is not None and batch.returns is not None:
            explained = explained_variance(batch.values, batch.returns, batch.response_mask, self._sum_over_ranks)
            self._metrics["train/explained_variance"] = explained.item()
        self.clock.lap("logprobs")
        call_rollout_hook(self._trainer, "on_rollout_scored", batch)
        self.clock.lap("other")
        yield from self._minibatches(batch)

    def _train_rollouts(self) -> list[Rollout]:
        """Roll out this rank's share of groups; with dynamic sampling, of groups with a learning signal."""
        assert self.cursor is not None
        collector, wanted = self._collector(self.clock), self.prompts_per_iteration // self._world_size
        rounds = 1 if self.dynamic_sampling is None else self.dynamic_sampling.max_rounds
        informative: list[list[Rollout]] = []
        others: list[list[Rollout]] = []
        for number in range(rounds):
            missing = wanted - len(informative)
            # All ranks draw as many as the neediest lacks, so that their cursors stay the same.
            num_drawn = self._max_over_ranks(missing) * self._world_size
            if not num_drawn:
                break
            drawn = self.cursor.take(num_drawn, rank=self._rank, world_size=self._world_size)[:missing]
            rollouts = collector.collect(
                [self.train_prompts[i] for i in drawn],
                self.sampling,
                group_size=self.group_size,
                seed=self._stage_seed(f"train {number}"),
                first_group=len(informative) + len(others),
            )
            for group in split_groups(rollouts):
                (informative if self.dynamic_sampling is None or has_spread(group) else others).append(group)
        everything = [rollout for group in (*informative, *others) for rollout in group]
        call_rollout_hook(self._trainer, "on_rollout_end", everything)
        self._metrics = {**rollout_metrics(everything), **collector.metrics}
        if self.dynamic_sampling is not None:
            self._metrics["rollout/groups_drawn"] = len(informative) + len(others)
            self._metrics["rollout/groups_without_signal_kept"] = wanted - len(informative)
        return [rollout for group in (*informative, *others)[:wanted] for rollout in group]

    def _minibatches(self, batch: RolloutBatch) -> Iterator[RolloutBatch]:
        generator = torch.Generator().manual_seed(self._stage_seed("shuffle"))
        accumulate = self._trainer.accumulate_grad_batches
        lengths, num_steps = batch.lengths, self._steps_per_pass(batch)
        for _ in range(self.inner_epochs):
            plan = plan_minibatches(
                lengths, micro_batch_size=self.micro_batch_size, num_steps=num_steps, generator=generator
            )
            own = [batch.count_loss([row for rows in step for row in rows]) for step in plan]
            counts = self._sum_over_ranks(torch.tensor(own))
            for step, (num_tokens, num_sequences) in zip(plan, counts.tolist(), strict=True):
                for rows in step:
                    yield replace(
                        batch.select(rows),
                        num_loss_tokens=num_tokens,
                        num_loss_sequences=num_sequences,
                        num_shares=accumulate * self._world_size,
                    )

    def _steps_per_pass(self, batch: RolloutBatch) -> int:
        """Optimizer steps of one pass over the batch."""
        return len(batch) // (self.micro_batch_size * self._trainer.accumulate_grad_batches)

    def _val_rollouts(self) -> Iterator[list[Rollout]]:
        prompts = self.val_prompts[self._rank :: self._world_size]
        collector = self._collector(LapClock())  # the iteration's clock books all of this as validation
        rollouts = collector.collect(
            prompts, self.val_sampling, group_size=self.val_group_size, seed=self._stage_seed("val")
        )
        call_rollout_hook(self._trainer, "on_rollout_end", rollouts)
        yield rollouts

    def _collector(self, clock: LapClock) -> RolloutCollector:
        self.engine.attach(cast("PreTrainedModel", self._module.policy))
        return RolloutCollector(self._trainer, self.engine, self.tokenizer, self.pool, clock, self.idle)

    def finish_iteration(self, update: dict[str, float]) -> dict[str, float]:
        """Close the iteration's books: all metrics and where the time went, over all ranks.

        Args:
            update: This rank's metrics of the update.
        """
        if self._trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.clock.lap("update")
        seconds = {f"time/{stage}": value for stage, value in self.clock.read().items()}
        seconds["time/iteration"] = sum(seconds.values())
        return combine_over_ranks(self._trainer, {**self._metrics, **update, **seconds})

    @property
    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None, "the data module is not attached to a Trainer"
        return self.trainer

    @property
    def _module(self) -> RLModule:
        return cast("RLModule", self._trainer.lightning_module)

    @property
    def _pad_id(self) -> int:
        pad_id = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad_id is None else pad_id  # never seen by the loss

    def _stage_seed(self, stage: str) -> int:
        """A seed that a resumed run finds again: a function of the run's seed, stage, iteration and this rank."""
        iteration = self._trainer.current_epoch if stage != "val" else 0  # the same noise in every validation
        return seed_of(self._seed, stage, iteration, self._rank)

    def _max_over_ranks(self, value: int) -> int:
        if self._world_size == 1:
            return value
        tensor = torch.tensor(value, device=self._trainer.strategy.root_device)
        return int(self._trainer.strategy.reduce(tensor, reduce_op="max"))

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        if self._world_size == 1:
            return value
        summed = value.to(self._trainer.strategy.root_device, copy=True)  # it is reduced in place
        return self._trainer.strategy.reduce(summed, reduce_op="sum").to(value)
