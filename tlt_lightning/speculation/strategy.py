"""Define strategies and the selector that chooses among them. Pure: no torch, vLLM, Trainer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tlt_lightning.arguments import CountOrZero, check_argument, checked

Drafter = Literal["learned", "mixed", "ngram", "sibling"]
"""Drafters, each with what it drafts from:

========= ==========================================================================================================
learned   the head
ngram     look-ups in the prompt and the response itself
sibling   look-ups in all responses to the same prompt, the response itself among them
mixed     the head, and in its place look-ups wherever they are expected to be accepted more often
========= ==========================================================================================================
"""

LEARNED_DRAFTERS: tuple[Drafter, ...] = ("learned", "mixed")
"""Drafters in whose steps the learned head drafts."""


@checked()
@dataclass(frozen=True, slots=True)
class Strategy:
    """Says how many tokens are drafted in an engine step, and by which drafter.

    Args:
        num_draft_tokens: Tokens drafted for each running request, K; 0 switches speculation off.
        drafter: Who proposes them; ignored when off.
    """

    num_draft_tokens: CountOrZero = 0
    drafter: Drafter = "learned"

    @property
    def is_off(self) -> bool:
        """True if this step decodes plainly."""
        return self.num_draft_tokens == 0

    @property
    def is_learned(self) -> bool:
        """True if the learned head drafts in this step, alone or mixed with look-ups."""
        return not self.is_off and self.drafter in LEARNED_DRAFTERS

    @property
    def looks_up(self) -> bool:
        """True if drafts are looked up in this step, alone or mixed with the learned head's."""
        return not self.is_off and self.drafter != "learned"


OFF = Strategy(0)


def make_arms(num_draft_tokens: Sequence[int], drafters: Sequence[Drafter]) -> tuple[Strategy, ...]:
    """Return `OFF`, then every draft length with every drafter, shorter drafts first.

    Raises:
        TypeError: A draft length is no whole number.
        ValueError: There is no draft length or no drafter, or a length is not positive.
    """
    check_argument("num_draft_tokens", num_draft_tokens, Sequence[int])
    check_argument("drafters", drafters, Sequence[str])
    if not num_draft_tokens or not drafters or min(num_draft_tokens) < 1:
        raise ValueError(
            f"`num_draft_tokens` lists draft lengths of at least 1, and `drafters` who drafts, got {num_draft_tokens} "
            f"and {drafters}; off is always an arm and is not listed."
        )
    return (
        OFF,
        *(Strategy(length, drafter) for length in sorted(set(num_draft_tokens)) for drafter in dict.fromkeys(drafters)),
    )


@dataclass(frozen=True, slots=True)
class SelectorState:
    """Describes the engine to a selector before an engine step.

    Args:
        batch_size: Requests that will run in the step.
        mean_context: Mean tokens (prompt and response) of the running requests.
        drafter_version: Version of the drafter in the engine; -1 if none was pushed.
        waiting: Requests that have not started.
        is_silenced: True while the head is kept from drafting, because it waits for its first weights or its acceptance
            collapsed; its arms then decode plainly, and such steps are recorded as `OFF`.
        num_steps: Engine steps that the choice stands for.
    """

    batch_size: int
    mean_context: float = 0.0
    drafter_version: int = -1
    waiting: int = 0
    is_silenced: bool = False
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Records the seconds of one step under `strategy`, to calibrate with.

    Args:
        mean_context: Mean tokens (prompt and response) of the step's requests.
        error: Relative standard deviation of `seconds`.
    """

    batch_size: int
    strategy: Strategy
    mean_context: float
    seconds: float
    error: float = 0.1


class StrategySelector(ABC):
    """Chooses the strategy of the next engine step and learns from the steps that are done."""

    @abstractmethod
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        """Return every strategy that `select` may choose at this batch size, always with `OFF`."""

    @abstractmethod
    def select(self, state: SelectorState) -> Strategy:
        """Choose the strategy of the next step, in constant time without device synchronisation."""

    def record(  # noqa: B027 - rules learn nothing
        self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float
    ) -> None:
        """Learn from a finished step.

        Args:
            state: What `select` saw, with the requests that really ran in the step as `batch_size`.
            strategy: Strategy whose drafts were verified in the step.
            num_emitted: Tokens emitted by each running request, bonus token included (1 means nothing accepted).
            seconds: Wall-clock seconds of the step.
        """

    @property
    def wants_calibration(self) -> bool:
        """True while measured steps would help; the engine measures some before its next rollout."""
        return False

    def calibrate(self, steps: Sequence[MeasuredStep]) -> None:  # noqa: B027 - most selectors learn as they go
        """Learn from steps that were measured at several batch sizes with meaningless drafts."""

    def note_head(self, accepted: Sequence[float]) -> None:  # noqa: B027 - rules learn nothing
        """Learn how well a new head drafts on held-out text, before it is served.

        `accepted` is the share of engine steps that accept the k-th draft and all before it.
        """

    def expected_speedup(self, accepted: Sequence[float]) -> float | None:
        """Return how many times as fast as plainly such a head decodes at best; None if nothing was measured."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, as tensors and primitives."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027 - stateless selectors need none
        """Restore what `state_dict` saved."""
