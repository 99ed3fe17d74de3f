"""Faults of vLLM: still there without their repairs, gone with them, back when these are undone.

Once a release has mended a fault, a test here fails: drop the repair.
"""

import ctypes
import importlib
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.architectures import save_architecture
from tests.support.speculation_engines import PROMPTS, greedy_gap
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm import engine as engine_module
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.patches import (
    PATCHES,
    asleep_free,
    cpu_compiled,
    cpu_experts,
    cpu_temperatures,
    cpu_tied_head,
    cublas_workspaces,
    finite_drafts,
    patched,
    shared_device,
)
from tlt_lightning.engine.vllm.patches.finite_drafts import finite
from tlt_lightning.engine.vllm.patches.flash_splits import useful_splits
from tlt_lightning.engine.vllm.patches.patch import Patch
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Sampling


def named(patch: Patch) -> str:
    return next(iter(patch.around)).rpartition(".")[2]


@pytest.fixture
def cpu_build() -> None:
    if not internals.is_cpu_build():
        pytest.skip("a fault of the CPU build")


@pytest.mark.vllm
def test_vllm_loses_the_temperatures_of_drafts_and_the_repair_does_not(cpu_build: None) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    current_platform.import_kernels()  # as an engine does when it starts
    current_platform.register_triton_kernel_overrides()
    expanded = torch.full((5,), float("nan"))  # what the kernel must overwrite
    values, ends = torch.tensor([0.7, 1.0, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    wanted = torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0])
    rejection_sampler._expand(expanded, values, ends, 0, 1)
    assert not torch.equal(expanded, wanted)
    with cpu_temperatures.PATCH.applied():
        assert torch.equal(rejection_sampler.expand_batch_to_tokens(values, ends, 5, 0, 1), wanted)
        ks = rejection_sampler.expand_batch_to_tokens(torch.tensor([3, 9, 4], dtype=torch.int32), ends, 5)
        assert torch.equal(ks, torch.tensor([3, 3, 4, 4, 4], dtype=torch.int32))


@pytest.mark.vllm
def test_vllm_compiles_what_takes_microseconds_and_the_repair_does_not(cpu_build: None) -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs
    from vllm.v1.worker import gpu_model_runner

    def call_all() -> Iterator[Callable[[], Any]]:
        for module in (logprobs, sampler):
            yield partial(module.batched_count_greater_than, torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0]]))
        yield partial(vocab_parallel_embedding.get_masked_input_and_mask, torch.tensor([5, 12]), 8, 16, 0, 16, 16)
        numbers = [torch.tensor([each]) for each in (0, 0, 2, 3, 9)]
        yield partial(gpu_model_runner.update_num_computed_tokens_for_batch_change, counts, *numbers)

    counts = torch.tensor([4])
    with torch.compiler.set_stance("fail_on_recompile"):
        with cpu_compiled.PATCH.applied():
            rank, same, (masked, _), _ = [call() for call in call_all()]
        assert (rank.tolist(), same.tolist(), masked.tolist()) == ([2], [2], [0, 4])
        assert counts.tolist() == [6]
        for call in call_all():
            with pytest.raises(RuntimeError):
                call()


