"""Make one policy iteration on a rank: collect, score, compute advantages, cut minibatches."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tlt_lightning.arguments import Count, checked
from tlt_lightning.data.dynamic_sampling import DynamicSampling
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics.rollouts import log_rollouts
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.objectives.ppo import explained_variance
from tlt_lightning.ranks.reduce import gather_over_ranks, sum_over_ranks
from tlt_lightning.rollout import Prompt, Rollout, RolloutBatch, Sampling, collate, has_spread, split_groups
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.history import Answered, AnswerHistory, deal
from tlt_lightning.schedules.under_way import RolloutUnderWay
from tlt_lightning.seeds import iteration_seed
from tlt_lightning.training.fsdp2 import largest_counts
from tlt_lightning.training.micro_batches import plan_minibatches
from tlt_lightning.training.trainer_settings import check_settings

if TYPE_CHECKING:
    from tlt_lightning.data.collector import RolloutCollector
    from tlt_lightning.data.prompts import PromptCursor
    from tlt_lightning.module import RLModule


@checked()
@dataclass(frozen=True, kw_only=True)
class IterationSettings:
    """Holds the settings of all iterations of a run; see `RolloutDataModule`."""

    group_size: Count
    prompts_per_iteration: Count
    micro_batch_tokens: Count
    num_minibatches: Count
    inner_epochs: Count
    max_prompt_tokens: Count
    dynamic_sampling: DynamicSampling | None
    sampling: Sampling

    def of_dev_run(self, trainer: L.Trainer) -> "IterationSettings":
        """Return the settings of `fast_dev_run`: its number of prompts a rank, and one optimizer step."""
        num_prompts = int(trainer.fast_dev_run) * trainer.world_size  # type: ignore[attr-defined]
        return replace(self, prompts_per_iteration=num_prompts, num_minibatches=1)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.num_minibatches * self.inner_epochs

    def check(self, objective: PolicyObjective, trainer: L.Trainer) -> None:
        """Raise MisconfigurationException unless ranks and steps divide an iteration, and a pass holds a sequence.

        So does a validation after more steps than an iteration has.
        """
        num_ranks = trainer.world_size
        num_prompts, group_size, num_steps = self.prompts_per_iteration, self.group_size, self.num_minibatches
        if num_prompts % num_ranks:
            nearest = max(1, round(num_prompts / num_ranks)) * num_ranks
            raise MisconfigurationException(
                f"`data.prompts_per_iteration` {num_prompts} is not divisible by {num_ranks} ranks, which share them; "
                f"give {nearest}, or another number of `trainer.devices`."
            )
        num_sequences = num_prompts // num_ranks * group_size
        if num_sequences % num_steps:
            raise MisconfigurationException(
                f"{num_sequences} responses per rank and iteration (`data.prompts_per_iteration` {num_prompts} / "
                f"{num_ranks} ranks * `data.group_size` {group_size}) are not divisible by `data.num_minibatches` "
                f"{num_steps}, the optimizer steps that share them; choose one that divides them."
            )
        self._check_interval(trainer)
        max_tokens = self.sampling.max_tokens
        if (longest := self.max_prompt_tokens + max_tokens) > self.micro_batch_tokens:
            raise MisconfigurationException(
                f"`data.micro_batch_tokens` {self.micro_batch_tokens} is less than the longest sequence, "
                f"`data.max_prompt_tokens` {self.max_prompt_tokens} plus `data.sampling.max_tokens` {max_tokens}; set "
                f"it to at least {longest}."
            )
        for name, limit in objective.length_limits.items():
            if limit != max_tokens:
                raise MisconfigurationException(
                    f"`objective.{name}` {limit} has to be the longest response, and `data.sampling.max_tokens` is "
                    f"{max_tokens}; make them equal."
                )
        if group_size < objective.min_group_size:
            raise MisconfigurationException(
                f"`data.group_size` {group_size} is too small for {type(objective).__name__}, whose advantages compare "
                f"the responses to one prompt: use at least {objective.min_group_size}."
            )

    def _check_interval(self, trainer: L.Trainer) -> None:
        every = getattr(trainer, "val_check_interval", None)  # which one in seconds is not
        is_within = trainer.check_val_every_n_epoch is not None
        if not isinstance(every, int) or trainer.limit_val_batches == 0:
            return
        if every < 1 or (is_within and every > self.num_steps):
            raise MisconfigurationException(
                f"`Trainer(val_check_interval={every})` counts optimizer steps, of which an iteration has "
                f"{self.num_steps} (`data.num_minibatches` * `data.inner_epochs`): leave it out to validate behind "
                f"every iteration, or set `check_val_every_n_epoch={every or 1}` to do so behind every {every or 1}."
            )


class PolicyIteration:
    """Makes the minibatches of one policy iteration with the policy's current weights.

    A checkpoint within an iteration is exact: until the first optimizer step it names the first prompt, from which a
    resumed run begins anew; afterwards it holds the scored batch.

    Args:
        trainer: Runs the iteration; its `current_epoch` is the iteration's number.
        module: The policy, its objective and the log of the iteration.
        collector: Writes and rewards the responses.
        settings: Sizes and sampling.
        cursor: Draws the prompts.
        history: Remembers earlier answers to them.
        backlog: Keeps those that the schedule defers.
        saved: What `state` returned in the run that is resumed within this iteration.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        module: "RLModule",
        collector: "RolloutCollector",
        settings: IterationSettings,
        cursor: "PromptCursor",
        history: AnswerHistory,
        backlog: Backlog,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.log = module.iteration_log
        self.collector = collector
        self.settings = settings
        self.cursor, self.history = cursor, history
        self.backlog = backlog
        self.first_prompt, self.first_deferred, self.first_history = cursor.position, backlog.deferred, history.copy()
        self.first_engine = deepcopy(collector.engine.state_dict())
        self.first_step = trainer.global_step if saved is None else saved["first_step"]
        backlog.note_weights(self.first_step, trainer.current_epoch)
        self._batch = None if saved is None else RolloutBatch(**saved["batch"])

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken in this iteration so far."""
        return self.trainer.global_step - self.first_step

    def state(self) -> dict[str, Any] | None:
        """Return the batch of an update that has begun and not ended, as primitives; None otherwise."""
        if self._batch is None or not 0 < self.num_steps < self.settings.num_steps:
            return None
        batch = {item.name: getattr(self._batch, item.name) for item in fields(self._batch)}
        return {"first_step": self.first_step, "batch": batch}

    def minibatches(self, prompts: Sequence[Prompt]) -> Iterator[list[RolloutBatch]]:
        """Roll out, score, and yield the micro-batches of each step of `inner_epochs` passes over all responses."""
        check_settings(self.trainer)  # a callback may have changed one
        self.log.lap("other")
        if self._batch is None:
            self._batch = self._roll_out(prompts)
        yield from islice(self._cut(self._batch), self.num_steps, None)

    def _roll_out(self, prompts: Sequence[Prompt]) -> RolloutBatch:
        tokenizer = self.collector.tokenizer
        pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        batch = collate(self._collect(prompts), pad_id=pad_id, temperature=self.settings.sampling.temperature)
        self.log.lap("other")
        batch = self._score(batch)
        self.log.lap("logprobs")
        call_rollout_hook(self.trainer, "on_rollout_scored", batch)
        self.log.lap("other")
        return batch

    def _collect(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Roll out this rank's groups; with dynamic sampling, groups with a learning signal."""
        dynamic, wanted = self.settings.dynamic_sampling, self.settings.prompts_per_iteration // self.trainer.world_size
        informative: list[list[Rollout]] = []
        others: list[list[Rollout]] = []
        own, num_begun = Answered(), 0
        for number in range(1 if dynamic is None else dynamic.max_rounds):
            missing = wanted - len(informative)
            own_number = missing, len(self.backlog.deferred)
            needs, num_deferred = zip(*gather_over_ranks(self.trainer, own_number), strict=True)
            if not any(needs):
                break
            demand = RolloutDemand(
                wanted=missing,
                iteration=self.trainer.current_epoch,
                is_first=number == 0,
                least_deferred=min(num_deferred),
            )
            seed = iteration_seed(self.trainer, f"train {number}")
            done, rollouts = self._collect_round(prompts, demand, seed, num_begun)
            num_begun += len(done.groups)
            own.lengths.extend(done.lengths)
            own.texts.extend(done.texts if self.history.settings is not None else ())
            for group in split_groups(rollouts):
                (informative if dynamic is None or has_spread(group) else others).append(group)
        self.history.learn(own, partial(gather_over_ranks, self.trainer))
        groups = [*informative, *others]
        everything = list(chain.from_iterable(groups))
        self._log_age(everything)
        call_rollout_hook(self.trainer, "on_rollout_end", tuple(everything))
        log_rollouts(self.log, everything, partial(gather_over_ranks, self.trainer))
        self.log.update(self.collector.metrics)
        if dynamic is not None:
            self.log.sum("rollout/groups_drawn", len(groups))
            self.log.sum("rollout/groups_without_signal_kept", wanted - len(informative))
        return list(chain.from_iterable(groups[:wanted]))

    def _collect_round(
        self, prompts: Sequence[Prompt], demand: RolloutDemand, seed: int, first_group: int
    ) -> tuple[RolloutUnderWay, list[Rollout]]:
        """Roll out once, under the schedule; return what was rolled out, and the rollouts to learn from."""
        groups, size = self._begin(demand), self.settings.group_size
        under_way = RolloutUnderWay(self.backlog.schedule, demand, groups, size, self.history.texts)
        rollouts = self.collector.collect(
            [prompts[group.prompt] for group in groups],
            self.settings.sampling,
            group_size=size,
            seed=seed,
            first_group=first_group,
            under_way=under_way,
        )
        self.backlog.end(under_way, self.log)
        return under_way, rollouts

    def _begin(self, demand: RolloutDemand) -> list[PendingGroup]:
        """Take up groups that were deferred, draw those that the schedule wants besides; return what it starts."""
        groups, num_fresh = self.backlog.begin(demand, self.log) if demand.wanted else ([], 0)
        numbers = gather_over_ranks(self.trainer, num_fresh)
        fresh = self._fresh(numbers, demand.iteration)
        self.cursor.position += sum(numbers)
        return self.backlog.start(demand, [*groups, *fresh])

    def _fresh(self, numbers: Sequence[int], iteration: int) -> list[PendingGroup]:
        """Return this rank's groups of the next prompts, of which each rank gets its number; they stay to be drawn."""
        prompts = self.cursor.peek(sum(numbers))
        lengths = [self.history.mean_lengths.get(prompt, 0.0) for prompt in prompts]
        return [
            PendingGroup(
                prompt=prompts[place],
                draw=self.cursor.position + place,
                drawn_in=iteration,
                begun_in=iteration,
                expected_tokens=lengths[place],
            )
            for place in deal(lengths, numbers)[self.trainer.global_rank]
        ]

    def _log_age(self, rollouts: Sequence[Rollout]) -> None:
        """Log how many prompts wait, and how many iterations ago tokens were written, where a schedule lets them."""
        if self.backlog.schedule.defers:
            self.log.sum("schedule/deferred", len(self.backlog.deferred))
        if not self.backlog.schedule.continues:
            return
        written_in, now = self.backlog.written_in, self.trainer.current_epoch
        segments = [segment for rollout in rollouts for segment in rollout.response.segments]
        ages = [(now - written_in[version], count) for version, count in segments]
        self.log.mean("schedule/age", sum(age * count for age, count in ages) / sum(count for _, count in ages))
        self.log.max("schedule/age_max", max(age for age, _ in ages))

    def _score(self, batch: RolloutBatch) -> RolloutBatch:
        """Fill in log-probs and values from before the update, advantages and returns."""
        single_update = self.settings.num_steps == 1
        batch = self.module.score(batch, self.settings.micro_batch_tokens, single_update=single_update)
        with torch.no_grad():
            batch.advantages, batch.returns = self.module.objective.advantages(batch, self._sum)
        for name in ("old_logps", "ref_logps", "values", "advantages", "returns"):
            numbers = getattr(batch, name)
            if numbers is not None and not (numbers.shape == batch.response_mask.shape and numbers.isfinite().all()):
                raise ValueError(
                    f"`batch.{name}`, of shape {tuple(numbers.shape)}, has to be a finite number for each token, "
                    f"{tuple(batch.response_mask.shape)}: it would teach the policy nonsense. A callback may have "
                    "changed rewards; what is wrong with an objective `tlt_lightning.testing.check_objective` finds."
                )
        if batch.values is not None and batch.returns is not None:
            explained = explained_variance(batch.values, batch.returns, batch.response_mask, self._sum)
            self.log.mean("train/explained_variance", explained)
        return batch

    def _cut(self, batch: RolloutBatch) -> Iterator[list[RolloutBatch]]:
        generator = torch.Generator().manual_seed(iteration_seed(self.trainer, "shuffle"))
        for _ in range(self.settings.inner_epochs):
            plan = plan_minibatches(
                batch.lengths,
                micro_batch_tokens=self.settings.micro_batch_tokens,
                num_minibatches=self.settings.num_minibatches,
                generator=generator,
                is_padded=self.module.networks.is_padded,
                largest_counts=largest_counts(self.trainer),
            )
            own = [batch.count_loss([row for rows in step for row in rows]) for step in plan]
            counts = self._sum(torch.tensor(own))
            for step, (num_tokens, num_sequences) in zip(plan, counts.tolist(), strict=True):
                yield [
                    replace(
                        batch.select(rows),
                        num_loss_tokens=num_tokens,
                        num_loss_sequences=num_sequences,
                        num_shares=self.trainer.world_size,
                    )
                    for rows in step
                ]

    def _sum(self, value: Tensor) -> Tensor:
        return sum_over_ranks(self.trainer, value)
