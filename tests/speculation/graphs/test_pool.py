"""Plans of CUDA graphs: what vLLM would capture, what a selector needs, and a budget."""

import pytest
from jsonargparse import ArgumentParser

from tlt_lightning.speculation import (
    OFF,
    BEGMABSelector,
    BucketedGraphPool,
    CaptureReport,
    CostModelSelector,
    FixedSelector,
    FullGraph,
    FullGraphPool,
    GraphCosts,
    GraphPool,
    Strategy,
    ThresholdSelector,
    arms_by_batch,
)

VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def scheduled(*lengths: int, max_num_requests: int) -> dict[int, tuple[Strategy, ...]]:
    """Arms of an engine that may use any of `lengths` at any batch size."""
    arms = tuple(Strategy(length) if length else OFF for length in lengths)
    return dict.fromkeys(range(1, max_num_requests + 1), arms)


@pytest.mark.parametrize(
    ("lengths", "max_num_requests", "num_target"),
    [((0, 2, 4, 8), 256, 176), ((0, 1, 3, 5, 7), 128, 198), ((0, 2), 127, 59)],
)
def test_full_pool_is_what_vllm_captures(lengths, max_num_requests, num_target):
    # The first two were counted in vLLM 0.32 itself.
    plan = FullGraphPool().plan(scheduled(*lengths, max_num_requests=max_num_requests), VLLM_SIZES)
    assert len(plan.shapes("target")) == len(plan.shapes("drafter_prefill")) == num_target
    assert plan.piecewise == VLLM_SIZES


def test_decode_graphs_of_one_token_serve_every_draft_length():
    arms = scheduled(0, 2, 4, 8, max_num_requests=256)
    assert len(FullGraphPool(fused_decode=False).plan(arms, VLLM_SIZES).shapes("drafter_decode")) == 35
    assert len(FullGraphPool(fused_decode=True).plan(arms, VLLM_SIZES).shapes("drafter_decode")) == 3 * 35


@pytest.mark.parametrize(
    "selector", [CostModelSelector(), BEGMABSelector(), ThresholdSelector(), FixedSelector(5), FixedSelector(0)]
)
@pytest.mark.parametrize("max_num_requests", [1, 7, 100, 256])
def test_bucketed_pool_covers_every_arm_at_every_batch_size_and_nothing_else(selector, max_num_requests):
    arms = arms_by_batch(selector, max_num_requests)
    plan = BucketedGraphPool().plan(arms, VLLM_SIZES)
    used = set()
    for batch, strategies in arms.items():
        for arm in strategies:
            length = arm.num_draft_tokens
            wanted = [("target", length + 1)]
            if not arm.is_off:
                wanted.append(("drafter_prefill", length + 1))
            if length >= 2:
                wanted.append(("drafter_decode", length))
            for kind, tokens in wanted:
                graph = plan.find(kind, batch, tokens)
                assert (graph is not None) == (batch * (length + 1) <= VLLM_SIZES[-1])
                used.add(graph)
    assert used - {None} == set(plan.graphs)


def test_bucketed_pool_captures_less_than_half_of_the_full_one():
    arms = arms_by_batch(CostModelSelector(), 128)
    bucketed = BucketedGraphPool().plan(arms, VLLM_SIZES)
    full = FullGraphPool().plan(arms, VLLM_SIZES)
    assert len(bucketed.graphs) < 0.45 * len(full.graphs)
    assert len(bucketed.piecewise) < 0.25 * len(full.piecewise)
    assert set(bucketed.piecewise) <= set(VLLM_SIZES)
    assert bucketed.piecewise[-1] == 512


def test_batches_are_padded_to_the_smallest_graph():
    plan = BucketedGraphPool().plan(arms_by_batch(FixedSelector(3), 20), VLLM_SIZES)
    assert plan.shapes("target") == [(n, q) for n in (1, 2, 4, 8, 16, 20) for q in (1, 4)]
    assert plan.find("target", 9, 4) == FullGraph("target", 16, 4)
    assert plan.find("target", 17, 4) == FullGraph("target", 20, 4)
    assert plan.find("target", 21, 4) is None
    assert plan.find("target", 9, 3) is None


