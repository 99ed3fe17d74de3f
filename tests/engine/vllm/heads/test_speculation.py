"""A live engine with a head: off skips the head, on catches up, new weights arrive, a dead head is switched off."""

import json
import logging
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.drafters.held_weights import different_weights
from tests.support.speculation_engines import (
    GREEDY,
    PROMPTS,
    ScriptedSelector,
    engine_of,
    save_endless_policy,
    save_trained_head,
    siblings,
    write,
)
from tlt_lightning.engine import RolloutProgress, VLLMEngine
from tlt_lightning.engine.vllm.drafter_weights import check_tensors
from tlt_lightning.engine.vllm.kv_catch_up import KVCatchUp
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.speculation import BEGMABSelector, CostModelSelector, FixedSelector, ThresholdSelector
from tlt_lightning.speculation.strategy import OFF, Strategy, StrategySelector

pytestmark = pytest.mark.vllm


class Setup(NamedTuple):
    engine: VLLMEngine
    selector: ScriptedSelector
    policy: str
    trained: dict[str, torch.Tensor]
    random: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    path = tmp_path_factory.mktemp("engine")
    policy = save_endless_policy(path / "policy")
    trained = save_trained_head(policy, path / "trained")
    random = save_head(make_head(policy, seed=5), path / "random")
    selector = ScriptedSelector()
    speculation = Speculation(selector=selector, head=trained, max_draft_tokens=5, steps_per_choice=1)
    with engine_of(policy, speculation) as engine:
        tensors = [load_file(f"{head}/model.safetensors") for head in (trained, random)]
        yield Setup(engine, selector, policy, *tensors)


@pytest.fixture(autouse=True)
def trained_head(setup: Setup) -> None:
    setup.engine.update_drafter(setup.trained.items(), 0)


def runner_of(engine: VLLMEngine) -> Any:
    return engine.inspect().speculative_runner


def stock_drafter(runner: Any) -> Any:
    """vLLM's own drafter, of either model runner."""
    return runner.speculator if hasattr(runner, "speculator") else runner.drafter


