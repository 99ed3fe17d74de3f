"""vLLM's own choice of graphs for its table of draft lengths, and what we make of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tlt_lightning.engine.vllm.patches.drafter_first_pass import keep_first_pass_with_target

TABLE = [(1, 15, 5), (16, 111, 3), (112, 169, 1), (170, 256, 0)]
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def manager_of_table() -> Any:
    """A graph manager of vLLM's, filled by itself as for an engine with that table; nothing is captured."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: True, num_speculative_tokens_per_batch_size=TABLE
        ),
        num_speculative_tokens=5,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.compilation_config = SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=512)
    manager.cudagraph_mode, manager.decode_query_len = CUDAGraphMode.FULL_AND_PIECEWISE, 6
    manager.max_num_reqs, manager.varlen_decode, manager.lora_capture_cases = 256, False, [0]
    manager._candidates, manager._capture_descs, manager._lora_dispatch_map = {}, {}, {}
    manager._maybe_ubatch_twin = lambda desc: None
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


def mismatched(target: Any, prefill: Any) -> list[tuple[int, int]]:
    """Batch sizes and draft lengths of the table whose first pass takes a full graph of another shape."""
    found = []
    for first, last, num_drafts in TABLE:
        for batch_size in range(first, last + 1):
            length = num_drafts + 1
            desc = target.dispatch(batch_size, batch_size * length, length, 0)
            taken = prefill.dispatch(batch_size, desc.num_tokens, length, 0)
            shapes = [(each.cg_mode, each.num_reqs, each.num_tokens) for each in (desc, taken)]
            if taken.cg_mode.name == "FULL" and shapes[0] != shapes[1]:
                found.append((batch_size, num_drafts))
    return found


@pytest.mark.vllm
def test_vllms_own_table_of_draft_lengths_pairs_graphs_of_different_shapes_and_ours_does_not() -> None:
    target, prefill = manager_of_table(), manager_of_table()
    broken = mismatched(target, prefill)
    assert (153, 1) in broken  # the step that an H200 crashed in
    assert len(broken) == 45
    keep_first_pass_with_target(
        SimpleNamespace(cudagraph_manager=target, speculator=SimpleNamespace(prefill_cudagraph_manager=prefill))
    )
    assert not mismatched(target, prefill)
    same = target.dispatch(160, 320, 2, 0)
    assert (same.cg_mode.name, prefill.dispatch(160, 320, 2, 0)) == ("FULL", same)


@pytest.mark.parametrize("speculator", [None, SimpleNamespace(prefill_cudagraph_manager=None), SimpleNamespace()])
def test_a_runner_without_graphs_of_a_drafter_is_left_alone(speculator: Any) -> None:
    target = SimpleNamespace(dispatch=len)
    keep_first_pass_with_target(SimpleNamespace(cudagraph_manager=target, speculator=speculator))
    assert target.dispatch is len
