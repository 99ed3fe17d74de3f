"""The parts of the V2 runner's adapter that need no GPU: splicing look-ups into drafts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.engine.vllm.runner_v2 import Lookup, pack_lookups, splice
from tlt_lightning.engine.vllm.steering import DeviceSteering
from tlt_lightning.speculation.controller import SpeculationControl
from tlt_lightning.speculation.lookup import LEARNED, RunningTexts
from tlt_lightning.speculation.strategy import OFF, Strategy


def spliced(written: list[int], continuation: list[int], learned: list[int]) -> list[int]:
    """Drafts of one request of which the host knows 10 tokens and the device also `written`."""
    packed = torch.from_numpy(pack_lookups(["a"], {"a": Lookup(10, continuation)}))
    seen = [*written, *[-7] * len(continuation)][: len(continuation)]  # beyond `written` the row holds old rubbish
    return splice(torch.tensor([learned]), packed, torch.tensor([seen]), torch.tensor([10 + len(written)]))[0].tolist()


@pytest.mark.parametrize(
    ("written", "continuation", "expected"),
    [
        ([], [5, 6, 7, 8], [5, 6, 7]),
        ([5], [5, 6, 7, 8], [6, 7, 8]),
        ([5, 6], [5, 6, 7, 8], [7, 8, 0]),
        ([5, 9], [5, 6, 7, 8], [0, 0, 0]),
        ([5, 6, 7, 8], [5, 6, 7, 8], [0, 0, 0]),
        ([5, 6, 7, 8, 9], [5, 6, 7, 8], [0, 0, 0]),
        ([4, 6], [5, 6, 7, 8], [0, 0, 0]),
    ],
)
def test_a_look_up_is_taken_where_it_was_right_so_far(
    written: list[int], continuation: list[int], expected: list[int]
) -> None:
    assert spliced(written, continuation, [0, 0, 0]) == expected


def test_requests_without_a_look_up_keep_their_drafts() -> None:
    lookups = {"b": Lookup(4, [1, 2, 3]), "d": Lookup(6, [9])}
    packed = pack_lookups(["a", "b", "c", "d"], lookups)
    assert packed.tolist() == [[0, 0, 0, 0, 0], [4, 3, 1, 2, 3], [0, 0, 0, 0, 0], [6, 1, 9, 0, 0]]
    drafts = torch.full((4, 2), 50)
    written = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    total = torch.tensor([8, 5, 3, 6])
    merged = splice(drafts, torch.from_numpy(packed), written, total)
    assert merged.tolist() == [[50, 50], [2, 3], [50, 50], [9, 50]]


def steering(strategy: Strategy) -> tuple[DeviceSteering, Any]:
    selector = ScriptedSelector(("learned", "sibling"))
    selector.script = lambda state: strategy
    made = DeviceSteering(
        SpeculationControl(selector, steps_per_choice=1), RunningTexts(siblings=True, ngram=False, keeps=False)
    )
    assert made.texts is not None
    made.texts.add("a", [1, 2, 3])
    made.texts.add("b", [1, 2, 3])
    made.texts._texts["a"].tokens += [20, 21, 22, 23, 24, 25, 26]  # type: ignore[operator]
    request = SimpleNamespace(
        num_tokens=4, all_token_ids=[1, 2, 3, 20], num_stale_output_tokens=0, drop_stale_output=False
    )
    scheduler = SimpleNamespace(running=[request], waiting=[], max_num_running_reqs=4, requests={"b": request})
    return made, scheduler


def test_the_host_looks_up_beyond_the_steps_under_way() -> None:
    made, scheduler = steering(Strategy(1, "sibling"))
    assert made.before_schedule(scheduler) == 1
    assert made.look_up(["a", "b"]) == {"b": Lookup(4, [21, 22, 23, 24, 25])}


def test_nothing_is_looked_up_for_the_head_alone_or_while_off() -> None:
    for strategy in (Strategy(2, "learned"), OFF):
        made, scheduler = steering(strategy)
        made.before_schedule(scheduler)
        assert made.look_up(["b"]) == {}
        assert made.texts is not None
        assert made.texts.indices["sibling"].num_tokens == 0


def test_the_device_may_have_kept_a_look_up_or_not_and_the_host_finds_out() -> None:
    for strategy, since, source in [
        (Strategy(2, "sibling"), [21, 22], ("sibling", 4)),
        (Strategy(2, "sibling"), [21, 9], None),
        (Strategy(2, "mixed"), [21, 9], LEARNED),
        (Strategy(2, "mixed"), [], ("sibling", 4)),
    ]:
        made, scheduler = steering(strategy)
        made.before_schedule(scheduler)
        made.look_up(["b"])
        request = scheduler.requests["b"]
        request.all_token_ids = [*request.all_token_ids, *since]
        assert made._source(strategy, made._proposed["b"], request) == source


def test_without_a_proposal_fillers_are_nobodys() -> None:
    made, scheduler = steering(Strategy(2, "sibling"))
    made.before_schedule(scheduler)
    assert made._source(Strategy(2, "sibling"), None, scheduler.requests["b"]) is None
    for drafter in ("learned", "mixed"):
        assert made._source(Strategy(2, drafter), None, scheduler.requests["b"]) == LEARNED
