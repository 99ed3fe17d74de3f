"""Collect a rollout: wake and sync the engine, write, reward while writing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import lightning as L

from tlt_lightning.data.engine_probe import EngineProbe
from tlt_lightning.data.streams.requests import RequestStream
from tlt_lightning.data.weight_sync import WeightSync
from tlt_lightning.environments.conversation import Conversation, check_some_held
from tlt_lightning.environments.turns import Turns
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics import IterationLog
from tlt_lightning.metrics.peak_memory import PeakMemory
from tlt_lightning.metrics.rollouts import log_conversation, tail_share
from tlt_lightning.ranks.idle_windows import IdleWindows
from tlt_lightning.rewards.pool import RewardPool
from tlt_lightning.rollout import Prompt, Request, Response, Rollout, Sampling
from tlt_lightning.schedules.under_way import RolloutUnderWay
from tlt_lightning.training.fsdp2 import run_shards


@dataclass(eq=False)
class RolloutCollector:
    """Turns prompts into rewarded rollouts with the policy's current weights.

    Args:
        trainer: The run's Trainer; its callbacks are told, and its module holds the policy.
        stream: Asks the engine for responses; it outlives an iteration.
        weights: Keeps the engine's weights equal to the policy's.
        turns: Decodes responses.
        rewards: Scores them while others are still being written.
        log: Takes the time of the stages sync, rollout, idle and reward, and of the probe; failed rewards, and what the
            engine says.
        idle: Finds out whether other ranks still write; None with a single rank.
        probe: Compares the first responses' log-probs with the policy's; None trusts the engine.
        peak_memory: Follows an engine that sleeps.
    """

    trainer: L.Trainer
    stream: RequestStream
    weights: WeightSync
    turns: Turns
    rewards: RewardPool
    log: IterationLog
    idle: IdleWindows | None = None
    probe: EngineProbe | None = None
    peak_memory: PeakMemory = field(default_factory=PeakMemory)

    def __post_init__(self) -> None:
        self.engine = self.stream.engine
        self._seconds, self._tail_seconds, self._num_tokens = 0.0, 0.0, 0
        self._has_begun = False

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        group_size: int,
        seed: int,
        first_group: int = 0,
        under_way: RolloutUnderWay | None = None,
    ) -> list[Rollout]:
        """Write and score `group_size` responses to each prompt; groups count from `first_group`.

        `under_way` has a group for each prompt, and what is written of it; returned is what its schedule takes.

        Dynamic sampling rolls out several times an iteration, with or without prompts of this rank's:

            requests of this rank's         rollout     the engine                    `on_rollout_start`
            some                            first       writes                        called
            some                            further     writes                        -
            none: what waited is enough     first       wakes                         called
            none: what waited is enough     further     sleeps on, or wakes *         -
            none: no prompts                any         sleeps on, or wakes *         - (called on a first waking)

        * where other ranks' rollout needs this rank's part of an engine, or its shards.
        """
        ranks = {"rank": self.trainer.global_rank, "num_ranks": self.trainer.world_size}
        under_way = under_way or RolloutUnderWay.of_all(len(prompts), group_size, **ranks)
        runs_on = under_way.schedule.is_asynchronous and self.stream.can_stay_open
        ahead = runs_on and self.engine.runs_on and bool(self.stream.open_ids)  # else nobody might read what begins
        ids = [prompt.ids for prompt in prompts]
        asked = under_way.requests(ids, has_seeds=self.engine.seeds_requests, ahead=ahead)
        requests = [request for request in asked if request.id not in self.stream.open_ids]
        # An engine over several ranks writes with all of them, and weights are gathered from all that have a shard.
        is_alone = self.engine.num_ranks == 1 and not run_shards(self.trainer)
        sleeps_on = is_alone and not requests and (self._has_begun or not prompts)
        if not sleeps_on:
            self._wake(len(requests))
        is_first = not sleeps_on and not self._has_begun
        self._has_begun |= is_first
        if is_first:
            call_rollout_hook(self.trainer, "on_rollout_start")
        probes = self.probe.requests(self.engine, prompts, sampling) if runs_on and is_first and self.probe else []
        self.stream.begin()
        of_requests = [prompts[under_way.place_of(request.id)] for request in requests]
        self.stream.ask([*requests, *probes], sampling, seed=seed, prompts=of_requests)
        rollouts, probed = self._take(prompts, under_way, first_group, probes, runs_on=runs_on)
        self._note_speed(has_requests=bool(asked))
        self.log.lap("rollout")
        if not sleeps_on and not runs_on:
            self._sleep()  # before the window: whoever computes in it finds the memory of the engine's cache free
        self._wait_for_others()
        self._check_engine([*probed, *rollouts.values()], sampling, is_first)
        taken = [rollouts[number] for number in under_way.taken]
        self._reward(taken)
        return taken

    def _wake(self, num_requests: int) -> None:
        with self.peak_memory.followed(lambda: self.engine.unmapped_bytes):
            self.engine.wake()
        self.weights.sync(self.trainer, num_requests)
        self.log.lap("sync")

    def _sleep(self) -> None:
        with self.peak_memory.followed(lambda: self.engine.unmapped_bytes):
            self.engine.sleep()
        self.log.lap("sync")

    def _check_engine(self, rollouts: Iterable[Rollout], sampling: Sampling, is_first: bool) -> None:
        """Probe the engine by responses of the current weights: if all ranks have any, where the pass needs all."""
        if self.probe is None:
            return
        version = (self.trainer.global_step,)
        current = [rollout for rollout in rollouts if rollout.response.policy_versions == version]
        has_any = bool(current)
        if run_shards(self.trainer):
            has_any = is_first and self.trainer.strategy.reduce_boolean_decision(has_any, all=True)
        if has_any and self.probe.check(self.trainer, self.engine, current, sampling):
            self.log.lap("logprobs")  # the policy's first pass, for which a GPU compiles

    def _reward(self, rollouts: Sequence[Rollout]) -> None:
        """Wait for the scores, and put them into the rollouts."""
        numbers = [rollout.response.request_id for rollout in rollouts]
        scores = self.rewards.collect([number for number in numbers if number in self.rewards], self.stream.tell_again)
        talks: list[Conversation] = []
        for number, rollout in zip(numbers, rollouts, strict=True):
            rollout.rewards = scores.get(number, {})
            rollout.reward = sum(term.weight * rollout.rewards.get(term.name, 0.0) for term in self.rewards.terms)
            trajectory = self.stream.trajectory(number, forget=True)
            if trajectory is not None:
                talks.append(trajectory.talk)
                log_conversation(self.log, trajectory.talk)
                if (reward := trajectory.talk.reward) is not None:
                    rollout.rewards = {trajectory.talk.environments.name: reward, **rollout.rewards}
                    rollout.reward += reward
                    rollout.turn_rewards = trajectory.talk.turn_rewards
        for name, count in self.rewards.stats.items():
            self.log.sum(name, count)
        if not self.trainer.predicting:  # to which rewards matter little
            self.rewards.check()
            check_some_held(talks)
        self.log.lap("reward")

    def _take(
        self,
        prompts: Sequence[Prompt],
        under_way: RolloutUnderWay,
        first_group: int,
        probes: Sequence[Request],
        *,
        runs_on: bool,
    ) -> tuple[dict[int, Rollout], list[Rollout]]:
        """Read responses until the schedule has enough; what is open then is stopped, unless it `runs_on`.

        Returns:
            Ended rollouts by request, their rewards under way, and those of `probes`, which are waited for.
        """
        rollouts: dict[int, Rollout] = {}
        unprobed, probed = {request.id: Prompt("", request.prompt_ids) for request in probes}, []

        def receive(response: Response, *, is_new: bool = True) -> None:
            _check_finite(response)
            number = response.request_id
            place = under_way.place_of(number)
            trajectory = self.stream.trajectory(number)
            prompt = prompts[place] if trajectory is None else trajectory.prompt
            is_broken = trajectory is not None and trajectory.talk.error is not None
            text = self.turns.words(response.token_ids)
            deferrals = under_way.groups[place].deferrals
            rollouts[number] = Rollout(
                prompt=prompt, response=response, text=text, group=first_group + place, deferrals=deferrals
            )
            if not is_broken and (is_new or number not in self.rewards):
                self.rewards.submit(number, prompt.question, text, prompt.row)

        for response in under_way.ended:
            receive(response, is_new=False)
        while not (runs_on and under_way.has_enough and not unprobed):
            if (new := next(self.stream, None)) is None:
                break
            if new.request_id in unprobed:
                probed.append(Rollout(unprobed.pop(new.request_id), new, text="", group=new.request_id))
                continue
            if under_way.add(new) and not runs_on:
                self.stream.stop(under_way.open_ids)
            if not new.is_unfinished:
                receive(new)
        return rollouts, probed

    def _note_speed(self, *, has_requests: bool) -> None:
        """Add up what was written and the long tail, both of the engine, which several ranks may ask for responses."""
        if trace := self.stream.trace:
            last = trace[-1]
            self._seconds += last.elapsed
            self._num_tokens += last.tokens
            unfinished = [(progress.elapsed, progress.waiting + progress.running) for progress in trace]
            self._tail_seconds += last.elapsed * tail_share(unfinished, last.total)
        if has_requests:  # of a rollout that needed none the counts are those of nothing
            self.log.update(self.engine.stats())

    @property
    def has_rewards(self) -> bool:
        """True if rollouts are scored, by functions or by environments."""
        return bool(self.rewards.terms) or self.stream.gives_rewards

    @property
    def metrics(self) -> dict[str, float]:
        """Speed and long tail of all rollouts since this collector was made."""
        return {
            "rollout/seconds": self._seconds,
            "rollout/tokens_per_s": self._num_tokens / self._seconds if self._seconds else 0.0,
            "rollout/tail_share": self._tail_seconds / self._seconds if self._seconds else 0.0,
        }

    def _wait_for_others(self) -> None:
        """Open this rank's idle window, until the last one's rollout is done."""
        if self.idle is None:
            return
        with self.idle.window() as window:
            if window.num_waiting_for:
                call_rollout_hook(self.trainer, "on_rollout_idle", window)
        self.log.lap("idle")


def _check_finite(response: Response) -> None:
    if not isfinite(sum(response.logps)):
        raise RuntimeError(
            f"The engine answered request {response.request_id} with log-probs that are no numbers, under weights of "
            f"version {response.policy_versions[-1]}. The last update has broken the policy, even if its weights are "
            "finite. Resume from the checkpoint before that update, with a lower learning rate or clipped gradients "
            "(`trainer.gradient_clip_val`)."
        )
