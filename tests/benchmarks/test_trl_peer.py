"""`peers/trl_grpo.py`: it gives TRL the same work, and splits its iterations as ours are split."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.arguments import ASSETS
from benchmarks.end_to_end.work import Work
from benchmarks.peers import trl_grpo as trl_peer


def test_stages_tell_the_two_log_prob_passes_apart_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 16.0])
    monkeypatch.setattr(trl_peer.time, "perf_counter", lambda: next(clock))
    stages = trl_peer.Stages()
    logprobs = "GRPOTrainer._get_per_token_logps_and_entropies"
    for name, seconds in (
        ("GRPOTrainer.sync_weights", 0.25),
        ("GRPOTrainer.vLLM.generate", 5.0),
        (logprobs, 1.0),
        ("GRPOTrainer.countdown", 0.1),  # inside the rewards
        ("GRPOTrainer._calculate_rewards", 0.25),
        ("GRPOTrainer._prepare_inputs", 7.0),
        (logprobs, 0.5),  # of the loss
        ("GRPOTrainer.compute_loss", 0.75),
        ("GRPOTrainer._prepare_inputs", 0.0),
        (logprobs, 0.5),
        ("GRPOTrainer.compute_loss", 0.75),
    ):
        stages.took(name, seconds)
    first = stages.end_iteration()
    assert first.pop("time/iteration") == pytest.approx(10.0)
    assert sum(first.values()) == pytest.approx(10.0)
    assert first == {
        "time/sync": 0.25,
        "time/rollout": 5.0,
        "time/logprobs": 1.0,
        "time/reward": 0.25,
        "time/other": 0.5,
        "time/update": 3.0,
    }
    assert stages.end_iteration() == {"time/other": 0.0, "time/update": 6.0, "time/iteration": 6.0}


def test_trl_is_asked_for_the_same_batch_and_loss(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    work = Work(policy="p", train="t", prompts=8, group_size=4, micro_batch_size=2, max_tokens=48, precision="32-true")
    config = trl_peer.settings(work, str(tmp_path))
    assert (config.generation_batch_size, config.steps_per_generation, config.num_generations) == (32, 16, 4)
    assert (config.loss_type, config.beta, config.epsilon_high, config.num_iterations) == ("dapo", 0.0, 0.28, 1)
    assert config.vllm_max_model_length == 112
    assert not config.shuffle_dataset


def test_every_request_gets_its_recorded_length() -> None:
    class Params(SimpleNamespace):
        def clone(self) -> "Params":
            return Params(**vars(self))

    asked: list[Any] = []
    llm = SimpleNamespace(generate=lambda prompts, sampling_params, **options: asked.append((sampling_params, options)))
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=1), vllm_generation=SimpleNamespace(llm=llm), model=None
    )
    trl_peer.replay_lengths(trainer, [[9, 9], [3, 5]])
    llm.generate(["a", "b"], sampling_params=Params(max_tokens=48, ignore_eos=False, temperature=1.0), use_tqdm=False)
    ((params, options),) = asked
    assert [(each.max_tokens, each.ignore_eos, each.temperature) for each in params] == [(3, True, 1.0), (5, True, 1.0)]
    assert options == {"use_tqdm": False}


def test_the_policy_is_declared_bfloat16_for_vllm_without_being_copied(tmp_path: Path) -> None:
    linked = Path(trl_peer.as_bfloat16(str(ASSETS / "policy"), str(tmp_path)))
    assert json.loads((linked / "config.json").read_text())["dtype"] == "bfloat16"
    assert (linked / "model.safetensors").resolve() == (ASSETS / "policy/model.safetensors").resolve()
    assert json.loads((ASSETS / "policy/config.json").read_text())["dtype"] == "float32"


def test_rewards_are_given_row_by_row() -> None:
    rows = [json.dumps({"numbers": [3, 4], "answer": answer}) for answer in (7, 8)]
    assert trl_peer.reward(["", ""], ["<answer> 3 + 4"] * 2, rows, trainer_state=None) == [1.0, 0.0]
