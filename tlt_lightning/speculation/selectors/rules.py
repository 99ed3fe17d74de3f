"""Choose strategies by rules that learn nothing: always the same one, or one while few requests run.

The latter is TLT's elastic rule (arXiv 2511.16665, section 5). Unlike in the paper, speculation goes off again when the
batch grows back, and a band keeps a batch that hovers around the threshold from switching at every step.
"""

from typing import Any

from typing_extensions import override

from tlt_lightning.arguments import Count, CountOrZero, checked
from tlt_lightning.speculation.strategy import OFF, Drafter, SelectorState, Strategy, StrategySelector


class FixedSelector(StrategySelector):
    """Chooses the same strategy for every step: the baseline that adaptive selectors must beat.

    Args:
        num_draft_tokens: Tokens drafted for each request and step; 0 never speculates.
        drafter: Who proposes them.

    Example:
        >>> FixedSelector(3).select(SelectorState(batch_size=8))
        Strategy(num_draft_tokens=3, drafter='learned')
    """

    @checked()
    def __init__(self, num_draft_tokens: CountOrZero = 3, drafter: Drafter = "learned") -> None:
        self.strategy = Strategy(num_draft_tokens, drafter) if num_draft_tokens else OFF

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        return (OFF,) if self.strategy.is_off else (OFF, self.strategy)

    @override
    def select(self, state: SelectorState) -> Strategy:
        return self.strategy


class ThresholdSelector(StrategySelector):
    """Speculates while at most `max_running` requests run, whatever costs and acceptance are.

    Args:
        num_draft_tokens: Tokens drafted for each request and step while on.
        drafter: Who proposes them.
        max_running: Speculation goes on when no more than this many requests run.
        band: Once on, it goes off only when more than `max_running + band` requests run.

    Example:
        >>> selector = ThresholdSelector(num_draft_tokens=3, max_running=32, band=8)
        >>> [selector.select(SelectorState(batch_size=size)).num_draft_tokens for size in (40, 32, 40, 41)]
        [0, 3, 3, 0]
    """

    @checked()
    def __init__(
        self, num_draft_tokens: Count = 3, drafter: Drafter = "learned", max_running: Count = 32, band: CountOrZero = 8
    ) -> None:
        self.strategy = Strategy(num_draft_tokens, drafter)
        self.max_running = max_running
        self.band = band
        self._is_on = False

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        return (OFF, self.strategy) if batch_size <= self.max_running + self.band else (OFF,)

    @override
    def select(self, state: SelectorState) -> Strategy:
        self._is_on = state.batch_size <= self.max_running + (self.band if self._is_on else 0)
        return self.strategy if self._is_on else OFF

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"is_on": self._is_on}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_on = bool(state_dict["is_on"])
