"""One iteration of one of two ranks, with a collector that answers at once and a module that scores nothing."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning import DynamicSampling, PartialRollout, RLModule, RolloutSchedule, Sampling
from tlt_lightning.data import iteration
from tlt_lightning.data.iteration import PolicyIteration
from tlt_lightning.data.iteration_settings import IterationSettings
from tlt_lightning.data.prompts import PromptCursor
from tlt_lightning.metrics import IterationLog
from tlt_lightning.objectives import GRPO, ReinforcePlusPlus
from tlt_lightning.rollout import Prompt, Response, Rollout, RolloutBatch, collate
from tlt_lightning.schedules.answer_lengths import AnswerLengths
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.under_way import RolloutUnderWay

PROMPTS = [Prompt(f"q{number}", [2] * (1 + number), index=number) for number in range(8)]
DULL = (3, 5)  # prompts whose responses all earn the same


class Strategy:
    """Ranks that all have the same: the sum is twice as much, the maximum is one's own."""

    root_device = torch.device("cpu")

    def reduce(self, value: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return value.mul_(2) if reduce_op == "sum" else value


class Answers:
    """A collector whose responses to prompt `i` have `i + 2` tokens, all but the last of an older version."""

    turns, has_rewards = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=1, pad_token_id=0)), True

    def __init__(self, version: int) -> None:
        self.version, self.calls, self.metrics = version, [], {"rollout/seconds": 2.0}
        self.engine, self.rewards = SimpleNamespace(state_dict=dict), SimpleNamespace(terms=["score"])

    def collect(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, under_way: RolloutUnderWay, **arguments: Any
    ) -> list[Rollout]:
        self.calls.append((prompts, under_way, arguments))
        ids = [prompt.ids for prompt in prompts]
        for request in under_way.requests(ids):
            length = 1 + len(request.prompt_ids)
            versions, counts = ((0, self.version), (length - 1, 1)) if self.version else ((0,), ())
            under_way.add(Response(request.id, [9] * length, [-1.0] * length, "stop", versions, version_tokens=counts))
        rollouts = []
        for number in under_way.taken:
            place, member = under_way.place_of(number), number % under_way.group_size
            reward = 1.0 if prompts[place].index in DULL else float(member)
            group = arguments["first_group"] + place
            rollouts.append(Rollout(prompts[place], under_way.responses[number], "", group, {"score": reward}, reward))
        return rollouts


