"""Plans of CUDA graphs: shapes that a selector can reach, and no others."""

import pytest
from jsonargparse import ArgumentParser

from tlt_lightning.speculation import (
    OFF,
    BEGMABSelector,
    BucketedGraphPool,
    CostModelSelector,
    FixedSelector,
    FullGraph,
    GraphPool,
    Strategy,
    ThresholdSelector,
    arms_by_batch,
)

VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


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


def test_batches_are_padded_to_the_smallest_graph():
    plan = BucketedGraphPool().plan(arms_by_batch(FixedSelector(3), 20), VLLM_SIZES)
    assert plan.shapes("target") == [(n, q) for n in (1, 2, 4, 8, 16, 20) for q in (1, 4)]
    assert plan.find("target", 9, 4) == FullGraph("target", 16, 4)
    assert plan.find("target", 17, 4) == FullGraph("target", 20, 4)
    assert plan.find("target", 21, 4) is None
    assert plan.find("target", 9, 3) is None
    assert plan.piecewise == (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
    assert BucketedGraphPool().plan(arms_by_batch(FixedSelector(3), 20), (1, 2, 4, 8)).piecewise == (8,)


def test_a_pass_has_the_tokens_of_all_its_requests() -> None:
    assert [FullGraph(kind, 8, 3).num_tokens for kind in ("target", "drafter_prefill", "drafter_decode")] == [24, 24, 8]


def test_equal_shapes_of_different_drafters_are_merged_and_look_ups_without_a_head_need_no_drafter_graph():
    def shapes(*drafters):
        selector = CostModelSelector(num_draft_tokens=(1, 3), drafters=drafters)
        plan = BucketedGraphPool().plan(arms_by_batch(selector, 32), VLLM_SIZES)
        return [plan.shapes(kind) for kind in ("target", "drafter_prefill", "drafter_decode")]

    assert shapes("learned", "sibling", "ngram") == shapes("learned")
    assert shapes("mixed") == shapes("learned")
    assert shapes("sibling")[0] == shapes("learned")[0]
    assert shapes("sibling")[1:] == [[], []]


def test_look_ups_beside_a_head_have_the_graphs_of_its_first_pass():
    arms = (OFF, Strategy(2), Strategy(4, "sibling"))
    plan = BucketedGraphPool().plan(dict.fromkeys(range(1, 9), arms), VLLM_SIZES)
    assert plan.find("drafter_prefill", 8, 5)
    assert {length for _, length in plan.shapes("drafter_prefill")} == {3, 5}
    assert {length for _, length in plan.shapes("drafter_decode")} == {2}


def test_draft_of_one_token_needs_no_decode_graph():
    plan = BucketedGraphPool().plan(arms_by_batch(FixedSelector(1), 8), VLLM_SIZES)
    assert plan.shapes("drafter_prefill")
    assert not plan.shapes("drafter_decode")


def test_table_counts_graphs_and_shows_what_capture_cost():
    plan = BucketedGraphPool().plan(arms_by_batch(FixedSelector(3), 8), (1, 2, 4, 8, 16, 32))
    assert plan.table({}, {}) == (
        "| pass | graphs | largest | MiB | seconds |\n"
        "|---|---|---|---|---|\n"
        "| target | 8 | 8 x 4 | - | - |\n"
        "| drafter prefill | 4 | 8 x 4 | - | - |\n"
        "| drafter decode | 4 | 8 x 3 | - | - |\n"
        "| piecewise | 6 | 32 tokens | - | - |\n"
        "| all | 22 |  | - | - |"
    )
    table = plan.table(mib={"target": 10.0, "piecewise": 2.5}, seconds={"target": 1.25})
    assert "| target | 8 | 8 x 4 | 10.0 | 1.2 |" in table
    assert table.endswith("| 12.5 | 1.2 |")


def test_pools_are_made_from_yaml():
    parser = ArgumentParser()
    parser.add_argument("--pool", type=GraphPool)
    config = parser.parse_string("pool: BucketedGraphPool")
    assert isinstance(parser.instantiate_classes(config).pool, BucketedGraphPool)
