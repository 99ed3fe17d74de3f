"""Where vLLM's scheduler, its drafter, the look-ups and the selector meet, once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tlt_lightning.engine.vllm.runner_v1 import V1Drafter
from tlt_lightning.engine.vllm.runner_v2 import Lookup, V2Drafter
from tlt_lightning.speculation.controller import SpeculationControl, StepPlan, StepResult
from tlt_lightning.speculation.lookup import LEARNED, Found, RunningTexts, Source
from tlt_lightning.speculation.strategy import OFF, Strategy

_num_tokens, _num_stale_tokens = attrgetter("num_tokens"), attrgetter("num_stale_output_tokens")


@dataclass(frozen=True, slots=True)
class _LookedUp:
    known: int
    found: Found


@dataclass(frozen=True, slots=True)
class _Collected:
    drafted: Sequence[int]
    emitted: Sequence[int]
    learned: tuple[int, int] = (0, 0)
    is_decode: bool = True


class SpeculationSteering:
    """Steers a scheduler: plans every step, collects what it emitted, keeps the texts that are looked up.

    Args:
        control: Chooses the strategies and learns from the steps.
        texts: The running texts; None without drafters that look up.
    """

    def __init__(self, control: SpeculationControl, texts: RunningTexts | None) -> None:
        self.control = control
        self.texts = texts
        self.drafter: V1Drafter | V2Drafter | None = None
        self.num_reprefills = 0
        self._plan: StepPlan | None = None
        self._scheduler: Any = None
        self._proposed: dict[str, _LookedUp] = {}  # look-ups for the step that is scheduled next

    @property
    def strategy(self) -> Strategy:
        """The strategy under which the step that was scheduled last drafts."""
        return OFF if self._plan is None else self._plan.drafts

    def before_schedule(self, scheduler: Any) -> int:
        """Choose the strategy of a step; the K that vLLM is to draft in it."""
        self._scheduler = scheduler
        running, waiting = scheduler.running, len(scheduler.waiting)
        admitted = min(waiting, scheduler.max_num_running_reqs - len(running))
        context = sum(map(_num_tokens, running)) / len(running) if running else 0.0
        self._plan = self.control.plan(len(running) + admitted, context, waiting - admitted)
        if self.texts is not None:
            self.texts.next_step()
        if self.drafter is not None and self.drafter.has_holes and self.strategy.is_learned:
            scheduler.reset_prefix_cache(reset_running_requests=True)
            self.drafter.has_holes = False
            self.num_reprefills += 1
        return self.num_engine_drafts

    @property
    def num_engine_drafts(self) -> int:
        """Tokens that vLLM's own drafter is asked for."""
        raise NotImplementedError

    def after_schedule(self, output: Any) -> None:
        """Attach the plan to the scheduled step, which may finish only after the next one is planned."""
        output.speculation = (self._plan, self._proposed)
        self._proposed = {}
        if self.texts is not None:
            for request_id in output.finished_req_ids:
                self.texts.remove(request_id)

    def drafts(self, scheduler: Any, request_ids: list[str], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts to verify in the next step, given what vLLM's own drafter proposed."""
        if self.strategy.is_off and not any(drafts):
            return drafts
        return [draft[: self.strategy.num_draft_tokens] for draft in drafts]

    def after_step(self, scheduler: Any, output: Any, result: Any) -> None:
        """Collect what each request drafted and emitted in a step."""
        if scheduler.requests.keys().isdisjoint(output.num_scheduled_tokens):
            return  # nothing was scheduled, or all whom it was scheduled for have left
        plan, proposed = output.speculation
        num = len(output.num_scheduled_tokens)
        if _is_plain_decode(scheduler, output, result):
            collected = _Collected((0,) * num, (1,) * num)
        else:
            collected = self._collect(plan, proposed, scheduler, output, result)
        self.control.finished(
            StepResult(
                plan=plan,
                num_drafted=collected.drafted,
                num_emitted=collected.emitted,
                num_learned=collected.learned,
                is_decode=collected.is_decode,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
            )
        )

    def _collect(
        self, plan: StepPlan, proposed: Mapping[str, _LookedUp], scheduler: Any, output: Any, result: Any
    ) -> _Collected:
        drafted, emitted, learned_kept, is_decode = [], [], [], True
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            index, request = result.req_id_to_index.get(request_id), scheduler.requests.get(request_id)
            tokens = result.sampled_token_ids[index] if result.sampled_token_ids and index is not None else ()
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            is_dropped = request is None or (request.num_stale_output_tokens > 0 and request.drop_stale_output)
            if not tokens or is_dropped or num_scheduled > 1 + num_drafts:
                is_decode = False  # a prompt, a part of one, or an answer nobody waits for
                continue
            drafted.append(num_drafts)
            emitted.append(len(tokens))
            if num_drafts:
                source = self._source(plan.verifies, proposed.get(request_id), request)
                if self.texts is not None and source is not None:
                    self.texts.scores.update(source, len(tokens) - 1)
                if source == LEARNED:
                    learned_kept.append(len(tokens) > 1)
        return _Collected(drafted, emitted, (len(learned_kept), sum(learned_kept)), is_decode)

    def _source(self, strategy: Strategy, proposed: _LookedUp | None, request: Any) -> Source | None:
        """Whose drafts a request verified; None if they were fillers."""
        return LEARNED if strategy.is_learned else None

    @property
    def _looks_up(self) -> bool:
        return self.texts is not None and self.strategy.looks_up

    def _look_up(self, request_id: str, tokens: Sequence[int], num_tokens: int) -> Found | None:
        assert self.texts is not None
        return self.texts.propose(request_id, tokens[-self.texts.tail_length :], self.strategy, num_tokens)


class HostSteering(SpeculationSteering):
    """For a V1 model runner: drafts come together between two steps, when the host knows every token."""

    drafter: V1Drafter | None

    @property
    def num_engine_drafts(self) -> int:  # noqa: D102 - inherited
        return self.strategy.num_draft_tokens if self.strategy.is_learned and self.drafter is not None else 0

    def drafts(self, scheduler: Any, request_ids: list[str], drafts: list[list[int]]) -> list[list[int]]:  # noqa: D102
        drafts = super().drafts(scheduler, request_ids, drafts)
        if self._looks_up:
            for place, request_id in enumerate(request_ids):
                request = scheduler.requests.get(request_id)
                if request is None or request.is_prefill_chunk:
                    continue
                found = self._look_up(request_id, request.all_token_ids, self.strategy.num_draft_tokens)
                if found is not None:
                    self._proposed[request_id] = _LookedUp(request.num_tokens, found)
                    drafts[place] = found.tokens
        if self.drafter is not None:
            self.drafter.replace(self._proposed)
        return drafts

    def _source(self, strategy: Strategy, proposed: _LookedUp | None, request: Any) -> Source | None:
        return super()._source(strategy, proposed, request) if proposed is None else proposed.found.source


class DeviceSteering(SpeculationSteering):
    """For a V2 model runner: the host looks up one to two steps behind the device, which keeps what fits."""

    drafter: V2Drafter | None

    @property
    def num_engine_drafts(self) -> int:  # noqa: D102 - inherited
        return self.strategy.num_draft_tokens

    def look_up(self, request_ids: list[str]) -> Mapping[str, Lookup]:
        """Continuations of texts from where the host knows them, long enough to outlast the steps under way.

        None in a step of the head's alone, even for requests whose siblings know better: looking all of them up may
        cost more than the better drafts gain (`benchmarks/results/fixes.md`), so the selector has an arm for either.
        """
        if not self._looks_up:
            return {}
        reach = 3 * self.strategy.num_draft_tokens + 2  # two steps under way emit at most K + 1 each
        lookups = {}
        for request_id in request_ids:
            request = self._scheduler.requests.get(request_id)
            if request is None:
                continue
            found = self._look_up(request_id, request.all_token_ids, reach)
            if found is not None:
                lookups[request_id] = Lookup(request.num_tokens, found.tokens)
                self._proposed[request_id] = _LookedUp(request.num_tokens, found)
        return lookups

    def _source(self, strategy: Strategy, proposed: _LookedUp | None, request: Any) -> Source | None:
        other = super()._source(strategy, proposed, request)
        if proposed is None:
            return other
        since = list(request.all_token_ids[proposed.known :])
        fits = proposed.found.tokens[: len(since)] == since and len(proposed.found.tokens) > len(since)
        return proposed.found.source if fits else other


def _is_plain_decode(scheduler: Any, output: Any, result: Any) -> bool:
    """True if every request of the step emitted one token and somebody waits for it; no loop of Python's own."""
    scheduled, requests = output.num_scheduled_tokens, scheduler.requests
    return (
        not output.scheduled_spec_decode_tokens
        and output.total_num_scheduled_tokens == len(scheduled) == len(result.sampled_token_ids)
        and all(result.sampled_token_ids)
        and scheduled.keys() <= requests.keys()
        and not any(map(_num_stale_tokens, map(requests.__getitem__, scheduled)))
    )
