"""Which CUDA graphs are captured, and a table of what they cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

GraphKind = Literal["target", "drafter_prefill", "drafter_decode"]

GRAPH_KINDS: tuple[GraphKind, ...] = ("target", "drafter_prefill", "drafter_decode")


@dataclass(frozen=True, slots=True, order=True)
class FullGraph:
    """A graph of a whole forward pass for one shape.

    Args:
        kind: Whose pass: the target's; the drafter's first, over what the target verified; or its further ones.
        num_requests: Requests it holds; fewer are padded up to it.
        length: Tokens per request; for `drafter_decode` the draft length that it drafts, 0 if it drafts one token and
            is replayed for every length.
    """

    kind: GraphKind
    num_requests: int
    length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one pass."""
        return self.num_requests * (1 if self.kind == "drafter_decode" else self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCosts:
    """Memory of a pool, for budgets; estimates from two captures of a 7B model with an EAGLE-3 head on an H200.

    Graphs share one pool of activations, so beyond a little for every graph only the largest shape counts.

    Args:
        graph_mib: For every graph.
        target_token_mib: For every token of the target's largest graph.
        drafter_token_mib: For every token of the drafter's largest graph.
    """

    graph_mib: float = 0.45
    target_token_mib: float = 0.3
    drafter_token_mib: float = 1.8


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing a plan really cost, by row of the table: the graph kinds and "piecewise".

    Args:
        mib: Device memory each took.
        seconds: Time each took.
    """

    mib: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphPlan:
    """The graphs to capture; a shape that is not here runs without one.

    Args:
        graphs: Full graphs, sorted.
        piecewise: Token counts of the graphs between attention layers, captured for the target and, where there are
            drafter graphs, for the drafter.
        dropped: Graphs that did not fit the budget, least useful first.
    """

    graphs: tuple[FullGraph, ...]
    piecewise: tuple[int, ...]
    dropped: tuple[FullGraph, ...] = ()

    def shapes(self, kind: GraphKind) -> list[tuple[int, int]]:
        """(requests, length) of the graphs of `kind`, sorted."""
        return [(graph.num_requests, graph.length) for graph in self.graphs if graph.kind == kind]

    def find(self, kind: GraphKind, num_requests: int, length: int) -> FullGraph | None:
        """The smallest graph that serves `num_requests` requests of `length`; None if that shape runs without one."""
        sizes = self._sizes.get((kind, length), [])
        index = bisect_left(sizes, num_requests)
        return FullGraph(kind, sizes[index], length) if index < len(sizes) else None

    def mib(self, costs: GraphCosts | None = None) -> float:
        """Estimated device memory of the full graphs."""
        return estimate_mib(self.graphs, costs or GraphCosts())

    def table(self, report: CaptureReport | None = None) -> str:
        """A Markdown table of graphs by kind, with the MiB and seconds of `report` where it has them."""
        report = report or CaptureReport()
        lines = ["| pass | graphs | dropped | largest | MiB | seconds |", "|---|---|---|---|---|---|"]
        has_drafter = any(graph.kind != "target" for graph in self.graphs)
        for kind in GRAPH_KINDS:
            kept = [graph for graph in self.graphs if graph.kind == kind]
            dropped = sum(graph.kind == kind for graph in self.dropped)
            largest = max(kept, key=lambda graph: (graph.num_tokens, graph.length), default=None)
            shape = f"{largest.num_requests} x {largest.length}" if largest else "-"
            lines.append(_row(kind.replace("_", " "), len(kept), dropped, shape, report, kind))
        num_piecewise = len(self.piecewise) * (2 if has_drafter else 1)
        shape = f"{self.piecewise[-1]} tokens" if self.piecewise else "-"
        lines.append(_row("piecewise", num_piecewise, 0, shape, report, "piecewise"))
        mib, seconds = (f"{sum(values.values()):.1f}" if values else "-" for values in (report.mib, report.seconds))
        lines.append(f"| all | {len(self.graphs) + num_piecewise} | {len(self.dropped)} |  | {mib} | {seconds} |")
        return "\n".join(lines)

    @cached_property
    def _sizes(self) -> dict[tuple[GraphKind, int], list[int]]:
        sizes: dict[tuple[GraphKind, int], list[int]] = {}
        for graph in sorted(self.graphs, key=lambda graph: graph.num_requests):
            sizes.setdefault((graph.kind, graph.length), []).append(graph.num_requests)
        return sizes


def estimate_mib(graphs: Sequence[FullGraph], costs: GraphCosts) -> float:
    """Estimated device memory of `graphs` captured into one pool."""
    target = max((graph.num_tokens for graph in graphs if graph.kind == "target"), default=0)
    drafter = max((graph.num_tokens for graph in graphs if graph.kind != "target"), default=0)
    return costs.graph_mib * len(graphs) + costs.target_token_mib * target + costs.drafter_token_mib * drafter


def _row(name: str, count: int, dropped: int, largest: str, report: CaptureReport, key: str) -> str:
    mib, seconds = (f"{values[key]:.1f}" if key in values else "-" for values in (report.mib, report.seconds))
    return f"| {name} | {count} | {dropped} | {largest} | {mib} | {seconds} |"
