"""Plan the CUDA graphs that an engine captures, from the selector's arms.

Unlike the paper's (arXiv 2511.16665, section 5.1), shapes follow from the arms at each batch size instead of a second
list of buckets, and drafts are chains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from typing_extensions import override

from tlt_lightning.speculation.graphs.plan import FullGraph, GraphPlan
from tlt_lightning.speculation.strategy import Strategy, StrategySelector

PIECEWISE_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Token counts for batches with a prefill: at most half of a graph is padding, a third where tokens are not free."""

Arms = Mapping[int, Sequence[Strategy]]
"""The strategies a selector can choose at each batch size from 1 up to the largest."""


def arms_by_batch(selector: StrategySelector, max_num_requests: int) -> dict[int, tuple[Strategy, ...]]:
    """Return a selector's arms at each batch size up to `max_num_requests`."""
    return {size: selector.arms(size) for size in range(1, max_num_requests + 1)}


class GraphPool(ABC):
    """Chooses the shapes that get a CUDA graph."""

    limits_splits = True
    """True if a graph splits contexts no further than its requests can use (`patches/flash_splits.py`)."""

    @abstractmethod
    def plan(self, arms: Arms, capture_sizes: Sequence[int]) -> GraphPlan:
        """Plan the graphs.

        Args:
            arms: Strategies reachable at each batch size from 1 on, `OFF` among them; see `arms_by_batch`.
            capture_sizes: The engine's own capture sizes: token counts, and for plain decoding request counts.
        """


class BucketedGraphPool(GraphPool):
    """Plans only shapes that the selector can reach, equal shapes once, none larger than vLLM's.

    With a head, steps that look up also run the head's first pass, over the tokens that they verify.

    Example:
        >>> from tlt_lightning.speculation.selectors.threshold import ThresholdSelector
        >>> selector = ThresholdSelector(3, max_running=4, band=0)
        >>> BucketedGraphPool().plan(arms_by_batch(selector, 16), (1, 2, 4, 8, 16)).shapes("drafter_prefill")
        [(1, 4), (2, 4), (4, 4)]
    """

    @override
    def plan(self, arms: Arms, capture_sizes: Sequence[int]) -> GraphPlan:
        graphs: set[FullGraph] = set()
        reachable = {arm for strategies in arms.values() for arm in strategies}
        has_head = any(arm.is_learned for arm in reachable)
        for arm in reachable:
            length = arm.num_draft_tokens + 1
            # Like vLLM, no graph has more tokens than its largest capture size; there compute bounds a step anyway.
            limit = max(capture_sizes) // length
            batches = sorted(size for size in arms if arm in arms[size] and size <= limit)
            sizes = sorted({*(size for size in capture_sizes if size < batches[-1]), batches[-1]} if batches else ())
            for num_requests in {next(size for size in sizes if size >= batch) for batch in batches}:
                graphs.add(FullGraph("target", num_requests, length))
                if has_head and not arm.is_off:
                    graphs.add(FullGraph("drafter_prefill", num_requests, length))
                if arm.is_learned and arm.num_draft_tokens > 1:
                    graphs.add(FullGraph("drafter_decode", num_requests, arm.num_draft_tokens))
        piecewise = sorted({*(set(PIECEWISE_SIZES) & set(capture_sizes)), max(capture_sizes)})
        return GraphPlan(tuple(sorted(graphs)), tuple(piecewise))
