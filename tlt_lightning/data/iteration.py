r"""Make one policy iteration on a rank: collect, score, estimate advantages, cut minibatches.

An iteration is a Lightning epoch. What goes from whom to whom, on each rank, and what each waits for:

    what                 made by                     waits for                       goes on when
    -------------------  --------------------------  ------------------------------  ------------------------------
    PendingGroup         PromptCursor, Backlog       all ranks: who draws how many   their numbers are gathered
      |  ^
      |  '-- dynamic sampling comes back here, until no rank lacks a group
    Request              RolloutUnderWay             -                               -
      |
    weights              WeightSync                  the last optimizer step         the engine has them, checked
      |
    Response, as it ends RequestStream, from the     its last token                  the schedule has chosen: what
      |   \              engine's `generate`                          is left stops, or runs on
      |    score         RewardPool, in threads      a thread                        all scores, or the time limit
      |
    Rollout              RolloutCollector            the last rank (an IdleWindow:   all ranks have written, or one
      |                                              callbacks may use the time)     has failed (Liveness)
    Rollout, dealt anew  deal, whole groups          all ranks' rollouts             each rank has as many tokens
      |
    RolloutBatch         collate, RLModule.score     with shards all ranks' passes   log-probs, values are filled in
      |
    advantages           RLModule                    sums over ranks                 they are finite
      |
    micro-batches        cut_steps                   sums over ranks                 Lightning asks for the next step
      |
    optimizer step       RLModule.training_step      gradients of all ranks          the last step of the epoch
      |
    metrics, checkpoint  CloseIteration, callbacks   numbers of all ranks            the next epoch begins above

All of it runs on the main thread, but for the rewards.
"""

from array import array
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import lightning as L
import torch

from tlt_lightning.data.base import cut_steps
from tlt_lightning.data.collector import RolloutCollector
from tlt_lightning.data.iteration_settings import IterationSettings
from tlt_lightning.data.prompts import PromptCursor
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics.rollouts import log_rollouts
from tlt_lightning.module import RLModule
from tlt_lightning.ranks.reduce import gather_over_ranks
from tlt_lightning.rollout import Prompt, Rollout, RolloutBatch, collate, has_spread, split_groups
from tlt_lightning.schedules.answer_lengths import AnswerLengths, deal
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.under_way import RolloutUnderWay
from tlt_lightning.seeds import iteration_seed
from tlt_lightning.training.trainer_settings import check_settings


@dataclass(frozen=True, slots=True)
class IterationStart:
    """Holds what an iteration begins with, in a run that is resumed, too.

    Args:
        position: Prompts that were drawn.
        deferred: Groups that wait.
        mean_lengths: Mean length of earlier answers by prompt.
        engine: The engine's state.
    """

    position: int
    deferred: list[PendingGroup]
    mean_lengths: dict[int, float]
    engine: dict[str, Any]


