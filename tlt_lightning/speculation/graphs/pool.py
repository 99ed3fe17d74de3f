"""Planning which CUDA graphs an engine captures, from the strategies that its selector can choose.

What we do differently from the paper (arXiv 2511.16665, section 5.1): the shapes follow from the selector's arms at
each batch size instead of a second list of buckets, drafts are chains, and there is a memory budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from typing_extensions import override

from tlt_lightning.arguments import check_at_least
from tlt_lightning.speculation.graphs.plan import FullGraph, GraphCosts, GraphPlan, estimate_mib
from tlt_lightning.speculation.strategy import Strategy, StrategySelector

PIECEWISE_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Token counts for batches with a prefill: at most half of a graph is padding, a third where tokens are not free."""

Arms = Mapping[int, Sequence[Strategy]]
"""The strategies a selector can choose at each batch size from 1 up to the largest."""


def arms_by_batch(selector: StrategySelector, max_num_requests: int) -> dict[int, tuple[Strategy, ...]]:
    """What `selector` can choose at each batch size up to `max_num_requests`."""
    return {size: selector.arms(size) for size in range(1, max_num_requests + 1)}


class GraphPool(ABC):
    """Decides which shapes get a CUDA graph.

    Args:
        fused_decode: Whether one drafter graph drafts all tokens of a step (vLLM 0.32), so that every draft length
            needs its own; without it one graph drafts one token and serves every length.
    """

    limits_splits = True
    """Whether a graph splits contexts no further than its requests can use (`patches/flash_splits.py`)."""

    def __init__(self, fused_decode: bool = True) -> None:
        self.fused_decode = fused_decode

    @abstractmethod
    def plan(self, arms: Arms, capture_sizes: Sequence[int], costs: GraphCosts | None = None) -> GraphPlan:
        """Plan the graphs.

        Args:
            arms: The strategies reachable at each batch size from 1 on, `OFF` among them; see `arms_by_batch`.
            capture_sizes: The engine's own capture sizes: token counts, and for plain decoding request counts.
            costs: What graphs cost in memory, if better known than by default.

        Raises:
            ValueError: If a batch size or `OFF` is missing, or a budget cannot hold the graphs of plain decoding.
        """

    def drafter_graphs(self, num_requests: int, num_draft_tokens: int) -> set[FullGraph]:
        """The learned drafter's graphs for drafting `num_draft_tokens` after as many were verified."""
        graphs = {FullGraph("drafter_prefill", num_requests, num_draft_tokens + 1)}
        if num_draft_tokens >= 2:
            graphs.add(FullGraph("drafter_decode", num_requests, num_draft_tokens if self.fused_decode else 0))
        return graphs


class FullGraphPool(GraphPool):
    """Every shape that vLLM itself would capture for the same draft lengths: each length at each batch size.

    Example:
        >>> from tlt_lightning.speculation.selectors.fixed import FixedSelector
        >>> len(FullGraphPool().plan(arms_by_batch(FixedSelector(3), 4), (1, 2, 4, 8, 16)).shapes("target"))
        6
    """

    limits_splits = False

    @override
    def plan(self, arms: Arms, capture_sizes: Sequence[int], costs: GraphCosts | None = None) -> GraphPlan:
        check_arms(arms, capture_sizes)
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
                    graphs.add(FullGraph("drafter_decode", size, length if self.fused_decode else 0))
        return GraphPlan(tuple(sorted(graphs)), tuple(sizes))


