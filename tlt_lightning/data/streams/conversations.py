"""Hold conversations of the policy with environments beside an engine that writes others meanwhile."""

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from tlt_lightning.data.prompts import PromptSource
from tlt_lightning.data.streams.requests import RequestStream
from tlt_lightning.engine.base import OnProgress, RolloutEngine, RolloutProgress
from tlt_lightning.engine.requests import not_begun
from tlt_lightning.environments.conversation import Conversation, Trajectory
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.environments.turn import Turn, read_calls
from tlt_lightning.environments.turns import Message, Turns
from tlt_lightning.environments.workers import EnvironmentWorkers
from tlt_lightning.rewards.pool import SHORT, describe
from tlt_lightning.rollout import Prompt, Request, Response, Sampling

log = logging.getLogger(__name__)

_CHARACTERS = 32
"""Most that a token stands for: what has more than fit is not read, which takes seconds a megabyte."""


class ConversationStream(RequestStream):
    """Yields whole conversations as responses: a turn that ends goes to its environment, and the engine writes on.

    A conversation's request is asked for again, by its id, with what was written and observed; its prefix is in the
    engine's cache. While environments work, others are written. A conversation that breaks is a response of what it
    has. One that is stopped waits with its environment, and goes on when it is asked for with what is `written` of it;
    what environments answer meanwhile is kept.

    Args:
        engine: Writes the policy's turns.
        environments: Lend an environment to each conversation.
        limits: Limits of turns, tokens and time.
        tell: As in `RequestStream`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environments: Environments,
        limits: TurnLimits,
        tell: OnProgress = lambda progress: None,
    ) -> None:
        super().__init__(engine, tell)
        self.environments, self.limits, self.gives_rewards = environments, limits, environments.has_reward
        self.waits = limits.waits or engine.num_ranks > 1  # ranks of one engine must end their `generate` together
        self.workers = EnvironmentWorkers(limits.seconds, self.tell_again)
        self._trajectories: dict[int, Trajectory] = {}  # by request, those that ended until they are taken
        self._written: set[int] = set()  # requests in the engine
        self._stopping: set[int] = set()  # those of them that were stopped, and may end a turn all the same
        self._ended: deque[Response] = deque()
        self._num_ended = 0  # conversations since `generate` began
        self._has_warned = False

    @override
    def speak(self, source: PromptSource, turns: Turns, room: int) -> None:
        self._source, self._turns, self._room = source, turns, room

    @override
    def trajectory(self, number: int, *, forget: bool = False) -> Trajectory:
        return self._trajectories.pop(number) if forget else self._trajectories[number]

    @override
    def ask(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, prompts: Sequence[Prompt] = ()
    ) -> None:
        if self._responses is None:
            self._sampling, self._seed, self._num_ended = sampling, seed, 0
        ready = [*requests[len(prompts) :]]  # of no conversation
        self._written |= {request.id for request in ready}
        self.open_ids |= {request.id for request in requests}
        for request, prompt in zip(requests, prompts, strict=False):
            known = self._trajectories.get(request.id)
            if request.written is not None and known is not None and known.is_aside:
                ready += self._resume(known)
                continue
            talk = Conversation(self.environments, prompt.row, self.workers.call)
            limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens
            trajectory = Trajectory(talk, replace(request, written=None), prompt, limit, self._turns)
            self._trajectories[request.id] = trajectory
            self.workers.submit((trajectory, "begin"), talk.begin())
        while self.waits and self._num_away:
            ready = sorted([*ready, *self._heard(wait=True)], key=lambda request: request.id)  # by no clock
        super().ask(ready, sampling, seed=seed)

    @override
    def __next__(self) -> Response:
        while not self._ended:
            must_wait = self._num_away > 0 and (self.waits or not self._written)
            self._write(self._heard(wait=must_wait))
            if not must_wait and not self._ended:
                self._receive(super().__next__())
        self._num_ended += 1
        response = self._ended.popleft()
        self.open_ids.discard(response.request_id)
        return response

    @override
    def stop(self, ids: Collection[int]) -> None:
        stopped = self.open_ids & {*ids} - {response.request_id for response in self._ended}
        if self._unread is not None:
            self._written -= stopped
            self._unread = [request for request in self._unread if request.id not in stopped]
        if in_engine := stopped & self._written:
            self._stopping |= in_engine
            self.engine.stop(in_engine)
        for number in sorted(stopped - in_engine):
            trajectory = self._trajectories[number]
            nothing = not_begun(trajectory.request, self.engine.policy_version)
            self._set_aside(trajectory, trajectory.response or nothing)

    @property
    def _num_away(self) -> int:
        """Conversations whose environments work."""
        return len(self.open_ids) - len(self._written) - len(self._ended)

    @override
    def close(self) -> None:
        super().close()
        self.workers.close()

    @override
    def _follow(self, progress: RolloutProgress) -> None:
        waiting = len(self.open_ids) - progress.running
        super()._follow(replace(progress, waiting=waiting, finished=self._num_ended))
        if not self.waits:
            self._write(self._heard(wait=False))

    # From the engine to environments

    def _receive(self, response: Response) -> None:
        """Take a turn to its environment."""
        number = response.request_id
        self._written.discard(number)
        self.open_ids.add(number)  # until it is yielded: it may go on, or wait in `_ended`
        is_stopped = number in self._stopping
        self._stopping.discard(number)
        trajectory = self._trajectories.get(number)
        if trajectory is None:
            return self._ended.append(response)
        if response.is_unfinished:
            trajectory.response = response
            return self._set_aside(trajectory, response)
        is_full = len(response.token_ids) >= trajectory.limit
        trajectory.response = replace(response, finish_reason=response.finish_reason if is_full else "stop")
        talk, turns = trajectory.talk, trajectory.turns
        if talk.error is not None:
            return self._end(trajectory)
        talk.num_turns += 1
        is_cut = response.finish_reason == "length"
        talk.num_cut_turns += is_cut
        start, stop = response.turns[-1]
        ids, before = response.token_ids[start:stop], [*trajectory.prompt.ids, *response.token_ids[:start]]
        words = turns.words(ids)
        beside, calls = read_calls(turns.tokenizer, words, ids, before, turns.tools) if turns.tools else (words, [])
        if calls or self.environments.plays_text or self.environments.takes_turns:
            turn = Turn(words, beside, calls, before, ids, response.logps[start:stop], is_cut)
            self.workers.submit((trajectory, "answer"), talk.answer(turn))
        else:
            self.workers.submit((trajectory, "end"), talk.end())
        if is_stopped:  # with its last token of the turn: what the environment says is kept
            self._set_aside(trajectory, response)
        return None

    # From environments to the engine

    def _heard(self, *, wait: bool) -> list[Request]:
        """Return the requests that environments have made ready; with `wait` one of them has done something."""
        ready: list[Request] = []
        for (trajectory, what), result in self.workers.take(wait=wait):
            if trajectory.is_aside:
                trajectory.held = what, result
            else:
                ready += self._hear(trajectory, what, result)
        return ready

    def _hear(self, trajectory: Trajectory, what: str, result: Any) -> list[Request]:
        error = result if isinstance(result, BaseException) else None
        try:
            if error is None and what == "begin":
                self._open(trajectory, result)
            elif error is None and what == "answer":
                return self._observe(trajectory, result)
        except Exception as raised:  # what an environment says cannot be told the policy
            error = raised
        if error is not None:
            self._break(trajectory, error)
        elif what == "end":
            trajectory.talk.reward = result
        if trajectory.response is None:
            return [self._go_on(trajectory)]
        self._end(trajectory)
        return []

    def _open(self, trajectory: Trajectory, said: str | list[Message] | None) -> None:
        """Put what `reset` says behind the prompt, or in its place; what is longer than any takes from the response."""
        prompt = trajectory.prompt
        if said is None:
            return
        if isinstance(said, str):
            *before, last = self._source.messages(prompt.row)
            said = [*before, {**last, "content": last["content"] + said}]
        else:
            trajectory.turns = trajectory.turns.with_tools(trajectory.talk.environment.tools)
        text = trajectory.turns.prompt(said)
        is_long = len(text) > _CHARACTERS * (self._room + trajectory.limit)
        ids = [] if is_long else trajectory.turns.ids(text)
        left = trajectory.limit - max(0, len(ids) - self._room)
        if is_long or left < 1:
            raise ValueError(f"`reset` says {said!r:.200}, for which `max_prompt_tokens` and `max_tokens` have no room")
        trajectory.prompt, trajectory.limit = replace(prompt, text=text, ids=ids), left

    def _observe(self, trajectory: Trajectory, said: list[Message]) -> list[Request]:
        """Put what an environment says behind the response, and go on if there is room."""
        response = trajectory.response
        assert response is not None
        left = trajectory.limit - len(response.token_ids)
        is_over = sum(len(str(each.get("content"))) for each in said) > _CHARACTERS * left
        observed = trajectory.turns.between(said, response.token_ids[-1]) if said and not is_over else []
        is_over |= len(observed) >= left
        if not said or is_over or trajectory.talk.num_turns == self.limits.most:
            trajectory.response = replace(response, finish_reason="length" if said and is_over else "stop")
            self.workers.submit((trajectory, "end"), trajectory.talk.end())
            return []
        trajectory.response = response.observing(observed)
        return [self._go_on(trajectory)]

    def _go_on(self, trajectory: Trajectory) -> Request:
        """Return the request for the rest of a turn; of one token for a conversation that broke before it began."""
        self._written.add(trajectory.request.id)
        start = 0 if trajectory.response is None else trajectory.response.turns[-1][0]
        most = 1 if trajectory.talk.error is not None else self.limits.tokens or trajectory.limit
        return replace(
            trajectory.request,
            prompt_ids=trajectory.prompt.ids,
            written=trajectory.response,
            max_tokens=min(start + most, trajectory.limit),
        )

    def _write(self, requests: Sequence[Request]) -> None:
        if requests:
            super().ask(requests, self._sampling, seed=self._seed)

    # Ends

    def _end(self, trajectory: Trajectory) -> None:
        assert trajectory.response is not None
        if trajectory.talk.error is None:
            self.environments.give_back(trajectory.talk.environment)
        self._ended.append(trajectory.response)

    def _set_aside(self, trajectory: Trajectory, response: Response) -> None:
        trajectory.is_aside = True
        self._ended.append(replace(response, finish_reason="unfinished"))

    def _resume(self, trajectory: Trajectory) -> list[Request]:
        """Go on with a conversation that was stopped; return its request, unless its environment works."""
        trajectory.is_aside, held, trajectory.held = False, trajectory.held, None
        if held is not None:
            return self._hear(trajectory, *held)
        is_working = any(each is trajectory for each, _ in self.workers.under_way)
        return [] if is_working else [self._go_on(trajectory)]

    def _break(self, trajectory: Trajectory, error: BaseException) -> None:
        trajectory.talk.error, trajectory.talk.reward = error, 0.0
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "Environment `%s` failed, and the conversation earns 0: %s. The run goes on; later failures are only "
            "counted, in `environment/failures`. Row: %s.",
            *(self.environments.name, describe(error), SHORT.repr(trajectory.prompt.row)),
        )


def check_conversations(environments: Environments | None, engine: RolloutEngine, sampling: Sampling) -> None:
    """Raise ValueError if an engine cannot go on with requests that it samples so, and environments want it."""
    if environments is not None and (sampling.stop_strings or not engine.can_stop):
        raise ValueError(
            f"`environment` goes on with requests, which must end with a token, and `engine` {type(engine).__name__} "
            "must take while it writes: use VLLMEngine, and `stop_token_ids` in the place of `stop_strings` "
            f"{sampling.stop_strings}."
        )
