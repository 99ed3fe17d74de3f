"""Whole runs with two vLLM engines in processes of their own, beside those with one in the trainer's."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import ray
import torch

from tests.conftest import Paths
from tests.environments.test_runs import Slowly, settings
from tests.support.drafters import drafter_runs
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer, weights
from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning import AsyncRollout, RayEngine, Request, RolloutCallback, RolloutEngine, Sampling, VLLMEngine
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.long_tail.budget import FixedBudget
from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer
from tlt_lightning.speculation.strategy import Strategy

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def vllm() -> VLLMEngine:
    return VLLMEngine(dtype="float32", kv_cache_gib=0.0625, max_num_seqs=16, enforce_eager=True, sleep=False)


class Kept(RayEngine):
    """Outlives the runs that use it: its engines load once."""

    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        if self._fleet is None:
            super().setup(policy, max_model_len=128, seed=seed)

    def close(self) -> None:
        """Wait for the end of the module."""


@pytest.fixture(scope="module")
def engine(cluster: None) -> Iterator[RayEngine]:
    engine = Kept(vllm(), num_engines=2)
    yield engine
    RayEngine.close(engine)


class Killer(RolloutCallback):
    """Kills a host in the second iteration, as soon as it writes."""

    def __init__(self, engine: RayEngine) -> None:
        self.engine, self.has_killed = engine, False

    def on_rollout_progress(self, trainer: Any, pl_module: Any, progress: Any) -> None:
        if trainer.current_epoch == 1 and not self.has_killed and progress.running:
            ray.kill(self.engine._live.hosts[1]._actor)
            self.has_killed = True


def fit(paths: Paths, engine: RolloutEngine, *callbacks: Any, epochs: int = 3, **data: Any) -> tuple[Any, Recorder]:
    policy, prompts, folder = paths
    recorder, module = Recorder(), make_module(policy)
    torch.manual_seed(3)
    trainer = make_trainer(folder, recorder, *callbacks, max_epochs=epochs)
    trainer.fit(module, make_data(prompts, engine, **{"sampling": Sampling(max_tokens=24), **data}))
    return module, recorder


def test_a_synchronous_run_is_the_in_process_one_to_the_bit_though_a_host_is_killed(
    paths: Paths, engine: RayEngine
) -> None:
    module, recorder = fit(paths, vllm())
    killer = Killer(engine)
    other, other_recorder = fit(paths, engine, killer)
    assert killer.has_killed
    for rollouts, others in zip(recorder.rollouts, other_recorder.rollouts, strict=True):
        assert [(each.text, each.reward) for each in rollouts] == [(each.text, each.reward) for each in others]
    expected, found = weights(module), weights(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_greedy_text_is_the_in_process_engines(policy_path: str, engine: RayEngine) -> None:
    own, model = vllm(), load_policy(policy_path)
    asked = [Request(number, [12 + number % 5, 13, 3, 15, 4], group=number // 2) for number in range(12)]
    texts = []
    for each in (own, engine):
        each.setup(policy_path, max_model_len=64, seed=0)
        each.update_weights(PolicyWeights(model), 100)
        responses = each.generate(asked, Sampling(max_tokens=40, temperature=0), seed=0)
        texts.append({response.request_id: [*response.token_ids] for response in responses})
    own.close()
    assert texts[0] == texts[1]
    assert {own.weight_dtype, *(host.report.weight_dtype for host in engine._live.hosts)} == {"float32"}


class Slow(RolloutCallback):
    """Takes its time for an update."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.2)


@pytest.mark.parametrize("is_slow", [False, True], ids=["slow engines", "slow trainer"])
def test_no_token_is_older_than_the_bound_and_hosts_write_meanwhile(
    paths: Paths, engine: RayEngine, is_slow: bool
) -> None:
    schedule, sampling = AsyncRollout(max_staleness=2), Sampling(max_tokens=96, stop_token_ids=(12, 13, 14))
    data = {"schedule": schedule, "sampling": sampling, "micro_batch_tokens": 256}
    _, recorder = fit(paths, engine, *([Slow()] if is_slow else []), epochs=6, **data)
    steps = 2  # minibatches of an iteration
    ages = [
        iteration - version // steps
        for iteration, rollouts in enumerate(recorder.rollouts)
        for rollout in rollouts
        for version, _ in rollout.response.segments
    ]
    assert min(ages) >= 0
    assert 1 <= max(ages) <= 2


class Told(ScriptedSelector):
    """Keeps what it is told of new heads."""

    def __init__(self) -> None:
        super().__init__(longest=3)
        self.script, self.heard = lambda state: Strategy(3), list[tuple[float, ...]]()

    def note_head(self, accepted: Sequence[float]) -> None:
        self.heard.append(tuple(accepted))

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}


class Learned(RolloutCallback):
    """Keeps what the engine has learned when the run ends."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = trainer.datamodule.engine.state_dict()


class AtFirst(FixedBudget):
    """Trains in the first iteration alone."""

    def decide(self, iteration: int, remaining: int | None) -> float | None:
        return None if iteration else super().decide(iteration, remaining)


@pytest.mark.slow
def test_hosts_draft_with_a_head_that_the_trainer_trains_and_hear_how_good_it_is(cluster: None, tmp_path: Path) -> None:
    metrics, learned = drafter_runs.Metrics(), Learned()
    L.seed_everything(3)
    drafting = drafter_runs.make_callback(budget=AtFirst(8.0))
    trainer = drafter_runs.make_trainer(tmp_path, drafting, metrics, learned, max_epochs=2)
    engine = RayEngine(drafter_runs.make_engine(Told()))
    trainer.fit(drafter_runs.make_module(), drafter_runs.make_data(engine))
    first, second = metrics.rows
    assert first["speculation/acceptance_length"] == first["speculation/off_share"] == 1  # a random one drafts nothing
    assert second["speculation/off_share"] == 0
    assert second["speculation/drafter_version"] == 1
    (heard,) = learned.state["selector"]["heard"]
    assert 1 + sum(heard) == pytest.approx(second["drafter/acceptance_after"], abs=0.01)
    assert second["speculation/acceptance_length"] == pytest.approx(1 + sum(heard), abs=0.25)


@pytest.mark.parametrize("schedule", [None, AsyncRollout(1)], ids=["synchronous", "asynchronous"])
def test_conversations_go_on_in_engines_of_their_own(
    paths: Paths, engine: RayEngine, schedule: AsyncRollout | None
) -> None:
    _, recorder = fit(paths, engine, **settings(turns=TurnLimits(tokens=4), environment=Slowly, schedule=schedule))
    tokenizer = load_tokenizer(paths[0])
    for rollout in (each for rollouts in recorder.rollouts for each in rollouts):
        turns = [rollout.response.token_ids[start:stop] for start, stop in rollout.response.turns]
        words = [word for turn in turns for word in tokenizer.decode([t for t in turn if t > 1]).split()]
        assert len(turns) == 3
        assert rollout.reward == sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))
