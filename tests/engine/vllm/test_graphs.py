"""Graphs by plan in vLLM's own managers, with nothing captured."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.full_graph_pool import FullGraphPool
from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.engine.vllm.graphs import PlannedGraphs, release_graphs
from tlt_lightning.engine.vllm.patches.drafter_first_pass import keep_first_pass_with_target
from tlt_lightning.speculation import BucketedGraphPool, arms_by_batch
from tlt_lightning.speculation.graph_plan import FullGraph, GraphPlan, GraphPool
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy


class TwoSpeedSelector(ScriptedSelector):
    """Up to 8 requests 7 or 3 drafts, up to 32 3, beyond none."""

    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        longest = 7 if batch_size <= 8 else 3 if batch_size <= 32 else 0
        return (OFF, *(Strategy(k) for k in (3, 7) if k <= longest))

    def select(self, state: SelectorState) -> Strategy:
        return self.arms(state.batch_size)[-1]


CAPTURE_SIZES = [1, 2, 4, *range(8, 129, 8), 256, 512]


def managers(pool: Any) -> tuple[PlannedGraphs, dict[str, Any]]:
    """vLLM's three graph managers, filled but with nothing captured."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

    graphs = PlannedGraphs(pool, arms_by_batch(TwoSpeedSelector(), 64))
    made = {}
    for kind, owner, mode, query_length in [
        ("target", ModelCudaGraphManager, CUDAGraphMode.FULL_AND_PIECEWISE, 8),
        ("drafter_prefill", SpeculatorCudaGraphManager, CUDAGraphMode.FULL_AND_PIECEWISE, 8),
        ("drafter_decode", SpeculatorCudaGraphManager, CUDAGraphMode.FULL_DECODE_ONLY, 1),
    ]:
        manager = owner.__new__(owner)
        manager.cudagraph_mode, manager.decode_query_len = mode, query_length
        manager.compilation_config = SimpleNamespace(cudagraph_capture_sizes=CAPTURE_SIZES)
        manager._candidates, manager._capture_descs, manager._lora_dispatch_map = {}, {}, {}
        graphs.fill(manager)
        manager.graphs = {desc: None for descs in manager._capture_descs.values() for desc in descs}
        manager._graphs_captured = True
        made[kind] = manager
    return graphs, made


def runner_with(made: dict[str, Any]) -> Any:
    """A V2 runner's outline around the three managers."""
    speculator = SimpleNamespace(
        supports_decode_metadata_update=True,
        prefill_cudagraph_manager=made["drafter_prefill"],
        decode_cudagraph_manager=made["drafter_decode"],
        attn_groups=[],
    )
    return SimpleNamespace(speculator=speculator, cudagraph_manager=made["target"], attn_groups=[])


@pytest.mark.vllm
@pytest.mark.parametrize("pool", [BucketedGraphPool(), FullGraphPool()])
def test_vllm_finds_a_full_graph_for_every_shape_a_selector_can_reach(pool: Any) -> None:
    graphs, made = managers(pool)
    assert graphs.plan is not None
    for batch_size, arms in graphs.arms.items():
        for arm in arms:
            length = arm.num_draft_tokens + 1
            if batch_size * length > 512:
                continue
            desc = made["target"].dispatch(batch_size, batch_size * length, length, 0)
            assert desc.cg_mode.name == "FULL"
            assert desc.uniform_token_count == length
            assert desc.num_reqs >= batch_size
            if not arm.is_off:
                prefill = made["drafter_prefill"].dispatch(batch_size, desc.num_tokens, length, 0)
                assert (prefill.cg_mode.name, prefill.num_reqs) == ("FULL", desc.num_reqs)
                base = made["drafter_decode"].dispatch(batch_size, batch_size, 1, 0)
                fused = graphs.specialize(made["drafter_decode"], base, arm.num_draft_tokens)
                assert fused in made["drafter_decode"].graphs
                assert (fused.num_speculative_tokens, fused.num_reqs >= batch_size) == (arm.num_draft_tokens, True)


