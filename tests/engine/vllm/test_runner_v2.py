"""The parts of the V2 runner's adapter that need no GPU: splicing look-ups into drafts, graphs by plan."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.engine.vllm.graphs import PlannedGraphs, fill_manager, useful_splits
from tlt_lightning.engine.vllm.runner_v2 import Lookup, pack_lookups, splice
from tlt_lightning.engine.vllm.steering import DeviceSteering
from tlt_lightning.speculation import BucketedGraphPool, FullGraphPool, arms_by_batch
from tlt_lightning.speculation.controller import SpeculationControl
from tlt_lightning.speculation.graphs.plan import FullGraph, GraphPlan
from tlt_lightning.speculation.graphs.pool import GraphPool
from tlt_lightning.speculation.lookup import LEARNED, RunningTexts
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy


def spliced(written: list[int], continuation: list[int], learned: list[int]) -> list[int]:
    """Drafts of one request of which the host knows 10 tokens and the device also `written`."""
    packed = torch.from_numpy(pack_lookups(["a"], {"a": Lookup(10, continuation)}))
    seen = [*written, *[-7] * len(continuation)][: len(continuation)]  # beyond `written` the row holds old rubbish
    return splice(torch.tensor([learned]), packed, torch.tensor([seen]), torch.tensor([10 + len(written)]))[0].tolist()


@pytest.mark.parametrize(
    ("written", "continuation", "expected"),
    [
        ([], [5, 6, 7, 8], [5, 6, 7]),
        ([5], [5, 6, 7, 8], [6, 7, 8]),
        ([5, 6], [5, 6, 7, 8], [7, 8, 0]),
        ([5, 9], [5, 6, 7, 8], [0, 0, 0]),
        ([5, 6, 7, 8], [5, 6, 7, 8], [0, 0, 0]),
        ([5, 6, 7, 8, 9], [5, 6, 7, 8], [0, 0, 0]),
        ([4, 6], [5, 6, 7, 8], [0, 0, 0]),
    ],
)
def test_a_look_up_is_taken_where_it_was_right_so_far(
    written: list[int], continuation: list[int], expected: list[int]
) -> None:
    assert spliced(written, continuation, [0, 0, 0]) == expected


def test_requests_without_a_look_up_keep_their_drafts() -> None:
    lookups = {"b": Lookup(4, [1, 2, 3]), "d": Lookup(6, [9])}
    packed = pack_lookups(["a", "b", "c", "d"], lookups)
    assert packed.tolist() == [[0, 0, 0, 0, 0], [4, 3, 1, 2, 3], [0, 0, 0, 0, 0], [6, 1, 9, 0, 0]]
    drafts = torch.full((4, 2), 50)
    written = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    total = torch.tensor([8, 5, 3, 6])
    merged = splice(drafts, torch.from_numpy(packed), written, total)
    assert merged.tolist() == [[50, 50], [2, 3], [50, 50], [9, 50]]


def steering(strategy: Strategy) -> tuple[DeviceSteering, Any]:
    selector = ScriptedSelector(("learned", "sibling"))
    selector.script = lambda state: strategy
    made = DeviceSteering(
        SpeculationControl(selector, steps_per_choice=1), RunningTexts(siblings=True, ngram=False, keeps=False)
    )
    assert made.texts is not None
    made.texts.add("a", [1, 2, 3])
    made.texts.add("b", [1, 2, 3])
    made.texts._texts["a"].tokens += [20, 21, 22, 23, 24, 25, 26]  # type: ignore[operator]
    request = SimpleNamespace(
        num_tokens=4, all_token_ids=[1, 2, 3, 20], num_stale_output_tokens=0, drop_stale_output=False
    )
    scheduler = SimpleNamespace(running=[request], waiting=[], max_num_running_reqs=4, requests={"b": request})
    return made, scheduler


def test_the_host_looks_up_beyond_the_steps_under_way() -> None:
    made, scheduler = steering(Strategy(1, "sibling"))
    assert made.before_schedule(scheduler) == 1
    assert made.look_up(["a", "b"]) == {"b": Lookup(4, [21, 22, 23, 24, 25])}


def test_nothing_is_looked_up_for_the_head_alone_or_while_off() -> None:
    for strategy in (Strategy(2, "learned"), OFF):
        made, scheduler = steering(strategy)
        made.before_schedule(scheduler)
        assert made.look_up(["b"]) == {}
        assert made.texts is not None
        assert made.texts.indices["sibling"].num_tokens == 0


def test_the_device_may_have_kept_a_look_up_or_not_and_the_host_finds_out() -> None:
    for strategy, since, source in [
        (Strategy(2, "sibling"), [21, 22], ("sibling", 4)),
        (Strategy(2, "sibling"), [21, 9], None),
        (Strategy(2, "mixed"), [21, 9], LEARNED),
        (Strategy(2, "mixed"), [], ("sibling", 4)),
    ]:
        made, scheduler = steering(strategy)
        made.before_schedule(scheduler)
        made.look_up(["b"])
        request = scheduler.requests["b"]
        request.all_token_ids = [*request.all_token_ids, *since]
        assert made._source(strategy, made._proposed["b"], request) == source


def test_without_a_proposal_fillers_are_nobodys() -> None:
    made, scheduler = steering(Strategy(2, "sibling"))
    made.before_schedule(scheduler)
    assert made._source(Strategy(2, "sibling"), None, scheduler.requests["b"]) is None
    for drafter in ("learned", "mixed"):
        assert made._source(Strategy(2, drafter), None, scheduler.requests["b"]) == LEARNED


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
    with pytest.raises(RuntimeError, match="fused_decode=True"):
        graphs.attach(runner)


class GivenPlan(GraphPool):
    """The same graphs whatever can be chosen."""

    def __init__(self, *graphs: FullGraph) -> None:
        super().__init__()
        self.given = GraphPlan(tuple(sorted(graphs)), (8, 16, 32, 64, 128))

    def plan(self, arms: Any, capture_sizes: Any, costs: Any = None) -> GraphPlan:
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
    graphs.attach(runner_with(made))
    desc = made["target"].dispatch(batch_size, 4 * batch_size, 4, 0)
    prefill = made["drafter_prefill"].dispatch(batch_size, desc.num_tokens, 4, 0)
    assert (prefill.cg_mode.name, prefill.num_tokens) == expected
    counted = [name for name in graphs.hits if name.startswith("drafter_prefill")]
    assert counted == [f"drafter_prefill_{expected[0].lower()}"]


def test_splits_shrink_with_the_batch() -> None:
    assert [useful_splits(requests, 4, 132) for requests in (1, 4, 8, 16, 32, 128)] == [66, 17, 9, 5, 4, 4]


def test_a_manager_without_graphs_stays_empty() -> None:
    graphs = PlannedGraphs(BucketedGraphPool(), arms_by_batch(TwoSpeedSelector(), 8))
    manager = SimpleNamespace(cudagraph_mode=0, compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1]))
    graphs.fill(manager)
    assert graphs.plan is None
    assert fill_manager
