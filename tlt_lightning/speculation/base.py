"""Strategies of speculative decoding and the plugin that chooses among them at every engine step.

Pure: no torch device, no vLLM, no Trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

Drafter = Literal["learned", "ngram", "sibling"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """What to speculate in one engine step.

    Args:
        num_draft_tokens: Tokens drafted for each running request, K; 0 switches speculation off.
        drafter: Who proposes them; ignored when off.
    """

    num_draft_tokens: int = 0
    drafter: Drafter = "learned"

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 0:
            raise ValueError(f"`num_draft_tokens` must be 0 (off) or positive, got {self.num_draft_tokens}.")

    @property
    def is_off(self) -> bool:
        """True if this step decodes plainly."""
        return self.num_draft_tokens == 0


OFF = Strategy(0)


@dataclass(frozen=True, slots=True)
class SelectorState:
    """What a selector may look at before an engine step.

    Args:
        batch_size: Requests that will run in the step.
        mean_context: Mean tokens (prompt and response) of the running requests.
        drafter_version: Version of the drafter in the engine; -1 if none was pushed.
        waiting: Requests that have not started.
    """

    batch_size: int
    mean_context: float = 0.0
    drafter_version: int = -1
    waiting: int = 0


class StrategySelector(ABC):
    """Chooses the strategy of the next engine step and learns from the steps that are done."""

    @abstractmethod
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        """Every strategy `select` may return at this batch size; `OFF` is always among them."""

    @abstractmethod
    def select(self, state: SelectorState) -> Strategy:
        """Choose the strategy for the step that `state` describes; constant time, no device synchronisation."""

    @abstractmethod
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        """Learn from a finished step.

        Args:
            state: What `select` saw.
            strategy: What was verified in the step.
            num_emitted: Tokens emitted by each running request, bonus token included (1 means nothing accepted).
            seconds: Wall-clock seconds of the step.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, as tensors and primitives."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027 - stateless selectors need none
        """Restore what `state_dict` saved."""
