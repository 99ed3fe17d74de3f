"""Whole runs with two vLLM engines in processes of their own, beside those with one in the trainer's."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from tests.conftest import Paths
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer, weights
from tlt_lightning import AsyncRollout, RayEngine, Request, RolloutCallback, RolloutEngine, Sampling, VLLMEngine
from tlt_lightning.policy import PolicyWeights, load_policy

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
