"""Choose one strategy for the whole rollout."""

from typing_extensions import override

from tlt_lightning.arguments import CountOrZero, checked
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
