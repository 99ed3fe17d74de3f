"""Hold one conversation of the policy with an environment, and what an engine has of it."""

from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.turn import ToolCall, Turn
from tlt_lightning.environments.turns import Message, Turns
from tlt_lightning.environments.workers import Late
from tlt_lightning.rewards.pool import as_score, describe
from tlt_lightning.rollout import Prompt, Request, Response

Call = Callable[..., Coroutine[Any, Any, Any]]
"""Awaits a method of the environment, with its arguments."""


class Conversation:
    """Takes the policy's turns to an environment, and brings back what it says.

    What a tool raises is said to the policy, as in TRL. Anything else that an environment raises, a call that does not
    end in time, or a result of the wrong type breaks the conversation.

    Args:
        environments: Lend the environment.
        row: What it is reset with.
        call: Awaits its methods.
    """

    def __init__(self, environments: Environments, row: dict[str, Any], call: Call) -> None:
        self.environments, self.row, self._call = environments, row, call
        self.environment: Any = environments.take()
        self.num_turns = self.num_cut_turns = self.num_calls = self.num_failed_calls = 0
        self.seconds = 0.0  # that the policy has waited
        self.reward: float | None = None
        self.turn_rewards: tuple[float, ...] = ()  # whose sum `reward` is; none if the environment gave one number
        self.error: BaseException | None = None

    async def begin(self) -> str | list[Message] | None:
        """Reset the environment; return what it puts behind the prompt, if anything, or the whole as messages."""
        said = await self._timed(self.environment.reset, **deepcopy(self.row))
        return said if self.environments.takes_turns else _text("reset", said)

    async def answer(self, turn: Turn) -> list[Message]:
        """Return what the environment says to a turn; nothing at the end of the conversation."""
        if self.environments.takes_turns:
            self.num_calls += len(turn.calls)
            return await self._timed(self.environment.step, turn)
        if self.environments.plays_text:
            said = _text("step", await self._timed(self.environment.step, turn.words))
            return [] if said is None else [{"role": "user", "content": said}]
        return [{"role": "tool", "name": call.name, "content": await self._result(call)} for call in turn.calls]

    async def end(self) -> float | None:
        """Return the environment's reward, None if it gives none."""
        if not self.environments.has_reward:
            return None
        value = await self._timed(self.environment.get_reward)
        if not isinstance(value, list | tuple):
            return as_score(value)
        if len(value) != self.num_turns:
            raise ValueError(f"`get_reward` returned {len(value)} rewards for {self.num_turns} turns")
        self.turn_rewards = tuple(map(as_score, value))
        return sum(self.turn_rewards)

    async def _result(self, call: ToolCall) -> str:
        self.num_calls += 1
        try:
            if call.error or call.name not in self.environments.tools:
                raise ValueError(call.error or f"Tool {call.name} not found.")
            return str(await self._timed(getattr(self.environment, call.name), **call.arguments))
        except Late:
            raise
        except Exception as error:
            self.num_failed_calls += 1
            return str({"error": str(error)})  # the words that policies of TRL know

    async def _timed(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        try:
            return await self._call(method, *args, **kwargs)
        finally:
            self.seconds += perf_counter() - started


def _text(method: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"`{method}` returned {value!r:.200}, which is neither text nor None")
    return value


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


def check_some_held(talks: Sequence[Conversation]) -> None:
    """Raise RuntimeError if all conversations broke, on two rows or more: a policy would learn from zeros."""
    if len({id(talk.row) for talk in talks}) > 1 and all(talk.error is not None for talk in talks):
        raise RuntimeError(
            f"Environment `{talks[-1].environments.name}` failed in all of the last {len(talks)} conversations. The "
            f"last error: {describe(talks[-1].error)}."
        )
