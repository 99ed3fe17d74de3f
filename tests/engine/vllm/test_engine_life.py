"""The vLLM engine between rollouts: what is refused, and what an error leaves behind."""

import copy
import logging
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.support.speculation_engines import MAX_MODEL_LEN, engine_of, siblings, write
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.planned_memory import BLOCK, planned_memory
from tlt_lightning.engine.vllm import internals
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Sampling


@pytest.fixture(scope="module")
def engine(policy_path: str) -> Iterator[VLLMEngine]:
    with engine_of(policy_path, None) as engine:
        yield engine


@pytest.fixture
def policy(engine: VLLMEngine, policy_path: str) -> torch.nn.Module:
    """The saved policy, pushed into the engine as version 0."""
    model = load_policy(policy_path)
    engine.update_weights(PolicyWeights(model), 0)
    return model


@pytest.mark.vllm
def test_an_engine_that_failed_to_start_leaves_sleep_mode_to_the_next(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator()  # there is none on a CPU, where no engine with sleep mode starts
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: allocator)
    monkeypatch.setattr(VLLMEngine, "_can_sleep", True)
    for _ in range(2):
        with pytest.raises(ValueError, match="Sleep mode is not supported"):
            VLLMEngine(kv_cache_gib=0.0625).setup(policy_path, max_model_len=MAX_MODEL_LEN, seed=0)


@pytest.mark.vllm
def test_a_policy_is_looked_at_in_this_process_where_vllm_has_cached_nothing(
    policy_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.engine.llm_engine import LLMEngine

    started = Mock(wraps=subprocess.run)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry.subprocess, "run", started)
    monkeypatch.setattr(LLMEngine, "from_vllm_config", lambda config, disable_log_stats: config)
    registry._try_inspect_model_cls.cache_clear()
    with ExitStack() as undone:
        internals.start(EngineArgs(policy_path, dtype="float32"), undone, keep_process_group=True)
    assert list((tmp_path / "modelinfos").iterdir())
    assert registry._SUBPROCESS_COMMAND not in [call.args[0] for call in started.call_args_list]


@pytest.mark.vllm
def test_vllm_warns_of_nothing_that_new_weights_leave_as_it_is(
    engine: VLLMEngine, policy_path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("vllm.model_executor")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    with caplog.at_level("WARNING", logger.name):
        engine.update_weights(PolicyWeights(load_policy(policy_path)), 0)
    assert caplog.messages == []


@pytest.mark.vllm
def test_vllm_copies_no_parameters_of_requests(
    engine: VLLMEngine, policy: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    deepcopy = Mock(side_effect=copy.deepcopy)
    monkeypatch.setattr(copy, "deepcopy", deepcopy)
    write(engine, [Request(0, [5])], Sampling(max_tokens=2))
    assert SamplingParams not in [type(call.args[0]) for call in deepcopy.call_args_list]


class BrokenWeights(PolicyWeights):
    """A stream that is not what it says: it ends early, or one of its tensors has another shape."""

    def __init__(self, model: torch.nn.Module, fault: str) -> None:
        super().__init__(model)
        self.fault = fault

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for number, (name, tensor) in enumerate(super().__iter__()):
            if number == 9 and self.fault == "gone":
                raise OSError("gone")
            yield name, (tensor + 1)[:8] if number == 9 else tensor + 1


@pytest.mark.vllm
@pytest.mark.parametrize(("fault", "error"), [("gone", OSError), ("cut", Exception)])
def test_weights_that_break_off_are_forgotten_and_replaced_by_the_next(
    engine: VLLMEngine, policy: torch.nn.Module, fault: str, error: type[Exception]
) -> None:
    expected = write(engine, siblings())
    for version in (1, 2):
        with pytest.raises(error):
            engine.update_weights(BrokenWeights(policy, fault), version)
        assert engine.policy_version == -1
        with pytest.raises(RuntimeError, match="no current weights"):
            write(engine, siblings())
    engine.update_weights(PolicyWeights(policy), 3)
    assert write(engine, siblings()) == expected


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {}, "got 0 tensors of a policy that has 26.* 26 missing"),
        (lambda weights: dict(list(weights.items())[::2]), r"13 missing \(model\.layers\.0"),
        (
            lambda weights: {**weights, "model.layers.7.mlp.up_proj.weight": torch.ones(1)},
            r"1 unknown \(model\.layers\.7",
        ),
        (
            lambda weights: {**weights, "model.norm.weight": torch.ones(3)},
            r"1 of the wrong shape \(model\.norm\.weight \(3,\) instead of \(64,\)\)",
        ),
        (lambda weights: {f"base_model.{name}": tensor for name, tensor in weights.items()}, "26 missing.*26 unknown"),
    ],
    ids=["none", "half", "unknown", "shape", "prefixed"],
)
def test_weights_that_are_not_the_policys_are_refused_and_change_nothing(
    engine: VLLMEngine, policy: torch.nn.Module, change: Any, message: str
) -> None:
    expected = write(engine, siblings())
    weights = {name: tensor + 1 for name, tensor in PolicyWeights(policy)}
    with pytest.raises(ValueError, match=f"changed nothing: .*{message}" if "got" not in message else message):
        engine.update_weights(change(weights).items(), 1)
    assert engine.policy_version == 0
    assert write(engine, siblings()) == expected


