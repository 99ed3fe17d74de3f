"""Whole runs in environments, on a tiny policy."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Paths
from tests.support.rl_runs import Recorder, make_data, make_engine, make_module, make_trainer, weights
from tlt_lightning import (
    AsyncRollout,
    DynamicSampling,
    FixedSelector,
    LoRA,
    PartialRollout,
    Sampling,
    Speculation,
    TransformersEngine,
    VLLMEngine,
)
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.policy import load_policy, load_tokenizer, response_logps


class Counting:
    """Answers each turn with its number, three times; the reward is the share of even words."""

    def reset(self, **row: Any) -> None:
        self.turns: list[str] = []

    def step(self, text: str) -> str | None:
        self.turns.append(text)
        return f"= {len(self.turns)} :" if len(self.turns) < 3 else None

    def get_reward(self) -> float:
        words = [word for turn in self.turns for word in turn.split()]
        return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))


def settings(**overrides: Any) -> dict[str, Any]:
    limits = TurnLimits(tokens=4, seconds=200, waits=True)
    return {"rewards": [], "environment": Counting, "turns": limits, "sampling": Sampling(max_tokens=24), **overrides}


def speculating() -> VLLMEngine:
    selector = FixedSelector(num_draft_tokens=3, drafter="sibling")
    speculation = Speculation(selector=selector, siblings=True, ngram=True)
    return VLLMEngine(
        dtype="float32", kv_cache_gib=0.0625, max_num_seqs=32, enforce_eager=True, speculation=speculation
    )


@pytest.mark.parametrize(
    "engine",
    ["transformers", *(pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm", "speculating"))],
)
@pytest.mark.parametrize("waits", [True, False])
def test_conversations_are_learned_from_as_they_were_sampled(
    engine: str, waits: bool, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    recorder, module, limits = Recorder(), make_module(policy_path), TurnLimits(tokens=4, waits=waits)
    writer = speculating() if engine == "speculating" else make_engine(engine)
    data = make_data(prompts_path, writer, **settings(turns=limits))
    make_trainer(tmp_path, recorder, max_epochs=1).fit(module, data)
    (rollouts,), (batch,) = recorder.rollouts, recorder.batches
    tokenizer = load_tokenizer(policy_path)
    for rollout in rollouts:
        response, said = rollout.response, []
        turns = [response.token_ids[start:stop] for start, stop in response.turns]
        for turn in turns[:-1]:
            said += turn if turn[-1] == tokenizer.eos_token_id else [*turn, tokenizer.eos_token_id]
            said += tokenizer(f"= {turns.index(turn) + 1} :")["input_ids"]
        assert len(turns) == 3
        assert list(response.token_ids) == [*said, *turns[-1]]
        seen = [[token for token in turn if token not in (0, 1)] for turn in turns]  # padding and end
        words = [word for turn in seen for word in tokenizer.decode(turn).split()]
        assert rollout.reward == sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))
    drafted = any(rollout.response.drafts for rollout in rollouts)
    assert drafted == (engine == "speculating")
    logps = response_logps(load_policy(policy_path), batch)[0]
    trained = batch.response_mask.bool()
    torch.testing.assert_close(logps[trained], batch.rollout_logps[trained], atol=1e-4, rtol=0)
    assert batch.advantages is not None
    assert not batch.advantages[~trained].any()
    assert batch.advantages.any()
    assert not data._stream._trajectories  # of conversations that were taken nothing is kept


class ByTurn(Counting):
    """Rewards each turn by its own even words."""

    def get_reward(self) -> list[float]:  # type: ignore[override]
        return [float(sum(word.isdigit() and int(word) % 2 == 0 for word in turn.split())) for turn in self.turns]


def test_what_an_environment_gives_each_turn_reaches_the_objective_at_its_last_token(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    recorder, tokenizer = Recorder(), load_tokenizer(policy_path)
    data = make_data(prompts_path, **settings(environment=ByTurn))
    make_trainer(tmp_path, recorder, max_epochs=1).fit(make_module(policy_path), data)
    (rollouts,), (batch,) = recorder.rollouts, recorder.batches
    assert batch.turn_rewards is not None
    expected = torch.zeros_like(batch.turn_rewards)
    for row, rollout in enumerate(rollouts):
        for start, stop in rollout.response.turns:
            words = tokenizer.decode([token for token in rollout.response.token_ids[start:stop] if token > 1]).split()
            expected[row, stop - 1] = sum(word.isdigit() and int(word) % 2 == 0 for word in words)
    assert expected.any()
    assert torch.equal(batch.turn_rewards, expected)
    assert torch.equal(batch.rewards, expected.sum(-1))


class Slowly(Counting):
    """Takes its time, so that turns end while others are written, and while the rollout is stopped."""

    async def step(self, text: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(random.random() * 0.03)
        return super().step(text)


@pytest.mark.vllm
def test_conversations_go_on_in_later_iterations_with_their_environments(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    recorder, tokenizer = Recorder(), load_tokenizer(policy_path)
    schedule: dict[str, Any] = {"schedule": AsyncRollout(1), "dynamic_sampling": DynamicSampling(max_rounds=2)}
    data = make_data(
        prompts_path, make_engine("vllm"), **settings(turns=TurnLimits(tokens=4), environment=Slowly, **schedule)
    )
    trainer = make_trainer(tmp_path, recorder, max_epochs=4, limit_val_batches=2, check_val_every_n_epoch=2)
    trainer.fit(make_module(policy_path), data)
    assert len(recorder.rollouts) == 6  # two of them held out
    for rollout in (each for rollouts in recorder.rollouts for each in rollouts):
        turns = [rollout.response.token_ids[start:stop] for start, stop in rollout.response.turns]
        words = [word for turn in turns for word in tokenizer.decode([t for t in turn if t > 1]).split()]
        assert len(turns) == 3
        assert rollout.reward == sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))


@pytest.mark.slow
def test_adapters_learn_from_conversations(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(make_module(policy_path, lora=LoRA(rank=4)), make_data(prompts_path, **settings()))
    assert trainer.callback_metrics["environment/turns"] == 3
    assert trainer.callback_metrics["mismatch/logp_abs_diff"] < 1e-4  # of merged weights, after an update
    assert trainer.callback_metrics["train/grad_norm"] > 0


@pytest.mark.slow
def test_a_tiny_policy_learns_a_game_of_three_turns(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    recorder = Recorder()
    data = make_data(prompts_path, **settings(group_size=8, prompts_per_iteration=8, num_minibatches=1))
    make_trainer(tmp_path, recorder, max_epochs=8).fit(make_module(policy_path), data)
    means = [sum(each.reward for each in rollouts) / len(rollouts) for rollouts in recorder.rollouts]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.2
    assert all(len(each.response.turns) == 3 for rollouts in recorder.rollouts for each in rollouts)


@pytest.mark.slow
def test_a_run_that_was_saved_between_iterations_goes_on_to_the_bit(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    whole = make_module(policy_path)
    make_trainer(tmp_path, max_epochs=3).fit(whole, make_data(prompts_path, **settings()))
    begun = make_trainer(tmp_path, max_epochs=2)
    begun.fit(make_module(policy_path), make_data(prompts_path, **settings()))
    begun.save_checkpoint(tmp_path / "two.ckpt")
    resumed = make_module(policy_path)
    make_trainer(tmp_path, max_epochs=3).fit(
        resumed, make_data(prompts_path, **settings()), ckpt_path=str(tmp_path / "two.ckpt")
    )
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_without_its_environment_no_conversation_that_waited_goes_on(paths: Paths) -> None:
    recorder, schedule = Recorder(), PartialRollout(1.0)
    begun = make_trainer(paths[2], max_epochs=1)
    data = make_data(paths[1], TransformersEngine(batch_size=5), **settings(schedule=schedule))
    begun.fit(make_module(paths[0]), data)
    begun.save_checkpoint(paths[2] / "one.ckpt")
    assert any(response.observed for group in data.backlog.deferred for response in group.responses)
    data = make_data(paths[1], sampling=Sampling(max_tokens=24), schedule=schedule)
    trainer = make_trainer(paths[2], recorder, max_epochs=3)
    trainer.fit(make_module(paths[0]), data, ckpt_path=str(paths[2] / "one.ckpt"))
    learned = [rollout for rollouts in recorder.rollouts for rollout in rollouts]
    assert {rollout.response.request_id // 4 for rollout in learned} >= {*range(4, 8)}  # they waited
    assert not any(rollout.response.observed for rollout in learned)
    assert min(min(rollout.response.policy_versions) for rollout in learned) == 2


class Demanding(Counting):
    def reset(self, missing: str = "", **row: Any) -> None:
        row[missing]


def test_an_environment_that_fails_in_every_conversation_ends_the_run(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    data = make_data(prompts_path, **settings(environment=Demanding))
    with pytest.raises(RuntimeError, match=r"`Demanding` failed in all of the last \d+ conversations\. .*KeyError"):
        make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path), data)


class Strict(Counting):
    def reset(self, missing: str, **row: Any) -> None: ...


def test_a_reset_that_does_not_take_the_data_is_refused_before_the_engine_loads(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(prompts_path, **settings(environment=Strict))
    monkeypatch.setattr(data.engine, "setup", None)
    with pytest.raises(TypeError, match=r"`environment.reset` is called with the columns .*missing"):
        make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path), data)
