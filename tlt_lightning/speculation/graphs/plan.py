"""Describe the CUDA graphs to capture, and tabulate their cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

GraphKind = Literal["target", "drafter_prefill", "drafter_decode"]


@dataclass(frozen=True, slots=True, order=True)
class FullGraph:
    """Describes the CUDA graph of a whole forward pass for one shape.

    Args:
        kind: The target's pass; the drafter's first, over what the target verified; or all its further ones.
        num_requests: Requests it holds; fewer are padded up to it.
        length: Tokens per request; for `drafter_decode` the draft length that it drafts.
    """

    kind: GraphKind
    num_requests: int
    length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one pass."""
        return self.num_requests * (1 if self.kind == "drafter_decode" else self.length)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """Reports MiB and seconds that captured graphs took, by kind or "piecewise"."""

    mib: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class GraphPlan:
    """Lists the graphs to capture; any other shape runs without one.

    Args:
        graphs: Full graphs, sorted.
        piecewise: Token counts of the graphs between attention layers, captured for the target and, where there are
            drafter graphs, for the drafter.
    """

    graphs: tuple[FullGraph, ...]
    piecewise: tuple[int, ...]

    def shapes(self, kind: GraphKind) -> list[tuple[int, int]]:
        """Return (requests, length) of the graphs of `kind`, sorted."""
        return [(graph.num_requests, graph.length) for graph in self.graphs if graph.kind == kind]

    def find(self, kind: GraphKind, num_requests: int, length: int) -> FullGraph | None:
        """Return the smallest graph for `num_requests` requests of `length`; None without one."""
        sizes = self._sizes.get((kind, length), [])
        index = bisect_left(sizes, num_requests)
        return FullGraph(kind, sizes[index], length) if index < len(sizes) else None

    def table(self, report: CaptureReport) -> str:
        """Return a Markdown table of graphs by kind, with MiB and seconds where `report` has them."""
        lines = ["| pass | graphs | largest | MiB | seconds |", "|---|---|---|---|---|"]
        has_drafter = any(graph.kind != "target" for graph in self.graphs)
        for kind in get_args(GraphKind):
            kept = [graph for graph in self.graphs if graph.kind == kind]
            largest = max(kept, key=lambda graph: (graph.num_tokens, graph.length), default=None)
            shape = f"{largest.num_requests} x {largest.length}" if largest else "-"
            lines.append(_row(kind.replace("_", " "), len(kept), shape, report, kind))
        num_piecewise = len(self.piecewise) * (2 if has_drafter else 1)
        shape = f"{self.piecewise[-1]} tokens" if self.piecewise else "-"
        lines.append(_row("piecewise", num_piecewise, shape, report, "piecewise"))
        mib, seconds = (f"{sum(values.values()):.1f}" if values else "-" for values in (report.mib, report.seconds))
        lines.append(f"| all | {len(self.graphs) + num_piecewise} |  | {mib} | {seconds} |")
        return "\n".join(lines)

    @cached_property
    def _sizes(self) -> dict[tuple[GraphKind, int], list[int]]:
        sizes: dict[tuple[GraphKind, int], list[int]] = {}
        for graph in sorted(self.graphs, key=lambda graph: graph.num_requests):
            sizes.setdefault((graph.kind, graph.length), []).append(graph.num_requests)
        return sizes


def _row(name: str, count: int, largest: str, report: CaptureReport, key: str) -> str:
    mib, seconds = (f"{values[key]:.1f}" if key in values else "-" for values in (report.mib, report.seconds))
    return f"| {name} | {count} | {largest} | {mib} | {seconds} |"