@pytest.mark.vllm
def test_shapes_outside_the_plan_run_without_a_full_graph() -> None:
    graphs, made = managers(BucketedGraphPool())
    assert made["target"].dispatch(40, 160, 4, 0).cg_mode.name == "PIECEWISE"  # 3 drafts for more than 32 requests
    assert made["target"].dispatch(3, 77, None, 0).cg_mode.name == "PIECEWISE"  # a prompt
    assert made["target"].dispatch(1, 600, None, 0).cg_mode.name == "NONE"
    base = made["drafter_decode"].dispatch(20, 20, 1, 0)
    assert graphs.specialize(made["drafter_decode"], base, 7).cg_mode.name == "NONE"  # 7 drafts for more than 8


@pytest.mark.vllm
def test_buckets_need_far_fewer_graphs() -> None:
    counts = []
    for pool in (FullGraphPool(), BucketedGraphPool()):
        _, made = managers(pool)
        counts.append(sum(len(manager.graphs) for manager in made.values()))
        for manager in made.values():
            for descs in manager._capture_descs.values():
                tokens = [desc.num_tokens for desc in descs]
                assert tokens == sorted(tokens, reverse=True)
                assert len(set(descs)) == len(descs)
    assert counts[1] < 0.6 * counts[0]


@pytest.mark.vllm
def test_misses_are_counted() -> None:
    graphs, made = managers(BucketedGraphPool())
    runner = runner_with(made)
    graphs.attach(runner)
    for length in (4, 4, 4, 5):
        made["target"].dispatch(4, 4 * length, length, 0)
    made["target"].dispatch(4, 50, None, 0)
    assert graphs.hits == {"target_full": 3, "target_piecewise": 1}
    assert graphs.hit_share() == 0.75
    runner.speculator.supports_decode_metadata_update = False
    with pytest.raises(RuntimeError, match="all tokens of a step in one graph"):
        graphs.attach(runner)


class GivenPlan(GraphPool):
    """The same graphs whatever can be chosen."""

    def __init__(self, *graphs: FullGraph) -> None:
        self.given = GraphPlan(tuple(sorted(graphs)), (8, 16, 32, 64, 128))

    def plan(self, arms: Any, capture_sizes: Any) -> GraphPlan:
        return self.given


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("graphs_of_target", "batch_size", "expected"),
    [
        ([8, 16], 6, ("PIECEWISE", 32)),  # padded to 8, for which the drafter has no graph: not the one of 16
        ([8], 12, ("PIECEWISE", 64)),  # piecewise and not padded at all
        ([8, 16], 12, ("FULL", 64)),
    ],
)
def test_the_drafters_first_pass_takes_no_full_graph_but_the_targets(
    graphs_of_target: list[int], batch_size: int, expected: tuple[str, int]
) -> None:
    plan = GivenPlan(FullGraph("drafter_prefill", 16, 4), *(FullGraph("target", n, 4) for n in graphs_of_target))
    graphs, made = managers(plan)
    runner = runner_with(made)
    keep_first_pass_with_target(runner)  # as `drafter_first_pass` does before
    graphs.attach(runner)
    desc = made["target"].dispatch(batch_size, 4 * batch_size, 4, 0)
    prefill = made["drafter_prefill"].dispatch(batch_size, desc.num_tokens, 4, 0)
    assert (prefill.cg_mode.name, prefill.num_tokens) == expected
    counted = [name for name in graphs.hits if name.startswith("drafter_prefill")]
    assert counted == [f"drafter_prefill_{expected[0].lower()}"]


def test_a_manager_without_graphs_stays_empty() -> None:
    graphs = PlannedGraphs(BucketedGraphPool(), arms_by_batch(TwoSpeedSelector(), 8))
    manager = SimpleNamespace(cudagraph_mode=0, compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1]))
    graphs.fill(manager)
    assert graphs.plan is None


@pytest.mark.vllm
def test_no_graph_of_target_or_drafter_outlives_its_runner() -> None:
    """A communicator of NCCL, which they hold, would not end."""
    _, made = managers(BucketedGraphPool())
    for manager in made.values():
        manager.graphs, manager.breakable_cg_runner = {"a description": "a graph"}, None
    drafting = {f"{kind}_cudagraph_manager": made[kind] for kind in made.keys() - {"target"}}
    release_graphs(SimpleNamespace(cudagraph_manager=made["target"], speculator=SimpleNamespace(**drafting)))
    assert [manager.graphs for manager in made.values()] == [{}, {}, {}]
