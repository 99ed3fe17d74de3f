"""Make a policy iteration of an epoch: the policy writes its own batches."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from tlt_lightning.arguments import Count, checked_attributes
from tlt_lightning.checks import (
    check_engine_ranks,
    check_lengths,
    check_rewards,
    check_trainer,
    context_of,
    warn_of_filters,
)
from tlt_lightning.data.base import PolicyDataModule
from tlt_lightning.data.collector import RolloutCollector
from tlt_lightning.data.engine_probe import EngineProbe
from tlt_lightning.data.iteration import IterationStart, PolicyIteration
from tlt_lightning.data.iteration_settings import DynamicSampling, IterationSettings
from tlt_lightning.data.loader import RolloutLoader, check_held_out, ignore_needless_warnings, num_held_out_batches
from tlt_lightning.data.prompts import PromptCursor, PromptSource, checksum, first_prompts, load_prompts, turns_of
from tlt_lightning.data.run_arguments import RunArguments
from tlt_lightning.data.streams.conversations import ConversationStream, check_conversations
from tlt_lightning.data.streams.requests import RequestStream
from tlt_lightning.data.weight_sync import WeightSync
from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.usual import usual_engine
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.environments.turns import Turns
from tlt_lightning.guard.callback import protect
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics import IterationLog
from tlt_lightning.policy import end_token_ids, load_tokenizer
from tlt_lightning.ranks.idle_windows import IdleWindows
from tlt_lightning.ranks.liveness import Liveness
from tlt_lightning.ranks.reduce import gather_over_ranks
from tlt_lightning.rewards import RewardFunction, RewardPool, RewardTerm
from tlt_lightning.rewards.pool import Seconds
from tlt_lightning.rewards.term import as_terms, check_rows
from tlt_lightning.rollout import Prompt, Rollout, RolloutBatch, Sampling, split_groups
from tlt_lightning.schedules.answer_lengths import AnswerLengths
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.base import RolloutSchedule
from tlt_lightning.seeds import run_seed, seed_of
from tlt_lightning.training.described import keep_arguments
from tlt_lightning.training.memory.pass_size import choose_on_device, pass_sizes
from tlt_lightning.training.resume import PROMPTS, begins_run, warn_of_changes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class RolloutDataModule(PolicyDataModule):
    """Rolls out the policy on prompts, scores the responses, yields an iteration's minibatches.

    A batch of validation is one held-out prompt with its responses, so `limit_val_batches` counts prompts of each rank.
    `overfit_batches` counts prompts, too: each iteration draws from the first ones. So does `fast_dev_run`, which runs
    one iteration. Each argument is an attribute of its name, which a run reads when it is set up; `sampling` alone may
    be changed within it, by a callback in `on_train_epoch_start`, for the iteration that begins.

    Args:
        rewards: Reward functions and their weights; in Python also plain functions. The first one that applies to a
            response (an environment's own comes before) decides whether `val/accuracy` and pass@k count it as correct:
            a score above one half. None only if the objective learns from none, or an environment gives them.
        train: Prompts to learn from; in Python also a path, a `datasets.Dataset` or a list of rows.
        val: Held-out prompts for `validate`, `predict` and the validation during `fit`.
        engine: Writes the responses; None is a `VLLMEngine` in the type that suits the machine, or, where vLLM is not
            installed, `TransformersEngine`.
        group_size: Responses to each prompt.
        prompts_per_iteration: Prompts of one iteration, over all ranks.
        micro_batch_tokens: Most tokens of a forward and backward pass on one rank, of prompts and responses. It decides
            memory and speed, not what is learned; the longest prompt and response together have to fit. None is as many
            as a GPU has room for by the forecast of memory, from 8,192 to 32,768, without a forecast 8,192, and on a
            CPU 1,024; more only if the longest sequence has more.
        num_minibatches: Optimizer steps of one pass over an iteration's rollouts, each with an equal share of them.
        inner_epochs: Passes over an iteration's rollouts.
        dynamic_sampling: Replace prompts whose responses all earn the same (DAPO), as they teach nothing; None is off.
        schedule: Decides which prompts wait for a later iteration, as TailBatching and PartialRollout do; None is
            SynchronousSchedule, under which none wait.
        sampling: How responses are sampled in training; by default up to 1,024 tokens, or half of a shorter context.
        val_sampling: How responses are sampled in validation and prediction, for example greedily; None is as in
            training. Settings left out take their defaults, not training's values: give `max_tokens`, too.
        val_group_size: Responses to each held-out prompt; k for pass@k goes up to it.
        max_prompt_tokens: Longest prompt; longer ones are left out, and the run says how many. None is the longest that
            the data has and the policy's context takes.
        reward_timeout: Seconds one call of a reward function may take.
        environment: What the policy acts in turn by turn, a class as TRL's `environment_factory` takes it, in YAML with
            `class_path` and `init_args`: docs/your_environment.md. It gives a reward of its own if it has `get_reward`.
        turns: Limits conversations with it.
    """

    engine: RolloutEngine
    rewards: list[RewardTerm]
    train: PromptSource | None
    val: PromptSource | None
    _settings: IterationSettings  # known after `setup`

    def __init__(
        self,
        rewards: list[RewardTerm | RewardFunction] | None = None,
        train: PromptSource | str | None = None,
        val: PromptSource | str | None = None,
        engine: RolloutEngine | None = None,
        group_size: Count = 8,
        prompts_per_iteration: Count = 32,
        micro_batch_tokens: Count | None = None,
        num_minibatches: Count = 1,
        inner_epochs: Count = 1,
        dynamic_sampling: DynamicSampling | None = None,
        schedule: RolloutSchedule | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        val_sampling: Sampling | None = None,
        val_group_size: Count = 1,
        max_prompt_tokens: Count | None = None,
        reward_timeout: Seconds = 10.0,
        environment: Any = None,
        turns: TurnLimits = TurnLimits(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        self.engine = usual_engine() if engine is None else engine
        self.rewards, self.train, self.val = cast("Any", (rewards, train, val))  # until `_read_arguments`
        self.group_size, self.val_group_size = group_size, val_group_size
        self.prompts_per_iteration, self.micro_batch_tokens = prompts_per_iteration, micro_batch_tokens
        self.num_minibatches, self.inner_epochs = num_minibatches, inner_epochs
        self.dynamic_sampling, self.schedule = dynamic_sampling, schedule
        self.sampling, self.val_sampling = sampling, val_sampling
        self.max_prompt_tokens, self.reward_timeout = max_prompt_tokens, reward_timeout
        self.environment, self.turns = environment, turns
        self._read_arguments()
        self.backlog, self.answer_lengths = Backlog(schedule), AnswerLengths()
        self.cursor: PromptCursor | None = None
        self._iteration: PolicyIteration | None = None

    def _read_arguments(self) -> dict[str, Any]:
        """Return the arguments as they are now, checked by their annotations; describe them as hyper-parameters."""
        self.rewards = as_terms(self.rewards)
        self.train, self.val = (None if each is None else PromptSource.of(each) for each in (self.train, self.val))
        arguments = checked_attributes(self, RolloutDataModule)
        keep_arguments(self, arguments)
        self._environments = None if self.environment is None else Environments(self.environment)
        self.has_rewards = bool(self.rewards or (self._environments and self._environments.has_reward))
        self._room = 1 if self.max_prompt_tokens is None else self.max_prompt_tokens  # for prompts, until they are read
        return arguments

    # Set-up and tear-down

    @override
    def setup(self, stage: str) -> None:
        """Read the prompts, then load the engine: after all checks, while the device is empty."""
        is_fit = stage == "fit"
        goes_on = is_fit and self.cursor is not None and not begins_run(self._trainer)
        kept = self.state_dict() if goes_on else None  # of the Trainer's last fit
        if is_fit:  # else a run that is validated is saved with what it has deferred
            self.backlog, self.answer_lengths = Backlog(self.schedule), AnswerLengths()
        self._check(is_fit=is_fit)
        self._read_data(is_fit=is_fit)
        self._make_parts()
        protect(self._trainer)
        call_rollout_hook(self._trainer, "on_engine_setup", self.engine)
        if is_fit:
            self._plan_memory()
        policy, number = self._module.policy_path, self._trainer.global_rank // self.engine.num_ranks
        log.info("Loading %s for %s", type(self.engine).__name__, policy)
        self.engine.setup(policy, max_model_len=self._max_model_len, seed=run_seed() + number)  # its ranks share both
        ignore_needless_warnings()
        if kept is not None:
            self.load_state_dict(kept)

    def _read_data(self, *, is_fit: bool) -> None:
        """Read the prompts, and make room for the longest unless there is a limit."""
        self.tokenizer = load_tokenizer(self._module.policy_path)
        self._ends = end_token_ids(self._module.policy_path, self.tokenizer)
        self.train_prompts = self._load_prompts("train", self.train, needed=is_fit)
        self.val_prompts = self._load_prompts("val", self.val, needed=not is_fit)
        self._checksum = checksum(self.train_prompts)  # once: of a million prompts it takes seconds
        if self.max_prompt_tokens is None:
            self._room = max(len(prompt.ids) for prompt in (*self.train_prompts, *self.val_prompts))
            tokens = self._pass_sizes()[-1]
            self._settings = replace(self._settings, micro_batch_tokens=tokens, max_prompt_tokens=self._room)
            if is_fit:
                self._settings.check(self._module.objective, self._trainer)
        if is_fit or self.cursor is None:
            self.cursor = PromptCursor(len(self.train_prompts), run_seed())
            self._iteration = None

    def _make_parts(self) -> None:
        """Make what a rollout needs besides the engine."""
        tell = partial(call_rollout_hook, self._trainer, "on_rollout_progress")
        self._stream = RequestStream(self.engine, tell)
        if self._environments is not None:
            self._stream = ConversationStream(self.engine, self._environments, self.turns, tell)
        self._weights, self._probe = WeightSync(self.engine), EngineProbe()
        self.pool = RewardPool(self.rewards, timeout=self.reward_timeout)
        self.liveness = Liveness(self._trainer)
        self.idle = IdleWindows(self._trainer, self.liveness) if self._trainer.world_size > 1 else None

    def _plan_memory(self) -> None:
        """Choose the size of a pass by what the device has room for beside the engine."""
        lengths = {"longest": self._room + self.sampling.max_tokens, "max_model_len": self._max_model_len}
        tokens = choose_on_device(self._trainer, self.engine, self._pass_sizes(), **lengths)
        self._settings = replace(self._settings, micro_batch_tokens=tokens)

    @property
    def _held_out_sampling(self) -> Sampling:
        return self.val_sampling or self.sampling

    @property
    def _max_model_len(self) -> int:
        return self._room + max(self.sampling.max_tokens, self._held_out_sampling.max_tokens)

    def _pass_sizes(self) -> list[int]:
        on_gpu = self._trainer.strategy.root_device.type == "cuda"
        return pass_sizes(self.micro_batch_tokens, self._room + self.sampling.max_tokens, on_gpu=on_gpu)

    def _settings_with(self, micro_batch_tokens: int) -> IterationSettings:
        given = {item.name: getattr(self, item.name) for item in fields(IterationSettings)}
        return IterationSettings(**{**given, "micro_batch_tokens": micro_batch_tokens, "max_prompt_tokens": self._room})

    def _check(self, *, is_fit: bool) -> None:
        """Check settings of module, data and Trainer together: all that needs neither prompts nor the engine."""
        module = self._module
        check_trainer(self._trainer)
        module.check_networks()
        self._fit_sampling()
        self._run_with = RunArguments(self._read_arguments())
        self._settings = self._settings_with(self._pass_sizes()[-1])
        if self._trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._settings = self._settings.of_dev_run(self._trainer)
        check_engine_ranks(self.engine.num_ranks, self._trainer)
        if is_fit:
            check_rewards(module.objective, self.has_rewards, draws_by_them=self.dynamic_sampling is not None)
            self._settings.check(module.objective, self._trainer)
            self.backlog.check(self.engine, self.sampling, module.objective)
            warn_of_filters(self.sampling)
        check_lengths(module.policy_path, self._room, self.sampling, self._held_out_sampling)
        for sampling in (self.sampling, self._held_out_sampling):
            self._check_sampling(sampling)

    def _check_sampling(self, sampling: Sampling) -> None:
        self.engine.check_sampling(sampling)
        check_conversations(self._environments, self.engine, sampling)

    def _fit_sampling(self) -> None:
        """Let responses take at most half of a short context, where nobody has said how long they may be."""
        context = context_of(self._module.policy_path)
        if context is not None and self.sampling == Sampling() and 2 * self.sampling.max_tokens > context:
            self.sampling = replace(self.sampling, max_tokens=context // 2)

    def _load_prompts(self, name: str, source: PromptSource | None, *, needed: bool) -> list[Prompt]:
        if source is None:
            if needed:
                raise MisconfigurationException(f"`data.{name}` is not set; give at least `data.{name}.path`.")
            return []
        room, responses = self.max_prompt_tokens, (self.sampling.max_tokens, self._held_out_sampling.max_tokens)
        if room is None:
            room = (context_of(self._module.policy_path) or sys.maxsize) - max(responses)
        turns = self._turns(name)
        if name == "train" or self.val_sampling or self.train is None:  # else both are sampled alike
            turns.warn_of_open_end(self._sampling_of(name).stop_strings)
        prompts = load_prompts(source, self.tokenizer, max_prompt_tokens=room, turns=turns, seed=run_seed())
        rows = {prompt.index: prompt.row for prompt in prompts}
        check_rows(self.rewards, rows, source.name, are_scored=not self._trainer.predicting)
        if self._environments is not None:
            self._environments.check_reset(prompts[0].row)
        if name == "val":
            check_held_out(self._trainer, len(prompts))
        if name == "train":
            prompts = first_prompts(prompts, self._trainer.overfit_batches)  # type: ignore[attr-defined]
        return prompts

    def _turns(self, name: str) -> Turns:
        """Return what writes the conversations of `train` or `val` as they are sampled now."""
        stop_tokens = self._sampling_of(name).stop_token_ids
        return turns_of(getattr(self, name), self.tokenizer, self._ends, self._environments, stop_tokens)

    def _sampling_of(self, name: str) -> Sampling:
        return self.sampling if name == "train" else self._held_out_sampling

    @override
    def close(self) -> None:
        """Free the engine and stop the reward workers; safe to call twice."""
        super().close()
        if hasattr(self, "pool"):
            self.pool.close()
            self._stream.close()
        self.engine.close()  # last: on a broken device it may raise

    @override
    def state_dict(self) -> dict[str, Any]:
        assert self.cursor is not None, "`state_dict` before `setup`"
        if self._iteration is not None and not self._iteration.has_moved:
            start = self._iteration.start  # it begins anew
        else:
            engine, means = self.engine.state_dict(), self.answer_lengths.means
            start = IterationStart(self.cursor.position, self.backlog.deferred, means, engine)
        deferred = start.deferred
        if self._environments is not None:  # they are not saved: conversations with them begin anew
            deferred = [replace(group, responses=()) for group in deferred]
        own = {"engine": start.engine, **self.backlog.state_dict(deferred)}
        ranks = [own] if self._trainer.interrupted else gather_over_ranks(self._trainer, own)  # others may not come
        return {
            "cursor": start.position,
            "mean_lengths": start.mean_lengths,
            "ranks": ranks,
            "settings": self._kept_settings,
        }

    @property
    def _kept_settings(self) -> dict[str, int]:
        """Settings that a resumed run must not change to go on exactly."""
        sizes = ("group_size", "prompts_per_iteration", "num_minibatches", "inner_epochs")
        return {
            "seed_everything": run_seed(),
            "number of workers": self._trainer.world_size,
            **{f"data.{name}": getattr(self, name) for name in sizes},
            "number of training prompts": len(self.train_prompts),
            PROMPTS: self._checksum,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.cursor is None:  # in `load_from_checkpoint`; a run goes on by `ckpt_path`
            return
        ranks, rank, num_ranks = state_dict["ranks"], self._trainer.global_rank, self._trainer.world_size
        self.cursor.position = state_dict["cursor"]
        self.engine.load_state_dict(ranks[min(rank, len(ranks) - 1)]["engine"])
        if self._trainer.state.fn != "fit":
            return
        saved, now = state_dict["settings"], self._kept_settings
        if saved[PROMPTS] == now[PROMPTS]:  # prompts are known by number: those of other data are others
            self.answer_lengths.means = state_dict["mean_lengths"]
            # What was written without an environment is no conversation with one.
            max_tokens = self.sampling.max_tokens if self._environments is None else 0
            self.backlog.load(ranks, rank, num_ranks, group_size=self.group_size, max_tokens=max_tokens)
        warn_of_changes(saved, now)
        if len(ranks) < (num_saving := saved["number of workers"]):
            log.warning(
                "The checkpoint was saved after an error, by %d of %d ranks: what a schedule had deferred on the "
                "others is lost, and its prompts are not drawn again in this pass over the data.",
                len(ranks),
                num_saving,
            )

    # Loaders

    @property
    @override
    def num_steps(self) -> int:
        return self._settings.num_steps

    @override
    def val_dataloader(self) -> RolloutLoader[list[Rollout]] | list[Any]:
        """Yield a batch a held-out prompt of this rank, so that `limit_val_batches` counts prompts."""
        return RolloutLoader(len(self._own_val_prompts), self._val_rollouts) if self.val_prompts else []

    test_dataloader = predict_dataloader = val_dataloader

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(batch[0], RolloutBatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch  # held-out rollouts are text and stay where they are

    # Rolling out

    @override
    def train_batches(self) -> Iterator[list[RolloutBatch]]:
        assert self.cursor is not None
        self._take_sampling()
        collector = self._collector(self._module.iteration_log, "train")
        kept = self.cursor, self.answer_lengths, self.backlog
        self._iteration = PolicyIteration(self._trainer, self._module, collector, self._settings, *kept)
        for minibatch in self._iteration.minibatches(self.train_prompts):
            self._run_with.check(self)
            yield minibatch

    def _take_sampling(self) -> None:
        """Let the iteration that begins have `sampling` as a callback has changed it, and no other change."""
        if self.sampling != self._run_with.sampling:
            self._settings = replace(self._settings, sampling=self.sampling)
            self._check_sampling(self.sampling)
            self._run_with.take_sampling(self.sampling, self.backlog.schedule)
            self._settings.check(self._module.objective, self._trainer)
        self._run_with.check(self)

    @property
    def _own_val_prompts(self) -> list[Prompt]:
        return self.val_prompts[self._trainer.global_rank :: self._trainer.world_size]

    def _val_rollouts(self) -> Iterator[list[Rollout]]:
        self.backlog.put_aside(self._stream.set_aside())  # what an asynchronous schedule lets run
        collector = self._collector(IterationLog(), "val")  # the iteration's own books all of this as validation
        rollouts = collector.collect(
            self._own_val_prompts[: num_held_out_batches(self._trainer)],
            self._held_out_sampling,
            group_size=self.val_group_size,
            seed=seed_of(run_seed(), "val", 0, self._trainer.global_rank),  # the same noise in every validation
        )
        call_rollout_hook(self._trainer, "on_rollout_end", tuple(rollouts))
        yield from split_groups(rollouts)

    def _collector(self, log: IterationLog, name: str) -> RolloutCollector:
        turns = self._turns(name)
        self._stream.speak(getattr(self, name), turns, self._room)
        self.engine.attach(cast("PreTrainedModel", self._module.policy))
        return RolloutCollector(
            self._trainer,
            self._stream,
            self._weights,
            turns=turns,
            rewards=self.pool,
            log=log,
            idle=self.idle,
            probe=self._probe,
            peak_memory=self._module.iteration_log.peak_memory,
        )