def test_off_runs_the_head_over_prompts_alone(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(setup.engine)
    passes = []
    original = runner._propose

    def propose(*args: Any, **inputs: Any) -> torch.Tensor:
        reads_prompts = args[0].has_prefill if args else inputs["common_attn_metadata"].max_query_len > 1
        passes.append(reads_prompts)
        return original(*args, **inputs)

    monkeypatch.setattr(runner, "_propose", propose)
    setup.selector.script = lambda state: OFF
    write(setup.engine, siblings(2))
    assert all(passes)
    assert 1 <= len(passes) <= 3
    assert setup.engine.stats()["speculation/skipped_passes"] >= 60


def test_switched_on_the_head_drafts_as_if_it_had_never_been_off(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    attentive = {name: tensor * (8 if "o_proj" in name else 1) for name, tensor in setup.random.items()}
    setup.engine.update_drafter(attentive.items(), 1)
    runner = runner_of(setup.engine)
    original, drafts = runner._propose, []

    def propose(*args: Any, **inputs: Any) -> torch.Tensor:
        proposed = original(*args, **inputs)
        if inputs["num_speculative_tokens"]:
            drafts.append(proposed[:, : inputs["num_speculative_tokens"]].tolist())
        return proposed

    def run() -> list[list[list[int]]]:
        drafts.clear()
        setup.selector.off_and_on(Strategy(4), steps=9)
        setup.engine.inspect().engine.reset_prefix_cache()
        write(setup.engine, siblings())
        return list(drafts)

    monkeypatch.setattr(runner, "_propose", propose)
    deferred = run()
    with monkeypatch.context() as patch:
        patch.setattr(stock_drafter(runner), "propose", propose)  # vLLM as it is: a pass in every step
        always = run()
    with monkeypatch.context() as patch:
        patch.setattr(KVCatchUp, "flush", lambda catch_up, **inputs: catch_up.clear())
        never = run()
    assert deferred == always
    assert len(always) > 20
    same = [a == b for a, b in zip(always, never, strict=False)]
    assert sum(same) < len(same) / 2


def test_a_long_pause_is_worked_off_in_between(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt_lightning.engine.vllm import kv_catch_up

    written: list[int] = []
    write_keys = kv_catch_up.write_keys
    monkeypatch.setattr(kv_catch_up, "write_keys", lambda *args: written.append(len(args[-1])) or write_keys(*args))
    setup.selector.script = lambda state: OFF
    write(setup.engine, siblings(1))
    assert setup.engine.stats()["speculation/catch_ups"] == len(written) >= 60 // kv_catch_up.MAX_STEPS - 1
    assert max(written) <= kv_catch_up.MAX_STEPS * 4
    assert sum(written) > 100


def test_progress_and_metrics(setup: Setup) -> None:
    setup.selector.script = lambda state: Strategy(3) if state.batch_size <= 6 else OFF
    setup.selector.records.clear()
    seen: list[RolloutProgress] = []
    responses = list(setup.engine.generate(siblings(), GREEDY, seed=0, on_progress=seen.append))
    assert {progress.strategy for progress in seen} == {OFF, Strategy(3)}
    assert seen[0].acceptance_length == 1
    stats = setup.engine.stats()
    assert seen[-1].acceptance_length == pytest.approx(stats["speculation/acceptance_length"], abs=0.2)
    assert 1 < stats["speculation/acceptance_length"] <= 4
    assert 0 < stats["speculation/off_share"] < 1
    assert stats["speculation/k_mean"] == pytest.approx(3 * (1 - stats["speculation/off_share"]))
    rates = [stats[f"speculation/acceptance_rate_pos_{k}"] for k in (1, 2, 3)]
    assert all(a >= b for a, b in pairwise(rates))
    assert "speculation/acceptance_rate_pos_4" not in stats
    assert stats["speculation/tokens_per_s_off"] > 0
    assert stats["speculation/tokens_per_s_learned_3"] > 0
    assert stats["speculation/alarms"] == 0
    assert sum(len(response.token_ids) for response in responses) == seen[-1].tokens


def test_the_selector_hears_of_settled_steps(setup: Setup) -> None:
    setup.selector.script = lambda state: Strategy(3) if state.batch_size <= 6 else OFF
    setup.selector.records.clear()
    started = time.perf_counter()
    write(setup.engine, siblings())
    assert sum(record[-1] for record in setup.selector.records) < time.perf_counter() - started
    for state, strategy, num_emitted, seconds in setup.selector.records:
        assert 0 < len(num_emitted) <= 8
        assert strategy == OFF or max(num_emitted) <= 4
        assert strategy != OFF or set(num_emitted) == {1}
        assert seconds > 0
        assert state.drafter_version == 0
        assert 0 < state.mean_context < 128
    assert {strategy for _, strategy, _, _ in setup.selector.records} == {OFF, Strategy(3)}
    assert setup.engine.state_dict()["selector"] == {"records": len(setup.selector.records)}


@pytest.mark.parametrize(
    "selector",
    [
        FixedSelector(3),
        ThresholdSelector(4, max_running=5, band=1),
        BEGMABSelector(groups=((5, 3), (1,)), thresholds=(1, 5), pull_size=4),
        CostModelSelector(num_draft_tokens=(1, 3, 5)),
    ],
    ids=lambda selector: type(selector).__name__,
)
def test_every_selector_steers_and_learns(
    setup: Setup, selector: StrategySelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.selector.script = lambda state: OFF
    expected = write(setup.engine, siblings())
    monkeypatch.setattr(setup.engine.inspect().controller, "selector", selector)
    found = []
    for _ in range(2):
        assert write(setup.engine, siblings()) == expected
        found.append(setup.engine.stats())
    # What the clock told in the first may switch drafts off in the second, on a busy machine.
    drafted = [stats for stats in found if stats["speculation/k_mean"] > 0]
    assert max(stats["speculation/acceptance_length"] for stats in drafted) > 1.3
    json.dumps(selector.state_dict())


def test_new_weights_of_the_head_arrive_and_the_policy_stays(setup: Setup) -> None:
    setup.selector.script = lambda state: Strategy(4)
    expected = write(setup.engine, siblings())
    trained = setup.engine.stats()["speculation/acceptance_length"]
    runner = setup.engine.inspect().model_runner
    before = {name: tensor.clone() for name, tensor in runner.model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in runner.model.named_parameters()}
    assert different_weights(setup.engine, setup.random.items()) != []
    setup.engine.update_drafter(setup.random.items(), 7)
    assert different_weights(setup.engine, setup.random.items()) == []
    assert write(setup.engine, siblings()) == expected
    stats = setup.engine.stats()
    assert stats["speculation/acceptance_length"] < trained - 0.5
    assert stats["speculation/drafter_version"] == 7
    assert all(torch.equal(tensor, before[name]) for name, tensor in runner.model.state_dict().items())
    assert places == {name: tensor.data_ptr() for name, tensor in runner.model.named_parameters()}


def test_what_sleep_drops_of_the_head_comes_back_as_it_was_last(setup: Setup) -> None:
    parts = setup.engine.inspect()
    head, weights = parts.speculative_runner.head, parts.speculative_runner.weights
    policy = {id(parameter) for parameter in parts.model_runner.model.parameters()}
    own = {name: tensor for name, tensor in head.named_parameters() if id(tensor) not in policy}
    weights.keep()  # of an earlier sleep
    setup.engine.update_drafter(setup.random.items(), 1)
    expected = {name: tensor.clone() for name, tensor in own.items()}
    weights.keep()
    with torch.no_grad():
        for tensor in head.parameters():
            tensor.zero_()
    weights.restore()
    assert sum(tensor.numel() for tensor in expected.values()) > 100
    assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())
    assert all(not tensor.any() for tensor in head.parameters() if id(tensor) in policy)
    setup.engine.update_weights(PolicyWeights(load_policy(setup.policy)), 0)


def test_a_map_to_tokens_has_its_shape() -> None:
    shapes = {"fc.weight": (64, 192), "d2t": (4,), "t2d": (32,), "lm_head.weight": (4, 64)}
    tensors = {"fc.weight": torch.ones(64, 192)}
    for more in ({}, {"d2t": torch.zeros(4)}):
        check_tensors(tensors | more, shapes, shares_head=False)
    with pytest.raises(ValueError, match=r"wrong shape: d2t \(3,\) instead of \(4,\)"):
        check_tensors(tensors | {"d2t": torch.zeros(3)}, shapes, shares_head=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors | {"embed_tokens.weight": torch.zeros(32, 64)},
            "unknown: embed_tokens.weight",
        ),
        (lambda tensors: tensors | {"d2t": torch.zeros(32)}, "unknown: d2t"),
        (lambda tensors: {k: v for k, v in tensors.items() if "k_proj" not in k}, "missing: layers.0.self_attn.k_proj"),
        (lambda tensors: tensors | {"fc.weight": torch.zeros(64, 64)}, r"fc.weight \(64, 64\) instead of \(64, 192\)"),
        (lambda tensors: tensors | {"norm.weight": torch.full((64,), torch.nan)}, "not finite: norm.weight"),
    ],
)
def test_wrong_weights_of_the_head_change_nothing(setup: Setup, change: Any, message: str) -> None:
    setup.selector.script = lambda state: Strategy(4)
    write(setup.engine, siblings(1))
    stats = setup.engine.stats()
    with pytest.raises(ValueError, match=message):
        setup.engine.update_drafter(change(dict(setup.random)).items(), 9)
    write(setup.engine, siblings(1))
    for name in ("speculation/acceptance_length", "speculation/drafter_version"):
        assert setup.engine.stats()[name] == stats[name]


def test_a_dead_head_is_a_warning_a_metric_and_off(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    dead = {name: tensor.clone() for name, tensor in setup.trained.items()}
    dead["lm_head.weight"][:] = 0
    dead["lm_head.weight"][1] = -1e3 * dead["norm.weight"].sign()  # whatever it reads, it says 0 or 1, never written
    setup.engine.update_drafter(dead.items(), 3)
    alarm = setup.engine.inspect().controller.alarm
    setup.selector.script = lambda state: Strategy(5)
    window, alarm.window = alarm.window, 64
    try:
        with caplog.at_level(logging.WARNING):
            write(setup.engine, siblings())
        stats = setup.engine.stats()
        assert "The draft head is switched off" in caplog.text
        assert stats["speculation/alarms"] == 1
        assert stats["speculation/off_share"] > 0.5
        setup.engine.update_drafter(setup.trained.items(), 4)
        write(setup.engine, siblings())
        assert setup.engine.stats()["speculation/off_share"] == 0
    finally:
        alarm.window = window
        alarm.num_rung = 0


def test_new_weights_of_the_policy_are_drafted_for(setup: Setup) -> None:
    policy = load_policy(setup.policy)
    setup.selector.script = lambda state: OFF
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    before = write(setup.engine, siblings(1))
    setup.engine.update_weights(PolicyWeights(policy), 1)
    plain = write(setup.engine, siblings(1))
    setup.selector.at_random(1)
    assert write(setup.engine, siblings(1)) == plain != before
    setup.engine.update_weights(PolicyWeights(load_policy(setup.policy)), 2)
    assert write(setup.engine, siblings(1)) == before


def test_giving_up_in_the_middle_leaves_a_usable_engine(setup: Setup) -> None:
    setup.selector.at_random(2)
    expected = write(setup.engine, siblings())
    stream = setup.engine.generate(siblings(), GREEDY, seed=0)
    next(stream)
    stream.close()
    assert write(setup.engine, siblings()) == expected


def test_without_a_head_there_is_nothing_to_update(setup: Setup) -> None:
    plain = VLLMEngine()
    with pytest.raises(RuntimeError, match=r"the engine has no head, `speculation\.head`"):
        plain.update_drafter(setup.trained.items(), 0)
    assert len(PROMPTS) == 4