@pytest.mark.vllm
def test_an_update_that_breaks_half_way_ends_what_is_being_written(engine: VLLMEngine, policy: torch.nn.Module) -> None:
    responses = engine.generate(siblings(), Sampling(max_tokens=16), seed=0)
    next(responses)
    with pytest.raises(RuntimeError, match=r"`sleep` found the engine writing.* end `generate`"):
        engine.sleep()
    with pytest.raises(ValueError, match="changed nothing"):
        engine.update_weights([], 1)
    assert next(responses).policy_versions == (0,)
    with pytest.raises(OSError, match="gone"):
        engine.update_weights(BrokenWeights(policy, "gone"), 1)
    with pytest.raises(RuntimeError, match="holds no current weights"):
        list(responses)
    engine.update_weights(PolicyWeights(policy), 1)
    assert engine.policy_version == 1


@pytest.mark.vllm
def test_requests_that_vllm_refuses_leave_nothing_behind(
    engine: VLLMEngine, policy: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine.inspect().engine.add_request
    accepted = iter(range(3))

    def refuse_the_fourth(*args: Any) -> str:
        if next(accepted, None) is None:
            raise ValueError("refused")
        return add(*args)

    monkeypatch.setattr(engine.inspect().engine, "add_request", refuse_the_fourth)
    with pytest.raises(ValueError, match="refused"):
        write(engine, siblings())
    monkeypatch.undo()
    responses = list(engine.generate(siblings()[3:], Sampling(max_tokens=4), seed=0))
    assert sorted(response.request_id for response in responses) == list(range(3, 12))


@pytest.mark.vllm
def test_a_sleeping_engine_refuses_weights(
    engine: VLLMEngine, policy: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_asleep", True)  # a CPU has no sleep
    with pytest.raises(RuntimeError, match=r"`update_weights` found the engine asleep, .* call `wake`"):
        engine.update_weights(PolicyWeights(policy), 1)


@pytest.mark.vllm
def test_ranks_that_are_one_engine_take_weights_between_rollouts_alone(
    engine: VLLMEngine, policy: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert VLLMEngine().updates_running
    monkeypatch.setattr(engine, "updates_running", VLLMEngine(tensor_parallel=2).updates_running)
    responses = engine.generate(siblings(), Sampling(max_tokens=16), seed=0)
    next(responses)
    with pytest.raises(RuntimeError, match=r"writing with `tensor_parallel` .* end `generate`, first"):
        engine.update_weights(PolicyWeights(policy), 1)
    responses.close()
    engine.update_weights(PolicyWeights(policy), 1)


@pytest.mark.vllm
def test_a_second_setup_must_ask_for_the_same(engine: VLLMEngine, policy_path: str) -> None:
    engine.setup(policy_path, max_model_len=MAX_MODEL_LEN, seed=0)
    with pytest.raises(RuntimeError, match=r"asks for .* 64, 0\) .*set up for .* 128, 0\); call `close` first"):
        engine.setup(policy_path, max_model_len=64, seed=0)


@pytest.mark.parametrize(
    "arguments",
    [{"max_num_seqs": 0}, {"gpu_memory_utilization": 1.5}, {"kv_cache_gib": 0}],
    ids=lambda a: next(iter(a)),
)
def test_sizes_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        VLLMEngine(**arguments)


def test_an_engine_that_was_never_set_up_closes() -> None:
    engine = VLLMEngine()
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="call `setup` first"):
        engine.update_weights([], 0)


@pytest.mark.vllm
def test_the_cache_is_as_large_as_planned(engine: VLLMEngine, policy_path: str) -> None:
    planned = planned_memory(VLLMEngine(dtype="float32"), policy_path, max_model_len=MAX_MODEL_LEN, device_bytes=2**40)
    (specs,) = internals.reach(engine.inspect().engine, "engine_core.engine_core.model_executor").get_kv_cache_specs()
    a_token = sum(spec.page_size_bytes / spec.block_size for spec in specs.values())
    num_tokens = 256 * BLOCK * (-(-MAX_MODEL_LEN // BLOCK) + 1)  # of as many requests as an engine has by default
    assert planned["engine, cache"] == num_tokens * a_token
