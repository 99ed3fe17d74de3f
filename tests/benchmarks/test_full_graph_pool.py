"""`FullGraphPool` against vLLM's own list of graphs, so that what a plan saves is counted from the truth."""

from types import SimpleNamespace

import pytest

from benchmarks.common.full_graph_pool import FullGraphPool
from tlt_lightning.speculation import OFF, BucketedGraphPool, CostModelSelector, Strategy, arms_by_batch


@pytest.mark.vllm
@pytest.mark.oracle
@pytest.mark.parametrize(("lengths", "max_num_requests"), [((0, 2, 4, 8), 256), ((0, 1, 3, 5, 7), 128), ((0, 3), 100)])
def test_full_pool_is_the_list_of_vllm_itself(lengths, max_num_requests):
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    arms = tuple(Strategy(length) if length else OFF for length in lengths)
    plan = FullGraphPool().plan(dict.fromkeys(range(1, max_num_requests + 1), arms), sizes)

    def captured(decode_query_len: int) -> list[tuple[int, int]]:
        schedule = [(index + 1, index + 1, length) for index, length in enumerate(lengths)]
        manager = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            decode_query_len=decode_query_len,
            max_num_reqs=max_num_requests,
            varlen_decode=False,
            lora_capture_cases=[0],
            ubatch_runner=None,
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=sizes,
                max_cudagraph_capture_size=min(sizes[-1], 2 * max_num_requests * (max(lengths) + 1)),
            ),
            vllm_config=SimpleNamespace(
                num_speculative_tokens=max(lengths),
                cache_config=SimpleNamespace(use_kda_recoverssm=False),
                speculative_config=SimpleNamespace(
                    uses_dynamic_speculative_decoding=lambda: True,
                    num_speculative_tokens_per_batch_size=schedule,
                ),
            ),
            _capture_descs={},
            _candidates={},
            _maybe_ubatch_twin=lambda desc: None,
        )
        CudaGraphManager._init_candidates(manager)
        assert tuple(sorted(d.num_tokens for d in manager._capture_descs[CUDAGraphMode.PIECEWISE])) == plan.piecewise
        return sorted((d.num_reqs, d.uniform_token_count) for d in manager._capture_descs[CUDAGraphMode.FULL])

    assert captured(max(lengths) + 1) == plan.shapes("target") == plan.shapes("drafter_prefill")
    fused = {length for length in lengths if length >= 2}  # vLLM captures each decode shape for each of these
    decode = [(num_requests, length) for num_requests, _ in captured(1) for length in sorted(fused)]
    assert decode == plan.shapes("drafter_decode")


def test_bucketed_pool_captures_less_than_half_of_the_full_one():
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    arms = arms_by_batch(CostModelSelector(), 128)
    bucketed, full = BucketedGraphPool().plan(arms, sizes), FullGraphPool().plan(arms, sizes)
    assert len(bucketed.graphs) < 0.45 * len(full.graphs)
    assert len(bucketed.piecewise) < 0.25 * len(full.piecewise)
    assert set(bucketed.piecewise) <= set(sizes)
    assert bucketed.piecewise[-1] == 512
