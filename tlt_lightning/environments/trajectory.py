"""Hold a conversation with an environment, and what an engine has of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlt_lightning.environments.conversation import Conversation
from tlt_lightning.environments.turns import Turns
from tlt_lightning.rollout import Prompt, Request, Response


@dataclass(slots=True, eq=False)
class Trajectory:
    """Holds a conversation and its part in the engine.

    Args:
        talk: The conversation.
        request: What was asked of the engine.
        prompt: The prompt, behind which an environment may have put something.
        limit: Most tokens of the response.
        turns: Writes its messages.
        response: All that was written and observed; None before the first turn has ended.
        is_aside: True while it is stopped.
        held: What its environment has answered since.
    """

    talk: Conversation
    request: Request
    prompt: Prompt
    limit: int
    turns: Turns
    response: Response | None = None
    is_aside: bool = False
    held: tuple[str, Any] | None = None
