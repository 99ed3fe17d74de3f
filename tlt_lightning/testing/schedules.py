"""Check a schedule in small rollouts that nobody writes."""

from collections.abc import Callable
from copy import deepcopy

from tlt_lightning.metrics import IterationLog
from tlt_lightning.rollout import Response
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand, RolloutSchedule
from tlt_lightning.schedules.under_way import RolloutUnderWay
from tlt_lightning.testing.plugin import named


def check_schedule(schedule: RolloutSchedule, wanted: int = 4) -> None:
    """Check a schedule in forty rollouts: what it takes up and chooses, and that nothing waits for ever.

    Args:
        schedule: Fresh from its constructor.
        wanted: Groups that each rollout has to bring.
    """
    fresh = deepcopy(schedule)
    kept, anew = (_learned(make, wanted) for make in (lambda: schedule, lambda: deepcopy(fresh)))
    who = f"`{type(schedule).__name__}`"
    assert kept == anew, f"{who} decides otherwise where it is made anew, as in a resumed run: keep no state."


def _learned(make: Callable[[], RolloutSchedule], wanted: int) -> list[list[int]]:
    """Return which draws each of forty rollouts learns from, a schedule being made for each."""
    backlog, learned, num_drawn = Backlog(make()), [], 0
    for iteration in range(40):
        schedule = backlog.schedule = make()
        demand = RolloutDemand(wanted=wanted, iteration=iteration, is_first=iteration % 4 < 3)
        who, waiting = named(schedule, "begin"), backlog.deferred
        known = [group.draw for group in waiting]
        begun, num_fresh = backlog.begin(demand, IterationLog())
        draws = [group.draw for group in begun]
        is_known = len({*draws}) == len(draws) and {*draws} <= {*known}
        assert is_known, f"{who} took up draws {draws} of {known}: take groups out of `deferred`, each once."
        assert schedule.continues or not any(group.responses for group in begun), (
            f"{who} took up responses of older weights, and its `continues` is False: take up "
            "`group.without_responses(demand.iteration)`, or leave `continues` True."
        )
        going = {each.draw for each in waiting if any(response.is_unfinished for response in each.responses)}
        left = sorted(going - {group.draw for group in begun if group.responses})
        assert not (schedule.is_asynchronous and left), (
            f"{who} leaves draws {left}, or begins them anew, and an engine may be writing them: take up what goes on."
        )
        new = [
            PendingGroup(prompt=i, draw=i, drawn_in=iteration, begun_in=iteration, expected_tokens=float(_length(i)))
            for i in range(num_drawn, num_drawn + num_fresh)
        ]
        num_drawn += num_fresh
        rollout = RolloutUnderWay(schedule, demand, backlog.start(demand, [*begun, *new]), group_size=1)
        _write(rollout)
        learned.append(rollout.taken)
        backlog.end(rollout, IterationLog())
    assert len(backlog.deferred) <= 5 * wanted, (
        f"{who} leaves {len(backlog.deferred)} groups deferred after {iteration + 1} rollouts: take up what waits, or "
        "nothing learns from it."
    )
    return learned


def _length(prompt: int) -> int:
    return 1 + prompt * 7 % 23


def _write(rollout: RolloutUnderWay) -> None:
    """Write a token of each response at a time, until all have ended or the schedule stops the others."""
    left, steps, is_over = {}, 0, False
    for request in rollout.requests([[3]] * len(rollout.groups)):
        begun = 0 if request.written is None else len(request.written.token_ids)
        left[request.id] = begun, _length(rollout.groups[rollout.place_of(request.id)].prompt)
    for request_id, (begun, length) in sorted(left.items(), key=lambda each: each[1][1] - each[1][0]):
        steps = steps if is_over else length - begun
        count = min(begun + steps, length)
        reason = "stop" if count == length else "unfinished"
        is_over |= rollout.add(Response(request_id, [3] * count, [-1.0] * count, reason, (0,)))
