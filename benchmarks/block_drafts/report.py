"""Report how heads learn, what steps cost, and what both come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.results import heading, table
from benchmarks.micro.cold_head import WAYS

Cells = Mapping[str, tuple[float, float]]  # milliseconds and tokens per step, by batch


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    lines = heading("Block drafts", results["about"])
    if rollouts := results.get("rollouts"):
        lines += [f"Text: {rollouts['responses']:,} responses, {rollouts['tokens']:,} tokens.\n"]
    heads = {arm: found for arm, found in results.get("heads", {}).items() if "curve" in found}
    steps, served = (
        {arm: found for arm, found in results.get(part, {}).items() if "cells" in found} for part in ("steps", "serve")
    )
    lines += [*(learned(heads) if heads else []), *(timed(steps) if steps else [])]
    lines += foretold(heads, steps, served) if any(arm.startswith("eagle3=") for arm in steps) else []
    if served:
        lines += ["## Served by vLLM's own runner\n", "Milliseconds and tokens per step, tokens/s:\n"]
        cells = {arm: found["cells"] for arm, found in served.items()}
        rows = [
            [arm, *(f"{ms:.2f}, {n:.2f}, {rate(b, ms, n):,.0f}" for b, (ms, n) in its.items())]
            for arm, its in cells.items()
        ]
        lines += table(["drafts", *batches(cells)], rows)
        lines += ["One response to each of as many prompts as the largest batch, to their natural ends:\n"]
        names = next(iter(served.values()))["natural"]
        lines += table(["drafts", *names], [[arm, *found["natural"].values()] for arm, found in served.items()])
    for part in ("heads", "serve", "steps"):
        for arm, found in results.get(part, {}).items():
            lines += [f"Failed: {part} {arm}, `{found['failed']}`.\n"] if "failed" in found else []
    return lines


def learned(heads: Mapping[str, Any]) -> list[str]:
    """Return what heads learned by tokens trained on, and how often their drafts are accepted in the end."""
    lines = ["Tokens per step of greedy drafts expected on held-out prompts, by tokens trained on, each once:\n"]
    longest = max(heads.values(), key=lambda found: len(found["curve"]))["curve"]
    rows = [[arm, *(each for _, each in found["curve"])] for arm, found in heads.items()]
    lines += table(["head", *(f"{tokens // 1000}k" for tokens, _ in longest)], rows)
    lines += ["In the end, by how drafts are made:\n"]
    lines += table(["head", *WAYS], [[arm, *found["ways"].values()] for arm, found in heads.items()])
    for way in ("greedy", "sampled"):
        shares = {arm: found["accepted"][way] for arm, found in heads.items()}
        most = max(map(len, shares.values()))
        lines += [f"How often {way} drafts are accepted, with all before them:\n"]
        rows = [[arm, *its, *[None] * (most - len(its))] for arm, its in shares.items()]
        lines += table(["head", *map(str, range(1, most + 1))], rows)
    return lines


def timed(steps: Mapping[str, Any]) -> list[str]:
    """Return milliseconds per step with random weights."""
    cells = {arm: found["cells"] for arm, found in steps.items()}
    lines = ["## Steps in the shape of 7B, random weights, vLLM's own runner\n", "Milliseconds per step:\n"]
    return lines + table(
        ["drafts", *batches(cells)], [[arm, *(ms for ms, _ in its.values())] for arm, its in cells.items()]
    )


def foretold(heads: Mapping[str, Any], steps: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Return tokens/s that follow from steps in the shape of 7B and from acceptance at the head's own size.

    Acceptance is what was served, where that was measured; else what held-out text foretells.
    """
    lines = ["## Tokens/s in the shape of 7B that follow from both\n"]
    for way in ("as served",) if served else ("greedy", "sampled"):
        rates: dict[str, list[float]] = {}
        for arm, found in steps.items():
            name, _, drafts = arm.partition("=")
            if served:
                tokens = served[arm]["natural"]["tokens per step"] if arm in served else None
            else:
                tokens = 1 + sum(heads[name]["accepted"][way][: int(drafts)]) if name in heads else None
            if tokens is not None:
                rates[arm] = [rate(batch, ms, tokens) for batch, (ms, _) in found["cells"].items()]
        ours = [each for arm, each in rates.items() if arm.startswith("eagle3=")]
        if not ours:
            continue
        cells = {arm: found["cells"] for arm, found in steps.items()}
        best = [max(each) for each in zip(*ours, strict=True)]
        rows = [
            [arm, *(f"{each:,.0f} ({each / its:.2f})" for each, its in zip(found, best, strict=True))]
            for arm, found in rates.items()
        ]
        which = "tokens per step as served to natural ends" if served else f"{way} drafts"
        lines += [f"With {which}; in brackets over EAGLE-3's best length at this batch:\n"]
        lines += table(["drafts", *batches(cells)], rows)
    return lines


def rate(batch: str, milliseconds: float, tokens: float) -> float:
    """Return tokens per second of a batch that writes `tokens` per request and step."""
    return 1e3 * int(batch) * tokens / milliseconds


def batches(cells: Mapping[str, Cells]) -> list[str]:
    """Return headers for the batch sizes of all arms."""
    return [f"batch {batch}" for batch in next(iter(cells.values()))]