@pytest.fixture(autouse=True)
def needs_of_others(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Prompts that rank 0 draws where rank 1 draws so many; as many unless a test says otherwise."""
    needs: dict[int, int] = {}

    def gather(_: Any, own: Any) -> list[Any]:
        if isinstance(own, list):  # groups to learn from, of which the other rank has none
            return [[], own]
        if hasattr(own, "lengths"):  # what rollouts tell
            return [own]
        return [(needs.get(own[0], own[0]), own[1]) if isinstance(own, tuple) else needs.get(own, own), own]

    monkeypatch.setattr(iteration, "gather_over_ranks", gather)
    monkeypatch.setattr(iteration, "check_settings", lambda trainer: None)
    return needs


class OneRank:
    """Rank 1 of two, in iteration 4 of steps that are counted from `first_step`."""

    def __init__(
        self,
        *,
        first_step: int = 0,
        schedule: RolloutSchedule | None = None,
        **settings: Any,
    ) -> None:
        sizes = {"group_size": 2, "prompts_per_iteration": 4, "micro_batch_tokens": 100, "num_minibatches": 1}
        others = {"inner_epochs": 1, "max_prompt_tokens": 20, "dynamic_sampling": None, "sampling": Sampling()}
        self.trainer: Any = SimpleNamespace(
            **{"global_rank": 1, "world_size": 2, "current_epoch": 4, "global_step": first_step, "callbacks": [self]},
            **{"accumulate_grad_batches": 1, "strategy": Strategy(), "lightning_module": None},
        )
        self.log, self.asked, self.heard = IterationLog(), [], []
        self.collector, self.cursor = Answers(first_step), PromptCursor(len(PROMPTS), 0)
        self.answer_lengths: Any = AnswerLengths({PROMPTS[3].index: 6.5})
        self.answer_lengths.learn = lambda own, _: self.heard.append(own)
        self.backlog = Backlog(schedule)
        objective, networks = GRPO(), SimpleNamespace(is_padded=False)
        self.module: Any = SimpleNamespace(
            iteration_log=self.log, objective=objective, networks=networks, score=self.score
        )
        self.module.trainer, self.module.hidden_state_request = self.trainer, None
        self.module.estimate_advantages = partial(RLModule.estimate_advantages, self.module)
        sizes = IterationSettings(**{**sizes, **others, **settings})
        parts: Any = (self.collector, sizes, self.cursor, self.answer_lengths)
        self.make = lambda: PolicyIteration(self.trainer, self.module, *parts, self.backlog)
        self.iteration = self.make()

    def score(self, batch: RolloutBatch, micro_batch_tokens: int, *, single_update: bool) -> RolloutBatch:
        self.asked.append((micro_batch_tokens, single_update))
        return replace(batch, old_logps=batch.rollout_logps)

    def on_rollout_end(self, trainer: Any, module: Any, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts

    def on_rollout_scored(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.scored = batch

    def steps(self) -> Iterator[list[RolloutBatch]]:
        """Yield the micro-batches of each step, and take it."""
        for step in self.iteration.minibatches(PROMPTS):
            yield step
            self.trainer.global_step += 1

    def numbers(self) -> dict[str, float]:
        return {name: value for name, (_, value) in self.log.read().items()}


def test_a_rank_draws_its_share_and_knows_the_draws_of_all() -> None:
    rank = OneRank()
    ((batch,),) = rank.steps()
    (prompts, course, arguments), *more = rank.collector.calls
    assert not more
    order = PromptCursor(len(PROMPTS), 0).peek(4)
    assert [prompt.index for prompt in prompts] == order[1::2]
    assert [(group.prompt, group.draw, group.drawn_in, group.begun_in) for group in course.groups] == [
        (order[1], 1, 4, 4),
        (order[3], 3, 4, 4),
    ]
    assert [group.expected_tokens for group in course.groups] == [6.5 * (index == 3) for index in order[1::2]]
    assert (arguments["group_size"], arguments["first_group"]) == (2, 0)
    assert (course.demand.wanted, course.demand.iteration, course.demand.is_first) == (2, 4, True)
    assert rank.cursor.position == 4
    lengths = [(index, index + 2) for index in order[1::2] for _ in range(2)]
    assert rank.heard == [lengths]
    assert sorted(batch.groups.tolist()) == [0, 0, 1, 1]
    assert len(rank.rollouts) == 4
    assert rank.scored.old_logps is not None
    assert rank.scored.advantages is not None
    assert rank.numbers()["rollout/seconds"] == 2.0
    assert not any(name.startswith(("schedule/", "rollout/groups")) for name in rank.numbers())


def test_a_rank_draws_what_is_dealt_to_it_by_earlier_answers() -> None:
    rank = OneRank()
    order = PromptCursor(len(PROMPTS), 0).peek(4)
    rank.answer_lengths.means = dict(zip(order, (100.0, 10.0, 20.0, 30.0), strict=True))
    list(rank.steps())
    ((_, course, _),) = rank.collector.calls
    assert [(group.prompt, group.draw) for group in course.groups] == [(order[2], 2), (order[3], 3)]
    assert rank.cursor.position == 4


def test_ranks_that_lack_unequally_many_skip_no_prompt(needs_of_others: dict[int, int]) -> None:
    needs_of_others[2] = 1
    rank = OneRank()
    list(rank.steps())
    ((_, course, _),) = rank.collector.calls
    assert [group.draw for group in course.groups] == [1, 2]  # rank 0 has 0
    assert rank.cursor.position == 3


def test_steps_are_cut_alike_in_each_pass_and_count_the_tokens_of_all_ranks() -> None:
    rank = OneRank(num_minibatches=2, inner_epochs=3)
    assert not rank.iteration.has_moved
    seen, moved = [], []
    for step in rank.steps():
        moved.append(rank.iteration.has_moved)
        seen += [row for part in step for row in part.rows]
        own = sum(float(part.response_mask.sum()) for part in step)
        assert {(part.num_loss_tokens, part.num_loss_sequences, part.num_shares) for part in step} == {
            (2 * own, 4.0, 2)
        }
    assert rank.asked == [(100, False)]
    passes = [seen[start : start + 4] for start in (0, 4, 8)]
    assert [sorted(rows) for rows in passes] == [[0, 1, 2, 3]] * 3
    assert len(set(map(tuple, passes))) > 1  # shuffled anew
    again = OneRank(num_minibatches=2, inner_epochs=3).steps()
    assert [row for step in again for part in step for row in part.rows] == seen  # by the run's seed
    assert moved == [False, *[True] * 5]


def test_groups_are_dealt_anew_so_that_ranks_learn_from_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = replace(PROMPTS[0], row={"check": lambda text: True})  # as a source of rows may have it

    def group(number: int, *lengths: int) -> list[Rollout]:
        responses = [Response(0, [9] * length, [-1.1] * length, "stop", (0,)) for length in lengths]
        return [Rollout(prompt, response, f"{number}", number, turn_rewards=(0.1,)) for response in responses]

    shares = [[group(0, 9, 1), group(1, 3, 7)], [group(0, 1, 1), group(1, 2, 2)]]
    sent: list[Any] = []
    monkeypatch.setattr(iteration, "gather_over_ranks", lambda _, own: sent.append(pickle.dumps(own)) or [own])
    rank, learned = OneRank(), []
    rank.trainer.global_rank = 0
    for share in shares:
        rank.iteration._deal_groups(share)
    monkeypatch.setattr(iteration, "gather_over_ranks", lambda *_: [*map(pickle.loads, sent)])
    for number in (0, 1):
        rank.trainer.global_rank = number
        learned.append(rank.iteration._deal_groups(shares[number]))
    lengths = [[len(each.response.token_ids) for each in rollouts] for rollouts in learned]
    assert lengths == [[9, 1, 2, 2], [3, 7, 1, 1]]
    assert [[each.group for each in rollouts] for rollouts in learned] == [[0, 0, 3, 3], [1, 1, 2, 2]]
    originals = [[*shares[0][0], *shares[1][1]], [*shares[0][1], *shares[1][0]]]
    for dealt, own in zip(learned, originals, strict=True):
        batch, expected = (collate(each, pad_id=0, temperature=1.0) for each in (dealt, own))
        for name in ("input_ids", "rollout_logps", "turn_rewards", "response_mask"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))


class WithoutTargets(GRPO):
    """Reads a critic, and gives it nothing to learn."""

    def advantages(self, batch: RolloutBatch, reduce: Any) -> tuple[torch.Tensor, None]:
        assert batch.values is not None
        return batch.values, None


def test_advantages_that_read_a_critic_may_give_it_no_targets() -> None:
    rank = OneRank()
    rank.module.objective = WithoutTargets()
    rank.module.score = lambda batch, *_, **__: replace(
        batch, old_logps=batch.rollout_logps, values=batch.response_mask / 2
    )
    ((batch,),) = rank.steps()
    assert batch.returns is None
    assert batch.advantages is not None
    assert batch.advantages.max() == 0.5
    assert "train/explained_variance" not in rank.numbers()


def test_an_update_of_one_step_needs_no_log_probs_from_before_it() -> None:
    rank = OneRank(micro_batch_tokens=17)
    (parts,) = rank.steps()
    assert rank.asked == [(17, True)]
    assert len(parts) > 1
    assert all(int(part.lengths.sum()) <= 17 for part in parts)


def test_groups_without_a_signal_are_replaced_as_long_as_there_are_rounds() -> None:
    wanted = {"prompts_per_iteration": 8, "dynamic_sampling": DynamicSampling(max_rounds=2)}
    rank = OneRank(**wanted)
    (parts,) = rank.steps()
    calls = rank.collector.calls
    order = PromptCursor(len(PROMPTS), 0).peek(16)
    dull = [index for index in order[1:8:2] if index in DULL]
    drawn = [[prompt.index for prompt in prompts] for prompts, *_ in calls]
    assert dull
    assert drawn == [order[1:8:2], order[9 : 8 + 2 * len(dull) : 2]]
    assert [course.demand.is_first for _, course, _ in calls] == [True, False]
    assert [course.demand.wanted for _, course, _ in calls] == [4, len(dull)]
    assert [arguments["first_group"] for *_, arguments in calls] == [0, 4]
    assert len({arguments["seed"] for *_, arguments in calls}) == 2
    still = [index for index in drawn[1] if index in DULL]
    assert rank.numbers()["rollout/groups_drawn"] == 4 + len(dull)
    assert rank.numbers()["rollout/groups_without_signal_kept"] == len(still)
    assert len(rank.rollouts) == 2 * (4 + len(dull))  # what callbacks see
    informative = [index for index in drawn[0] if index not in DULL] + [i for i in drawn[1] if i not in DULL]
    assert [rollout.prompt.index for rollout in rank.rollouts[::2]][: len(informative)] == informative
    # No more than wanted are learned from.
    assert sorted(part.groups[row].item() for part in parts for row in range(len(part.groups))) == sorted(
        2 * [*range(4)]
    )


@pytest.mark.parametrize(("schedule", "num_drawn"), [(None, 2), (PartialRollout(1.0), 4)])
def test_a_rank_that_lacks_nothing_begins_nothing_in_the_rounds_of_others(
    schedule: RolloutSchedule | None, num_drawn: int, needs_of_others: dict[int, int]
) -> None:
    needs_of_others[0] = 1
    rank = OneRank(prompts_per_iteration=2, dynamic_sampling=DynamicSampling(max_rounds=2), schedule=schedule)
    list(rank.steps())
    assert [len(prompts) for prompts, *_ in rank.collector.calls] == [num_drawn // 2, 0]
    assert rank.cursor.position == num_drawn + 1
    assert rank.numbers()["rollout/groups_drawn"] == 1


@pytest.mark.parametrize(("pad_id", "filled"), [(0, 0), (7, 7), (None, 1)])
def test_batches_are_padded_with_the_tokenizers_own_token_or_the_one_that_ends_a_text(
    pad_id: int | None, filled: int
) -> None:
    rank = OneRank()
    rank.collector.turns = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=1, pad_token_id=pad_id))
    ((batch,),) = rank.steps()
    assert batch.input_ids.flatten().unique().tolist() == sorted({2, 9, filled})


def test_the_age_of_a_token_counts_iterations_since_its_weights() -> None:
    rank = OneRank(first_step=6, num_minibatches=3, schedule=PartialRollout(0.5))
    rank.backlog.written_in[0] = 2
    list(rank.steps())
    lengths = [len(rollout.response.token_ids) for rollout in rank.rollouts]
    assert rank.numbers()["schedule/age"] == pytest.approx(sum(2.0 * (n - 1) for n in lengths) / sum(lengths))
    assert rank.numbers()["schedule/age_max"] == 2.0
    assert rank.numbers()["schedule/deferred"] == 1 == len(rank.backlog.deferred)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_batch_says_whether_its_schedule_is_asynchronous(is_asynchronous: bool) -> None:
    schedule = PartialRollout(0.5)
    schedule.is_asynchronous = is_asynchronous
    rank = OneRank(schedule=schedule, num_minibatches=2)
    assert {part.asynchronous for step in rank.steps() for part in step} == {is_asynchronous}


def test_a_trial_run_has_its_number_of_prompts_a_rank_and_one_step() -> None:
    rank = OneRank(num_minibatches=2)
    rank.trainer.fast_dev_run = 3
    trial = rank.iteration.settings.of_dev_run(rank.trainer)
    assert (trial.prompts_per_iteration, trial.num_steps, trial.group_size) == (6, 1, 2)


def test_dynamic_sampling_has_responses_to_compare() -> None:
    """Of a single response no prompt would do, and each iteration would throw away what it drew in vain."""
    rank = OneRank(dynamic_sampling=DynamicSampling(), group_size=1, micro_batch_tokens=2000)
    settings = rank.iteration.settings
    with pytest.raises(MisconfigurationException, match=r"1 is too small for dynamic sampling, .* at least 2"):
        settings.check(ReinforcePlusPlus(), rank.trainer)
    replace(settings, dynamic_sampling=None).check(ReinforcePlusPlus(), rank.trainer)
