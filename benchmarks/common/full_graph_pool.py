"""Plan the graphs that vLLM itself would capture, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from tlt_lightning.speculation import FullGraph, GraphPlan, GraphPool
from tlt_lightning.speculation.graph_plan import Arms


class FullGraphPool(GraphPool):
    """Plans each draft length at each batch size, as vLLM itself would capture them."""

    limits_splits = False

    @override
    def plan(self, arms: Arms, capture_sizes: Sequence[int]) -> GraphPlan:
        most, sizes = max(arms), sorted(capture_sizes)
        lengths = {arm.num_draft_tokens for strategies in arms.values() for arm in strategies}
        is_drafted = any(arm.is_learned for strategies in arms.values() for arm in strategies)
        max_tokens = min(sizes[-1], most * (max(lengths) + 1))
        graphs = set()
        for length in lengths:
            for size in sizes:
                # vLLM takes its sizes as tokens and rounds them up to whole requests.
                num_requests = -(-size // (length + 1))
                if num_requests <= most and num_requests * (length + 1) <= max_tokens:
                    graphs.add(FullGraph("target", num_requests, length + 1))
                    if is_drafted:
                        graphs.add(FullGraph("drafter_prefill", num_requests, length + 1))
                if is_drafted and length >= 2 and size <= most:
                    graphs.add(FullGraph("drafter_decode", size, length))
        return GraphPlan(tuple(sorted(graphs)), tuple(sizes))
