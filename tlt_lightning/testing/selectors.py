"""Check a selector in small rollouts that nobody writes."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from tlt_lightning.speculation.strategy import MeasuredStep, SelectorState, Strategy, StrategySelector
from tlt_lightning.testing.plugin import named, saved


def check_selector(selector: StrategySelector, max_batch: int = 64) -> None:
    """Check a selector: its arms at each batch size, its choices in rollouts, and that a resume changes none.

    Args:
        selector: Fresh from its constructor.
        max_batch: Most requests that run at once.
    """
    resumed, arms = deepcopy(selector), {size: selector.arms(size) for size in range(1, max_batch + 1)}
    for size, each in arms.items():
        who, has_off = named(selector, "arms"), any(arm.is_off for arm in each)
        remedy = "return `Strategy(0)` there, too, because a head that is silenced decodes plainly"
        assert has_off, f"{who} returned {each!r:.200} for a batch of {size}: {remedy}."
    if selector.wants_calibration:
        pairs = [(size, arm) for size in sorted({1, 4, max_batch}) for arm in arms[size]]
        selector.calibrate([MeasuredStep(size, arm, 64.0, _seconds(size, arm)) for size, arm in pairs])
    for step in range(400):
        _step([selector], arms, step)
    resumed.load_state_dict(saved(selector))
    for step in range(400, 600):
        one, other = _step([selector, resumed], arms, step)
        assert one == other, (
            f"{named(selector, 'state_dict')} lets a resumed run choose {other} where it would have chosen {one}: save "
            "and load all that `select` and `record` keep."
        )


def _seconds(batch_size: int, strategy: Strategy) -> float:
    return 0.01 + 1e-4 * batch_size * (1 + strategy.num_draft_tokens)


def _step(selectors: Sequence[StrategySelector], arms: dict[int, Any], step: int) -> list[Strategy]:
    """Let selectors choose for a step of rollouts whose batches shrink, and tell them what it brought."""
    size, choices = len(arms) - step % len(arms), []
    state = SelectorState(size, 32.0 + step, drafter_version=step // 100, waiting=step % 7, is_silenced=step % 50 > 40)
    for selector in selectors:
        choice = selector.select(state)
        assert choice.is_off or choice in arms[size], (
            f"{named(selector, 'select')} chose {choice!r} for a batch of {size}, where its `arms` are {arms[size]!r}: "
            "choose one of them, or return it there, too."
        )
        ran = Strategy(0) if state.is_silenced and choice.is_learned else choice
        emitted = tuple(1 + (step * place) % (ran.num_draft_tokens + 1) for place in range(size))
        selector.record(state, ran, emitted, _seconds(size, ran))
        choices.append(choice)
    return choices