def test_equal_shapes_of_different_drafters_are_merged_and_look_ups_need_no_drafter_graph():
    def shapes(*drafters):
        selector = CostModelSelector(num_draft_tokens=(1, 3), drafters=drafters)
        plan = BucketedGraphPool().plan(arms_by_batch(selector, 32), VLLM_SIZES)
        return [plan.shapes(kind) for kind in ("target", "drafter_prefill", "drafter_decode")]

    assert shapes("learned", "sibling", "ngram") == shapes("learned")
    assert shapes("mixed") == shapes("learned")
    assert shapes("sibling")[0] == shapes("learned")[0]
    assert shapes("sibling")[1:] == [[], []]


def test_draft_of_one_token_needs_no_decode_graph():
    plan = BucketedGraphPool().plan(arms_by_batch(FixedSelector(1), 8), VLLM_SIZES)
    assert plan.shapes("drafter_prefill")
    assert not plan.shapes("drafter_decode")


def test_budget_is_kept_and_what_it_cost_is_reported():
    arms = arms_by_batch(CostModelSelector(), 128)
    unlimited = BucketedGraphPool().plan(arms, VLLM_SIZES)
    budget = 0.5 * unlimited.mib()
    plan = BucketedGraphPool(budget).plan(arms, VLLM_SIZES)
    assert plan.mib() <= budget
    assert set(plan.graphs) | set(plan.dropped) == set(unlimited.graphs)
    assert not set(plan.graphs) & set(plan.dropped)
    assert FullGraph("target", 128, 1) in plan.graphs  # off is free
    assert plan.find("target", 1, 8)  # the tail keeps its long drafts
    # the last one dropped was needed
    assert BucketedGraphPool(plan.mib() - 0.01).plan(arms, VLLM_SIZES).dropped[: len(plan.dropped)] == plan.dropped


def test_budget_follows_the_measured_costs():
    arms = arms_by_batch(CostModelSelector(), 128)
    costs = GraphCosts(graph_mib=5.0, target_token_mib=0.0, drafter_token_mib=0.0)
    plan = BucketedGraphPool(500.0).plan(arms, VLLM_SIZES, costs)
    assert len(plan.graphs) == 100


def test_budget_below_plain_decoding_is_an_error():
    with pytest.raises(ValueError, match="`memory_budget_mib` is 10, but the graphs of plain decoding"):
        BucketedGraphPool(10).plan(arms_by_batch(CostModelSelector(), 128), VLLM_SIZES)


def test_table_counts_graphs_and_shows_what_capture_cost():
    plan = BucketedGraphPool().plan(arms_by_batch(FixedSelector(3), 8), (1, 2, 4, 8, 16, 32))
    assert plan.table() == (
        "| pass | graphs | dropped | largest | MiB | seconds |\n"
        "|---|---|---|---|---|---|\n"
        "| target | 8 | 0 | 8 x 4 | - | - |\n"
        "| drafter prefill | 4 | 0 | 8 x 4 | - | - |\n"
        "| drafter decode | 4 | 0 | 8 x 3 | - | - |\n"
        "| piecewise | 6 | 0 | 32 tokens | - | - |\n"
        "| all | 22 | 0 |  | - | - |"
    )
    report = CaptureReport(mib={"target": 10.0, "piecewise": 2.5}, seconds={"target": 1.25})
    assert "| target | 8 | 0 | 8 x 4 | 10.0 | 1.2 |" in plan.table(report)
    assert plan.table(report).endswith("| 12.5 | 1.2 |")


def test_incomplete_arms_are_refused():
    with pytest.raises(ValueError, match=r"every batch size from 1 to the largest, got \[2, 3\]"):
        BucketedGraphPool().plan({2: (OFF,), 3: (OFF,)}, VLLM_SIZES)
    with pytest.raises(ValueError, match=r"lacks `OFF` at batch sizes \[2\]"):
        FullGraphPool().plan({1: (OFF,), 2: (Strategy(3),)}, VLLM_SIZES)
    with pytest.raises(ValueError, match="`capture_sizes` must be positive and not empty"):
        FullGraphPool().plan({1: (OFF,)}, ())
    with pytest.raises(ValueError, match="`memory_budget_mib` must be at least 1"):
        BucketedGraphPool(0)


def test_pools_are_made_from_yaml():
    parser = ArgumentParser()
    parser.add_argument("--pool", type=GraphPool)
    config = parser.parse_string("pool: {class_path: BucketedGraphPool, init_args: {memory_budget_mib: 300}}")
    assert parser.instantiate_classes(config).pool.memory_budget_mib == 300