@pytest.mark.vllm
def test_vllm_fails_under_top_k_without_drafts(cpu_build: None) -> None:
    """A V1 runner samples plainly where nothing was drafted for more than speed's sake."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    with pytest.raises((RuntimeError, IndexError)):
        apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)


@pytest.mark.vllm
def test_a_reload_without_repairs_leaves_tied_heads_and_experts_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_build: None
) -> None:
    repairs = (cpu_tied_head.PATCH, cpu_experts.PATCH)
    monkeypatch.setattr(engine_module, "patched", lambda without: patched(without=(*without, *repairs)))
    path = save_architecture("qwen3_moe", tmp_path / "a", tie_word_embeddings=True)
    other = save_architecture("qwen3_moe", tmp_path / "b", seed=1, tie_word_embeddings=True)
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625, max_num_seqs=4, enforce_eager=True)
    engine.setup(path, max_model_len=64, seed=0)

    def gap_after_sync(*patches: Patch) -> float:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch.applied())
            engine.update_weights(PolicyWeights(load_policy(other)), 0)
        requests = [Request(id=i, prompt_ids=prompt, group=i) for i, prompt in enumerate(PROMPTS)]
        responses = {r.request_id: list(r.token_ids) for r in engine.generate(requests, greedy, seed=0)}
        return greedy_gap(other, PROMPTS, [responses[i] for i in range(len(PROMPTS))])

    greedy = Sampling(max_tokens=12, temperature=0)
    try:
        assert gap_after_sync(cpu_experts.PATCH) > 0.1
        assert gap_after_sync(cpu_tied_head.PATCH) > 0.1
        assert gap_after_sync(*repairs) < 1e-3
    finally:
        engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize("patch", PATCHES, ids=named)
def test_undoing_puts_back_what_was_replaced(patch: Patch) -> None:
    usual = {place: resolve_name(place) for place in patch.around}
    with ExitStack() as undone:
        undone.enter_context(patch.applied())
        assert usual
        assert all(resolve_name(place) is not old for place, old in usual.items())
    assert all(resolve_name(place) is old for place, old in usual.items())


def test_a_repair_that_no_longer_fits_says_so() -> None:
    patch = Patch(why="", versions="", around={f"{internals.__name__}.gone.there": lambda usual: None})
    with pytest.raises(RuntimeError, match=r"'gone'.*supports vLLM >=0\.32\.0"), patch.applied():
        pass


def test_every_patch_says_why_and_for_which_vllm() -> None:
    assert all(len(patch.why) > 40 and "0.32" in patch.versions for patch in PATCHES)


def test_workspaces_are_dropped_right_before_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("dropped"), raising=False)
    monkeypatch.setattr(torch.cuda.graph, "__enter__", lambda graph: done.append("captures"))
    with ExitStack() as undone:
        undone.enter_context(cublas_workspaces.PATCH.applied())
        for _ in range(2):
            torch.cuda.graph.__enter__(object.__new__(torch.cuda.graph))
    assert done == ["dropped", "captures"] * 2


@pytest.mark.vllm
@pytest.mark.parametrize("free", [2**30, 2**24])
def test_what_sleeps_is_mapped_alone_before_it_is_freed(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The order of calls alone: no CPU has such memory; tests/engine/vllm/test_gpu.py closes a sleeping engine."""
    from vllm.device_allocator import AllocationData, cumem

    mapped: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**36))
    monkeypatch.setattr(cumem, "create_and_map", mapped.append)
    monkeypatch.setattr(asleep_free, "_map_to_one_piece", lambda handle: mapped.append(("one piece", handle)))
    with ExitStack() as undone:  # as `close` undoes it, before what it held is collected
        undone.enter_context(asleep_free.PATCH.applied())
        allocator = cumem.CuMemAllocator()
    handles = {pointer: (0, 2**21, pointer, 7) for pointer in (1, 2)}
    for pointer, handle in handles.items():
        allocator.pointer_to_data[pointer] = AllocationData(handle, "weights", is_asleep=pointer == 2)
    assert [allocator.python_free_callback(pointer) for pointer in handles] == list(handles.values())
    assert mapped == [handles[2] if free == 2**30 else ("one piece", handles[2])]


def test_all_addresses_are_mapped_to_one_piece_where_the_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made, mapped, kept = [], [], ctypes.c_uint64()

    def create(piece: Any, size: Any, kind: Any, flags: Any) -> int:
        made.append((size.value, struct.unpack("4i2Q", kind.raw)))
        piece._obj.value = 77
        return 0

    def map_(address: Any, size: Any, offset: Any, piece: Any, flags: Any) -> int:
        mapped.append((address.value, size.value, offset.value, piece.value))
        return 0 if len(mapped) < 4 else 2

    driver = SimpleNamespace(cuMemCreate=create, cuMemMap=map_)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    piece, size = asleep_free.PIECE, 2 * asleep_free.PIECE + 2**21
    asleep_free._map_to_one_piece((3, size, 2**40, ctypes.addressof(kept)))
    assert made == [(piece, (1, 0, 1, 3, 0, 0))]
    assert mapped == [(2**40 + n * piece, min(piece, size - n * piece), 0, 77) for n in range(3)]
    assert kept.value == 77  # what vLLM releases when it has unmapped them
    with pytest.raises(RuntimeError, match="driver error 2"):
        asleep_free._map_to_one_piece((3, size, 2**40, ctypes.addressof(kept)))


