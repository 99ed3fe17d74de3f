"""What is compared: each arm is a name, the engine it runs in, and how that engine is to speculate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tlt_lightning.speculation.strategy import Drafter

KS = (1, 3, 5, 7)
FIXED_ARMS = ("K=3", "K=5", "K=1", "K=7")
RANDOM_HEAD = "random"
ENGINES = {
    "plain": "no drafter; tuned: all requests at once, prompts in few steps, asynchronous scheduling, full graphs",
    "steered": "EAGLE-3 head, one-hot drafts; steered by a selector that is exchanged between the arms",
    "table": "EAGLE-3 head under vLLM's own scheduler and `num_speculative_tokens_per_batch_size`",
    "probabilistic": "as steered, drafts sampled from the head's whole distribution",
    "defaults": "no drafter; what vLLM's engine takes by default, prompts in steps of 2,048 tokens",
    "full_pool": "as steered, with every graph that vLLM would capture for the same draft lengths",
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to roll out.

    Args:
        name: In tables and files.
        part: Part of the benchmark it belongs to.
        engine: Key of `ENGINES`.
        selector: Makes the selector; None leaves the engine alone.
        siblings: Look drafts up in other answers to the same prompt.
        ngram: Look drafts up in the prompt and the answer itself.
        head: Directory of the head it drafts with, `RANDOM_HEAD` for the first one with random weights, None for
            none.
    """

    name: str
    part: str
    engine: str
    selector: Callable[[], StrategySelector] | None = None
    siblings: bool = False
    ngram: bool = False
    head: str | None = None


def is_modelled(arm: Arm, heads: Sequence[str]) -> bool:
    """True if the arm drafts as those that the limit is modelled on, if at all: one-hot drafts of the first head."""
    drafts_alike = arm.engine in ("plain", "defaults", "steered", "table") and arm.head in (None, *heads[:1])
    return drafts_alike and not arm.siblings and not arm.ngram


def arms_of(heads: tuple[str, ...]) -> dict[str, Arm]:
    """Every arm by name, most important first; without a head only those that need none."""
    arms = [Arm(name="plain", part="core", engine="plain"), Arm(name="defaults", part="memory", engine="defaults")]
    looked_up = [
        Arm(name="siblings", part="extra", engine="steered", siblings=True, selector=_adaptive("sibling")),
        Arm(name="n-gram", part="extra", engine="steered", ngram=True, selector=_adaptive("ngram")),
        Arm(name="n-gram K=5", part="extra", engine="steered", ngram=True, selector=lambda: FixedSelector(5, "ngram")),
    ]
    if not heads:
        return {arm.name: arm for arm in [*arms, *looked_up]}
    main = heads[0]
    arms += [
        _steered("adaptive", "core", main, CostModelSelector),
        *(_steered(name, "core", main, _fixed(int(name[2:]))) for name in FIXED_ARMS),
        _steered("TLT rule", "core", main, lambda: ThresholdSelector(7, max_running=32)),
        _steered("BEG-MAB", "core", main, BEGMABSelector),
        _steered("TLT rule K=3", "extra", main, lambda: ThresholdSelector(3, max_running=32)),
        _steered("off", "extra", main, _fixed(0)),
        _steered("adaptive, siblings too", "extra", main, _adaptive("learned", "mixed", "sibling"), siblings=True),
        *looked_up,
    ]
    others = {Path(head).name: head for head in heads[1:]}
    if not any("random" in name for name in others):
        others["random head"] = RANDOM_HEAD
    for name, head in others.items():
        arms.append(_steered(f"adaptive, {name}", "extra", head, CostModelSelector))
        arms.append(_steered(f"K=3, {name}", "extra", head, _fixed(3)))
    arms.append(Arm(name="vLLM table", part="others", engine="table", head=main))
    for name, selector in (("adaptive", CostModelSelector), ("K=3", _fixed(3)), ("K=5", _fixed(5))):
        sampled = f"{name}, sampled drafts"
        arms.append(Arm(name=sampled, part="others", engine="probabilistic", head=main, selector=selector))
    return {arm.name: arm for arm in arms}


def _steered(name: str, part: str, head: str, selector: Callable[[], StrategySelector], siblings: bool = False) -> Arm:
    return Arm(name=name, part=part, engine="steered", head=head, selector=selector, siblings=siblings)


def _fixed(k: int) -> Callable[[], StrategySelector]:
    return lambda: FixedSelector(k)


def _adaptive(*drafters: Drafter) -> Callable[[], StrategySelector]:
    return lambda: CostModelSelector(drafters=drafters)


class Tour(StrategySelector):
    """Reaches what any of the given selectors reaches, and goes through all of it: for graphs and for warming up.

    Args:
        selectors: Whose arms.
    """

    def __init__(self, selectors: list[StrategySelector]) -> None:
        self.selectors = selectors
        self._turn = 0

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        found = dict.fromkeys(arm for selector in self.selectors for arm in selector.arms(batch_size))
        return (OFF, *(arm for arm in found if not arm.is_off))

    @override
    def select(self, state: SelectorState) -> Strategy:
        arms = self.arms(state.batch_size)
        self._turn += 1
        return arms[self._turn % len(arms)]

    @override
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        pass
