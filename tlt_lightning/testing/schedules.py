"""Check a schedule in small rollouts that nobody writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from tlt_lightning.rollout import Response
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand, RolloutSchedule
from tlt_lightning.testing.methods import check_methods, named, shown


def check_schedule(schedule: RolloutSchedule, wanted: int = 4) -> None:
    """Check a schedule in forty rollouts: what it begins, starts and chooses, and that nothing waits for ever.

    Args:
        schedule: Fresh from its constructor.
        wanted: Groups that each rollout has to bring.
    """
    check_methods(schedule)
    fresh, num_drawn, deferred = deepcopy(schedule), 0, list[PendingGroup]()

    def ask(method: str, *given: Any) -> Any:
        """Return what the schedule says; one that knows nothing of earlier rollouts has to say the same."""
        found, again = (getattr(each, method)(*given) for each in (schedule, deepcopy(fresh)))
        assert repr(found) == repr(again), (
            f"{named(schedule, method)} returned {shown(found)}, and {shown(again)} from a new object: keep no state, "
            "because a resumed run makes the schedule anew."
        )
        return found

    for iteration in range(40):
        demand = RolloutDemand(wanted=wanted, iteration=iteration, is_first=iteration % 4 < 3)
        begun, num_fresh = _begun(schedule, ask("begin", demand, tuple(deferred)), demand, deferred)
        waiting = [group for group in deferred if group.draw not in {each.draw for each in begun}]
        draws = range(num_drawn, num_drawn + num_fresh)
        num_drawn += num_fresh
        new = [PendingGroup(prompt=i, draw=i, drawn_in=iteration, begun_in=iteration) for i in draws]
        groups = [*begun, *(replace(each, expected_tokens=float(_length(each))) for each in new)]
        places = _places(schedule, "start", ask("start", demand, groups), range(len(groups)), at_least=wanted)
        waiting += [group for place, group in enumerate(groups) if place not in places]
        groups = [group for place, group in enumerate(groups) if place in places]
        # All write a token at a time; what has ended before, and was not chosen, ends at once.
        left = [_length(group) - group.num_tokens for group in groups]
        order, chosen = sorted(range(len(groups)), key=lambda place: (left[place], place)), None
        for count in range(1, len(groups) + 1):
            if (chosen := ask("choose", demand, tuple(groups), tuple(order[:count]))) is not None:
                chosen = _places(schedule, "choose", chosen, order[:count], at_least=wanted)
                break
        who = named(schedule, "choose")
        assert chosen is not None, f"{who} returned None with all responses complete: choose `demand.wanted`, {wanted}."
        assert len(chosen) == wanted, f"{who} returned {chosen}: choose `demand.wanted` places, {wanted}."
        steps = left[order[count - 1]] if schedule.stops else max(left)
        deferred = waiting + [
            replace(group, deferrals=group.deferrals + 1, responses=(_written(group, group.num_tokens + steps),))
            for place, group in enumerate(groups)
            if place not in chosen
        ]
    assert len(deferred) <= 5 * wanted, (
        f"{named(schedule, 'begin')} leaves {len(deferred)} groups deferred after {iteration + 1} rollouts: take up "
        "what waits, or nothing learns from it."
    )


def _length(group: PendingGroup) -> int:
    return 1 + group.prompt * 7 % 23


def _written(group: PendingGroup, num_tokens: int) -> Response:
    length = min(num_tokens, _length(group))
    reason = "stop" if length == _length(group) else "unfinished"
    return Response(0, [3] * length, [-1.0] * length, reason, (0,))


def _begun(
    schedule: RolloutSchedule, found: Any, demand: RolloutDemand, deferred: Sequence[PendingGroup]
) -> tuple[list[PendingGroup], int]:
    who = f"{named(schedule, 'begin')} returned {shown(found)}"
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], int) and found[1] >= 0
    assert is_pair, f"{who}: return the groups that it takes up, and how many it draws besides."
    groups, num_fresh = list(found[0]), found[1]
    draws, known = [getattr(group, "draw", None) for group in groups], {group.draw for group in deferred}
    assert len({*draws}) == len(draws) and {*draws} <= known, f"{who}: take groups out of `deferred`, each once."
    is_enough = len(groups) + num_fresh >= demand.wanted
    assert is_enough, f"{who}: take up and draw `demand.wanted` groups at least, {demand.wanted}."
    goes_on = any(group.responses for group in groups)
    assert schedule.continues or not goes_on, (
        f"{who}, with responses of older weights, and its `continues` is False: take up "
        "`group.without_responses(demand.iteration)`, or leave `continues` True."
    )
    return groups, num_fresh


def _places(schedule: RolloutSchedule, method: str, found: Any, known: Collection[int], *, at_least: int) -> list[int]:
    is_known = isinstance(found, Collection) and all(place in known for place in found)
    assert is_known and len({*found}) == len(found) >= at_least, (
        f"{named(schedule, method)} returned {shown(found)}: return at least {at_least} different places out of "
        f"{shown(list(known))}."
    )
    return [*found]