@pytest.mark.gpu
def test_a_graph_keeps_its_workspace_when_the_others_are_freed() -> None:
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    a, b = torch.randn(16, 8192, device="cuda"), torch.randn(8192, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with cublas_workspaces.PATCH.applied():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wanted = a @ b  # the rehearsal, which makes a workspace of the stream
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            got = a @ b

    torch._C._cuda_clearCublasWorkspaces()  # as Lightning does
    torch.cuda.empty_cache()
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(pool)]
    assert sum(each["total_size"] for each in segments) >= 4 * 2**20  # the product alone takes 2 MiB
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_drafts_from_finite_numbers_at_every_temperature(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[2.5, -1.0, 3.0, -inf], [inf, 0.0, 1.0, -inf], [nan, nan, nan, nan], [6e4, 1.0, -6e4, nan]]
    logits = torch.tensor(rows, dtype=dtype)
    healthy = logits[0].softmax(-1)
    found = finite(logits)
    assert found is logits
    assert torch.equal(found[0].softmax(-1), healthy)
    for temperature in (0.01, 0.7, 2.0):
        drafts = (found / temperature).softmax(-1, dtype=torch.float32)
        torch.testing.assert_close(drafts.sum(-1), torch.ones(4))
    assert finite(None) is None


@pytest.mark.vllm
def test_a_head_computes_its_logits_through_the_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    monkeypatch.setattr(Eagle3LlamaForCausalLM, "compute_logits", lambda head, states: states / 0)
    head = object.__new__(Eagle3LlamaForCausalLM)
    assert not Eagle3LlamaForCausalLM.compute_logits(head, torch.ones(2)).isfinite().any()
    with finite_drafts.PATCH.applied():
        assert Eagle3LlamaForCausalLM.compute_logits(head, torch.ones(2)).isfinite().all()


def test_splits_shrink_with_the_batch() -> None:
    assert [useful_splits(requests, 4, 132) for requests in (1, 4, 8, 16, 32, 128)] == [66, 17, 9, 5, 4, 4]


def test_a_second_engine_that_can_sleep_beside_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asleep_free, "_lives", None)
    asleep_free.claim_sleep_mode()
    with pytest.raises(RuntimeError, match="sleep: false"):
        asleep_free.claim_sleep_mode()


@pytest.mark.vllm
def test_a_module_that_makes_a_tensor_is_imported_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "compressed_tensors.compressors.nvfp4.helpers"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(asleep_free, "_lives", None)
    with torch.device("meta"):
        asleep_free.claim_sleep_mode()
    tensors = [each for each in vars(sys.modules[name]).values() if isinstance(each, torch.Tensor)]
    assert [each.device.type for each in tensors] == ["cpu"]


@pytest.mark.vllm
def test_memory_that_a_closed_engine_still_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import AllocationData, cumem

    allocator = cumem.CuMemAllocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: allocator)
    monkeypatch.setattr(asleep_free, "_lives", None)
    allocator.pointer_to_data[7] = AllocationData((0, 2**21, 7, 7), "kv_cache")
    asleep_free.release_sleep_mode()
    with pytest.raises(RuntimeError, match=r"still holds 2\.0 MiB in this process"):
        asleep_free.claim_sleep_mode()


@pytest.mark.vllm
def test_an_engine_falls_asleep_while_another_program_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.v1.worker.gpu_worker import Worker

    data = AllocationData((0, 2**21, 7, 7), "weights")
    monkeypatch.setattr(CuMemAllocator, "get_instance", lambda: SimpleNamespace(pointer_to_data={7: data}))

    class Shared:  # the parts of a worker that fall asleep
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))

        def __init__(self, fault: str = "") -> None:
            self.slept, self.fault = list[int](), fault
            self.sleep_mode_backend = SimpleNamespace(suspend=self.suspend)

        def suspend(self, level: int) -> None:
            self.slept.append(level)
            data.is_asleep = not self.fault
            if self.fault:
                raise AssertionError(self.fault)

    free = iter(range(100, 0, -1))
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)
    monkeypatch.setattr("torch.accelerator.get_memory_info", lambda: (next(free), 1000))
    with pytest.raises(AssertionError, match="Memory usage increased"):
        Worker.sleep(Shared())  # type: ignore[arg-type]
    with shared_device.PATCH.applied():
        worker: Any = Shared()
        Worker.sleep(worker, 1)
        assert worker.slept == [1]
        with pytest.raises(AssertionError):
            Worker.sleep(Shared("Memory usage increased after sleeping."))  # type: ignore[arg-type] - still awake
