"""Hold what the policy says in one turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlt_lightning.environments.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds a turn of the policy, as tokens and as what they say.

    Args:
        words: Its text.
        beside: Its text beside the calls.
        calls: What it asks of tools.
        before: Token ids of all that came before it.
        ids: Its token ids.
        logps: Their log-probs.
        is_cut: True if it had to end before the policy ended it.
    """

    words: str
    beside: str = ""
    calls: Sequence[ToolCall] = ()
    before: Sequence[int] = ()
    ids: Sequence[int] = ()
    logps: Sequence[float] = ()
    is_cut: bool = False