class BucketedGraphPool(GraphPool):
    """Only shapes that the selector can reach, equal shapes once, none larger than vLLM's, within a memory budget.

    Over the budget, graphs go whose loss costs least time for the memory they free. How long a batch size lasts in a
    long tail is taken as inversely proportional to it: of a rollout that starts with 128 requests, about half the time
    is spent with 8 or fewer. The graphs of plain decoding always stay: off is free.

    Args:
        memory_budget_mib: Device memory for full graphs, by estimate; None for no limit.
        fused_decode: Whether one drafter graph drafts all tokens of a step, as in `GraphPool`.

    Example:
        >>> from tlt_lightning.speculation.selectors.threshold import ThresholdSelector
        >>> selector = ThresholdSelector(3, max_running=4, band=0)
        >>> BucketedGraphPool().plan(arms_by_batch(selector, 16), (1, 2, 4, 8, 16)).shapes("drafter_prefill")
        [(1, 4), (2, 4), (4, 4)]
    """

    def __init__(self, memory_budget_mib: float | None = None, fused_decode: bool = True) -> None:
        super().__init__(fused_decode)
        if memory_budget_mib is not None:
            check_at_least("memory_budget_mib", memory_budget_mib, 1)
        self.memory_budget_mib = memory_budget_mib

    @override
    def plan(self, arms: Arms, capture_sizes: Sequence[int], costs: GraphCosts | None = None) -> GraphPlan:
        check_arms(arms, capture_sizes)
        worth: dict[FullGraph, float] = {}
        for arm in {arm for strategies in arms.values() for arm in strategies}:
            # Like vLLM, no graph has more tokens than its largest capture size; there compute bounds a step anyway.
            limit = max(capture_sizes) // (arm.num_draft_tokens + 1)
            batches = sorted(size for size in arms if arm in arms[size] and size <= limit)
            sizes = sorted({*(size for size in capture_sizes if size < batches[-1]), batches[-1]} if batches else ())
            for batch in batches:
                num_requests = next(size for size in sizes if size >= batch)
                graphs = {FullGraph("target", num_requests, arm.num_draft_tokens + 1)}
                if arm.is_learned:
                    graphs |= self.drafter_graphs(num_requests, arm.num_draft_tokens)
                for graph in graphs:
                    worth[graph] = worth.get(graph, 0.0) + 1 / (batch * len(arms[batch]))
        piecewise = sorted({*(set(PIECEWISE_SIZES) & set(capture_sizes)), max(capture_sizes)})
        dropped = self._drop(worth, costs or GraphCosts())
        return GraphPlan(tuple(sorted(set(worth) - set(dropped))), tuple(piecewise), tuple(dropped))

    def _drop(self, worth: Mapping[FullGraph, float], costs: GraphCosts) -> list[FullGraph]:
        """Graphs to give up until the rest fits the budget."""
        kept, dropped = sorted(worth), []
        while self.memory_budget_mib is not None and estimate_mib(kept, costs) > self.memory_budget_mib:
            candidates = [graph for graph in kept if graph.kind != "target" or graph.length > 1]
            if not candidates:
                raise ValueError(
                    f"`memory_budget_mib` is {self.memory_budget_mib}, but the graphs of plain decoding need about "
                    f"{estimate_mib(kept, costs):.0f} MiB; raise it, or lower the engine's largest batch."
                )
            dropped.append(min(candidates, key=lambda graph: worth[graph] / _freed_mib(graph, kept, costs)))
            kept.remove(dropped[-1])
        return dropped


def check_arms(arms: Arms, capture_sizes: Sequence[int]) -> None:
    """Raise ValueError unless `arms` covers the batch sizes from 1 on, off included, and there are capture sizes."""
    if sorted(arms) != list(range(1, len(arms) + 1)) or not arms:
        raise ValueError(f"`arms` must have every batch size from 1 to the largest, got {sorted(arms)}.")
    without = [size for size, strategies in arms.items() if not any(arm.is_off for arm in strategies)]
    if without:
        raise ValueError(f"`arms` lacks `OFF` at batch sizes {without}; a selector must always be able to switch off.")
    if not capture_sizes or min(capture_sizes) < 1:
        raise ValueError(f"`capture_sizes` must be positive and not empty, got {list(capture_sizes)}.")


def _freed_mib(graph: FullGraph, kept: Sequence[FullGraph], costs: GraphCosts) -> float:
    """Memory that `kept` needs less without `graph`: more than a little only for the single largest of its pool."""
    is_target = graph.kind == "target"
    others = max((g.num_tokens for g in kept if (g.kind == "target") == is_target and g != graph), default=0)
    per_token = costs.target_token_mib if is_target else costs.drafter_token_mib
    return costs.graph_mib + per_token * max(0, graph.num_tokens - others)
