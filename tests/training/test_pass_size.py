"""The tokens of a pass are chosen by the room that a device has."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.architectures import save_architecture
from tests.support.rl_runs import make_module
from tlt_lightning import RLModule, VLLMEngine
from tlt_lightning.adapters import LoRA
from tlt_lightning.objectives import GRPO, PPO, Distillation, KLPenalty
from tlt_lightning.training.critic import CriticConfig
from tlt_lightning.training.memory import pass_size
from tlt_lightning.training.memory.forecast import GIB, MemoryForecast, TrainedModel
from tlt_lightning.training.memory.pass_size import choose_on_device, choose_passes, pass_sizes, run_passes
from tlt_lightning.training.memory.passes import Passes


def candidates(longest: int, given: int | None = None) -> list[Passes]:
    return [
        Passes(size, longest, is_autocast=True, is_checkpointed=True)
        for size in pass_sizes(given, longest, on_gpu=True)
    ]


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    passes: list[Passes],
    device_gib: float,
    *,
    engine_gib: float = 0.0,
    engine_sleeps: bool = True,
) -> Passes:
    """Choose where 8 GiB are held, and 1 GiB for each 1,024 tokens: 16, 24 and 40 GiB for the three sizes."""

    def plan(models: Any, passes: Passes, *_: Any) -> MemoryForecast:
        held, kept = {"gradients": 3.0 * GIB, "optimizer": 5.0 * GIB}, passes.micro_batch_tokens / 1024 * GIB
        return MemoryForecast(held, {"activations": kept}, 0.0)

    monkeypatch.setattr(pass_size, "forecast", plan)
    free, engine = device_gib * GIB, {"cache": engine_gib * GIB}
    return choose_passes(RLModule("any"), passes, inf, free=free, engine=engine, engine_sleeps=engine_sleeps)[0]


@pytest.mark.parametrize(
    ("longest", "device_gib", "tokens"),
    [
        (1536, 200, 32768),
        (1536, 50.1, 32768),  # 40 GiB are just four fifths of 50
        (1536, 49.9, 16384),
        (1536, 30.1, 16384),
        (1536, 29.9, 8192),
        (1536, 16.1, 8192),  # the smallest may take it all
        (8192, 29.9, 8192),
        (12000, 29.9, 12000),
        (12000, 30.1, 16384),
        (20000, 50.1, 32768),
        (20000, 49.9, 20000),
        (40000, 200, 40000),
        (40000, 1, 40000),
    ],
)
def test_the_largest_pass_that_leaves_a_fifth_of_the_device(
    longest: int, device_gib: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = chosen(monkeypatch, candidates(longest), device_gib)
    assert passes == replace(passes, micro_batch_tokens=tokens, longest=longest)


@pytest.mark.parametrize(("engine_sleeps", "tokens"), [(True, 32768), (False, 16384)])
def test_an_engine_that_does_not_sleep_takes_room(
    engine_sleeps: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = chosen(monkeypatch, candidates(1536), 55, engine_gib=10, engine_sleeps=engine_sleeps)
    assert passes.micro_batch_tokens == tokens


KL, LORA = GRPO(loss_kl=KLPenalty(coef=0.1)), LoRA(rank=4)


@pytest.mark.parametrize(
    ("module", "trained", "frozen", "teacher"),
    [
        (RLModule("p", GRPO(), critic=CriticConfig(path="c"), reference="r"), {}, {}, None),  # it uses none
        (RLModule("p", PPO(), critic=CriticConfig()), {}, {}, None),  # on the policy's trunk
        (RLModule("p", PPO(), critic=CriticConfig(path="c", lora=LORA)), {"critic": TrainedModel("c", LORA)}, {}, None),
        (RLModule("p", KL), {}, {"reference": "p"}, None),
        (RLModule("p", KL, reference="r"), {}, {"reference": "r"}, None),
        (RLModule("p", KL, lora=LORA), {}, {}, None),  # the policy without its adapters
        (RLModule("p", KL, lora=LORA, reference="r"), {}, {"reference": "r"}, None),
        (RLModule("p", Distillation(), reference="r"), {}, {"reference": "r"}, "r"),
    ],
)
def test_every_model_that_a_run_holds_is_counted(
    module: Any, trained: Any, frozen: Any, teacher: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def plan(models: Any, passes: Passes, optimizer: Any, *others: Any) -> MemoryForecast:
        counted.append((models, *others))
        return MemoryForecast({}, {}, 0.0)

    monkeypatch.setattr(pass_size, "forecast", plan)
    choose_passes(module, candidates(64, 64), inf, free=inf, engine={}, engine_sleeps=True)
    assert counted == [({"policy": TrainedModel("p", module.lora), **trained}, frozen, teacher)]


@pytest.mark.parametrize(("precision", "is_autocast"), [("32-true", False), ("bf16-mixed", True)])
def test_passes_are_those_of_the_run(precision: str, is_autocast: bool) -> None:
    trainer: Any = SimpleNamespace(precision=precision, strategy=SimpleNamespace())
    module = RLModule("p", gradient_checkpointing=not is_autocast)
    alone = Passes(96, 64, is_autocast=is_autocast, is_checkpointed=not is_autocast)
    assert run_passes(trainer, module, [96], longest=64) == [alone]
    trainer.strategy.num_shards = 4
    assert run_passes(trainer, module, [96], longest=64) == [replace(alone, num_shards=4)]


@pytest.mark.parametrize("given", [2048, 8192, 65536])
def test_a_size_that_was_given_is_taken(given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, candidates(1536, given), 1).micro_batch_tokens == given


@pytest.mark.slow
def test_the_choice_is_said_once_with_its_forecast(policy_path: str, caplog: pytest.LogCaptureFixture) -> None:
    module, alone = make_module(policy_path), {"free": 80 * GIB, "engine": {}, "engine_sleeps": True}
    with caplog.at_level("INFO"):
        passes, _ = choose_passes(module, candidates(64), 80 * GIB, **alone)
    assert passes.micro_batch_tokens == 32768
    assert caplog.text.count("passes of 32,768 tokens:\n| device memory | GiB |") == 1
    assert caplog.text.count("device memory") == 1
    module.callback_bytes["drafter, trained"] = 63.5 * GIB
    assert choose_passes(module, candidates(64), 80 * GIB, **alone)[0].micro_batch_tokens == 8192
    module.callback_bytes["drafter, trained"] = 100 * GIB
    with pytest.raises(MisconfigurationException, match=r"An update would take 10\d\.\d GiB"):
        choose_passes(module, candidates(64), 80 * GIB, **alone)


def test_passes_of_a_mixture_of_experts_are_the_smallest(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    module = make_module(save_architecture("qwen3_moe", tmp_path))
    passes, _ = choose_passes(module, candidates(9000), 80 * GIB, free=80 * GIB, engine={}, engine_sleeps=True)
    assert passes.micro_batch_tokens == 9000
    assert "a pass has at most 9,000 tokens: experts are chosen by values" in caplog.text


@pytest.mark.parametrize(
    ("device", "free_and_own_gib", "engine", "tokens"),
    [
        ("cpu", (0, 0), VLLMEngine(), 1024),
        ("cuda", (7.5, 0.0), VLLMEngine(gpu_memory_utilization=0.9), 32768),
        ("cuda", (7.5, 0.0), VLLMEngine(kv_cache_gib=6.0, sleep=False), 8192),
        ("cuda", (0.5, 7.0), VLLMEngine(gpu_memory_utilization=0.9), 32768),
        ("cuda", (0.5, 0.0), VLLMEngine(gpu_memory_utilization=0.9), 8192),  # others hold the rest
    ],
)
def test_the_device_of_a_run_has_room_for_a_size(
    device: str,
    free_and_own_gib: tuple[float, float],
    engine: VLLMEngine,
    tokens: int,
    policy_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, own = free_and_own_gib
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: own * GIB)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(
        strategy=strategy,
        precision="bf16-mixed",
        lightning_module=make_module(policy_path, gradient_checkpointing=True),
    )
    sizes = pass_sizes(None, 64, on_gpu=device == "cuda")
    assert choose_on_device(trainer, engine, sizes, longest=64, max_model_len=64) == tokens