@dataclass(eq=False)
class PolicyIteration:
    """Makes the minibatches of one policy iteration with the policy's current weights.

    A checkpoint that is saved before the first optimizer step holds `start`, from which a resumed run begins anew.

    Args:
        trainer: Runs the iteration; its `current_epoch` is the iteration's number.
        module: The policy, its objective and the log of the iteration.
        collector: Writes and rewards the responses.
        settings: Sizes and sampling.
        cursor: Draws the prompts.
        answer_lengths: Remembers how long answers to them were.
        backlog: Keeps those that the schedule defers.
    """

    trainer: L.Trainer
    module: RLModule
    collector: RolloutCollector
    settings: IterationSettings
    cursor: PromptCursor
    answer_lengths: AnswerLengths
    backlog: Backlog

    def __post_init__(self) -> None:
        self.log = self.module.iteration_log
        engine = deepcopy(self.collector.engine.state_dict())
        self.start = IterationStart(self.cursor.position, self.backlog.deferred, self.answer_lengths.means, engine)
        self._first_step = self.trainer.global_step
        self.backlog.note_weights(self._first_step, self.trainer.current_epoch)

    @property
    def has_moved(self) -> bool:
        """True once an optimizer step has been taken in this iteration."""
        return self.trainer.global_step > self._first_step

    def minibatches(self, prompts: Sequence[Prompt]) -> Iterator[list[RolloutBatch]]:
        """Roll out, score, and yield the micro-batches of each step of `inner_epochs` passes over all responses."""
        check_settings(self.trainer)  # a callback may have changed one
        self.log.lap("other")
        yield from self._cut(self._scored(self._roll_out(prompts)))

    def _roll_out(self, prompts: Sequence[Prompt]) -> RolloutBatch:
        tokenizer = self.collector.turns.tokenizer
        pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        batch = collate(self._collect(prompts), pad_id=pad_id, temperature=self.settings.sampling.temperature)
        batch.asynchronous = self.backlog.schedule.is_asynchronous
        self.log.lap("other")
        return batch

    def _scored(self, batch: RolloutBatch) -> RolloutBatch:
        single_update = self.settings.num_steps == 1
        batch = self.module.score(batch, self.settings.micro_batch_tokens, single_update=single_update)
        batch = self.module.estimate_advantages(batch)
        self.log.lap("logprobs")
        call_rollout_hook(self.trainer, "on_rollout_scored", batch)
        self.log.lap("other")
        return batch

    def _collect(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Roll out this rank's groups; with dynamic sampling, until they have a learning signal."""
        dynamic, wanted = self.settings.dynamic_sampling, self.settings.prompts_per_iteration // self.trainer.world_size
        informative: list[list[Rollout]] = []
        others: list[list[Rollout]] = []
        lengths: list[tuple[int, int]] = []
        num_begun = 0
        for number in range(1 if dynamic is None else dynamic.max_rounds):
            demand = self._demand(number, wanted - len(informative))
            if demand is None:
                break
            under_way, rollouts = self._roll_out_once(prompts, demand, number, num_begun)
            num_begun += len(under_way.groups)
            lengths.extend(under_way.lengths)
            for group in split_groups(rollouts):
                (informative if dynamic is None or has_spread(group) else others).append(group)
        self.answer_lengths.learn(lengths, partial(gather_over_ranks, self.trainer))
        groups = [*informative, *others]
        self._show(list(chain.from_iterable(groups)))
        if dynamic is not None:
            self.log.sum("rollout/groups_drawn", len(groups))
            self.log.sum("rollout/groups_without_signal_kept", wanted - len(informative))
        return self._deal_groups(groups[:wanted])

    def _deal_groups(self, groups: Sequence[list[Rollout]]) -> list[Rollout]:
        """Return this rank's share of all ranks' groups, as many, and of about as many tokens as the others'.

        A rank writes what it was dealt by expectation, and an update lasts as long as the largest share of tokens. All
        ranks read what all have written: numbers travel, and nothing of a row, which may hold what cannot be pickled.
        """
        if self.trainer.world_size == 1:
            return list(chain.from_iterable(groups))
        ranks = gather_over_ranks(self.trainer, [[_numbers(rollout) for rollout in group] for group in groups])
        of_all = list(chain.from_iterable(ranks))
        tokens = [sum(len(each.prompt.ids) + len(each.response.token_ids) for each in group) for group in of_all]
        share = deal(tokens, list(map(len, ranks)))[self.trainer.global_rank]
        return [replace(rollout, group=place) for place in share for rollout in of_all[place]]

    def _demand(self, number: int, missing: int) -> RolloutDemand | None:
        """Return what a rollout of this number has to bring on this rank, None once no rank lacks anything."""
        ranks = gather_over_ranks(self.trainer, (missing, len(self.backlog.deferred)))
        lacking, num_deferred = zip(*ranks, strict=True)
        if not any(lacking):
            return None
        return RolloutDemand(
            wanted=missing, iteration=self.trainer.current_epoch, is_first=number == 0, least_deferred=min(num_deferred)
        )

    def _roll_out_once(
        self, prompts: Sequence[Prompt], demand: RolloutDemand, number: int, first_group: int
    ) -> tuple[RolloutUnderWay, list[Rollout]]:
        """Roll out under the schedule; return what was rolled out, and the rollouts to learn from."""
        groups, size = self._begin(demand), self.settings.group_size
        under_way = RolloutUnderWay(self.backlog.schedule, demand, groups, size)
        rollouts = self.collector.collect(
            [prompts[group.prompt] for group in groups],
            self.settings.sampling,
            group_size=size,
            seed=iteration_seed(self.trainer, f"train {number}"),
            first_group=first_group,
            under_way=under_way,
        )
        self.backlog.end(under_way, self.log)
        return under_way, rollouts

    def _show(self, rollouts: Sequence[Rollout]) -> None:
        """Log all rollouts, and show them to callbacks, which may change their rewards."""
        self._log_age(rollouts)
        call_rollout_hook(self.trainer, "on_rollout_end", tuple(rollouts))
        gather, has_rewards = partial(gather_over_ranks, self.trainer), self.collector.has_rewards
        log_rollouts(self.log, rollouts, gather, has_rewards=has_rewards)
        self.log.update(self.collector.metrics)

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
        lengths = [self.answer_lengths.means.get(prompt, 0.0) for prompt in prompts]
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
        aged, num_tokens = sum(age * count for age, count in ages), sum(count for _, count in ages)
        ranks = gather_over_ranks(self.trainer, (aged, num_tokens))  # of the tokens of all
        self.log.mean("schedule/age", sum(each for each, _ in ranks) / sum(each for _, each in ranks))
        self.log.max("schedule/age_max", max(age for age, _ in ages))

    def _cut(self, batch: RolloutBatch) -> Iterator[list[RolloutBatch]]:
        generator = torch.Generator().manual_seed(iteration_seed(self.trainer, "shuffle"))
        for _ in range(self.settings.inner_epochs):
            steps = torch.randperm(len(batch), generator=generator).chunk(self.settings.num_minibatches)
            yield from cut_steps(self.trainer, self.module.networks, batch, steps, self.settings.micro_batch_tokens)


def _numbers(rollout: Rollout) -> Rollout:
    """Return what `collate` reads of a rollout, in arrays: lists of millions of tokens take seconds to read."""
    tokens, logps = array("i", rollout.response.token_ids), array("f", rollout.response.logps)
    response = replace(rollout.response, token_ids=tokens, logps=logps, drafts=())
    return replace(rollout, prompt=Prompt("", array("i", rollout.prompt.ids)), text="", rewards={}, response=response)
