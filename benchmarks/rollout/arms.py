"""List the arms of the comparison: name, engine and selector of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from typing_extensions import override

from tlt_lightning.speculation import (
    OFF,
    BEGMABSelector,
    CostModelSelector,
    FixedSelector,
    SelectorState,
    Strategy,
    StrategySelector,
    ThresholdSelector,
)
from tlt_lightning.speculation.strategy import MeasuredStep

KS = (1, 3, 5, 7)
FIXED = ("K=3", "K=5", "K=1", "K=7")
ENGINES = {
    "plain": "no drafter; all requests at once, prompts in few steps, asynchronous scheduling, full graphs",
    "head": "EAGLE-3 head, its likeliest tokens; steered by a selector that is exchanged between the arms",
    "mixed": "the same head, its drafts mixed with those of siblings",
    "siblings": "no head; drafts looked up in other answers to the same prompt",
    "ngram": "no head; drafts looked up in the text itself",
    "sampled": "the same head, drafts sampled from its whole distribution",
    "plain in fp8": "no drafter; linear layers in fp8",
    "head in fp8": "the same head beside linear layers in fp8",
    "sampled in fp8": "the same, drafts sampled from its whole distribution",
    "table": "the same head under vLLM's own scheduler and `num_speculative_tokens_per_batch_size`",
    "vLLM K=3": "the same head under vLLM's own scheduler, three drafts in every step",
    "vLLM K=5": "the same, five drafts",
}
"""Kinds of engines; a further head has kinds of its own, as `head <name>` and `sampled <name> in fp8`."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Names one way to roll out.

    Args:
        name: In tables and files.
        part: Part of the benchmark it belongs to.
        engine: One of `ENGINES`.
        selector: Makes the selector; None leaves the engine alone.
    """

    name: str
    part: str
    engine: str
    selector: Callable[[], StrategySelector] | None = None

    @property
    def is_modelled(self) -> bool:
        """True if the arm drafts nothing, or likeliest tokens of the first head, as in the model."""
        return self.engine in ("plain", "head") or is_vllm_alone(self.engine)


def is_vllm_alone(engine: str) -> bool:
    """Return whether vLLM speculates by itself in this kind of engine, without this package's runner."""
    return engine.partition(" ")[0] in ("table", "vLLM")


def arms_of(heads: Sequence[str]) -> dict[str, Arm]:
    """Return every arm by name, most important first; without a head only those that need none."""
    arms = [Arm(name="plain", part="core", engine="plain")]

    def add(name: str, part: str, engine: str, selector: Callable[[], StrategySelector]) -> None:
        arms.append(Arm(name=name, part=part, engine=engine, selector=selector))

    if heads:
        add("adaptive", "core", "head", CostModelSelector)
        for name in FIXED:
            add(name, "core", "head", partial(FixedSelector, int(name[2:])))
        add("TLT rule", "core", "head", partial(ThresholdSelector, 7, max_running=32))
        add("BEG-MAB", "core", "head", BEGMABSelector)
        add("off", "core", "head", partial(FixedSelector, 0))
        arms.append(Arm(name="vLLM table", part="others", engine="table"))
        arms += [Arm(name=name, part="stock", engine=name) for name in ("vLLM K=3", "vLLM K=5")]
        for name, selector in (("adaptive", CostModelSelector), ("K=3", partial(FixedSelector, 3))):
            add(f"{name}, sampled drafts", "others", "sampled", selector)
        for head in (Path(each).name for each in heads[1:]):
            add(f"adaptive, {head}", "heads", f"head {head}", CostModelSelector)
            add(f"K=3, {head}", "heads", f"head {head}", partial(FixedSelector, 3))
            add(f"adaptive, sampled drafts, {head}", "heads", f"sampled {head}", CostModelSelector)
            add(f"adaptive, sampled drafts, fp8, {head}", "fp8", f"sampled {head} in fp8", CostModelSelector)
        both = partial(CostModelSelector, drafters=("learned", "mixed", "sibling"))
        add("adaptive, siblings too", "lookups", "mixed", both)
        add("adaptive, fp8", "fp8", "head in fp8", CostModelSelector)
        add("adaptive, sampled drafts, fp8", "fp8", "sampled in fp8", CostModelSelector)
    arms.append(Arm(name="plain, fp8", part="fp8", engine="plain in fp8"))
    add("siblings", "lookups", "siblings", partial(CostModelSelector, drafters=("sibling",)))
    add("n-gram", "lookups", "ngram", partial(CostModelSelector, drafters=("ngram",)))
    return {arm.name: arm for arm in arms}


class WarmUpSelector(StrategySelector):
    """Chooses all strategies of an engine's selectors in turn, until one is put `in_force`."""

    def __init__(self, selectors: dict[str, StrategySelector]) -> None:
        self.selectors = selectors
        self.in_force: StrategySelector | None = None
        self._turn = 0

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        found = dict.fromkeys(arm for selector in self.selectors.values() for arm in selector.arms(batch_size))
        return (OFF, *(arm for arm in found if not arm.is_off))

    @override
    def select(self, state: SelectorState) -> Strategy:
        if self.in_force is not None:
            return self.in_force.select(state)
        arms = self.arms(state.batch_size)
        self._turn += 1
        return arms[self._turn % len(arms)]

    @override
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        if self.in_force is not None:
            self.in_force.record(state, strategy, num_emitted, seconds)

    @property
    @override
    def wants_calibration(self) -> bool:
        return any(selector.wants_calibration for selector in self.selectors.values())

    @override
    def calibrate(self, steps: Sequence[MeasuredStep]) -> None:
        for selector in self.selectors.values():
            if selector.wants_calibration:
                selector.calibrate([step for step in steps if step.strategy in selector.arms(step.batch_size)])
