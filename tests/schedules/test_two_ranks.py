"""Two ranks: one writes answers ahead while the other still writes its own; and what waits is dealt out to others."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.rank_processes import run_ranks
from tests.support.ranks.schedules.ahead import LONG, NUM_ITERATIONS, NUM_STEPS, SHORT
from tests.support.speculation_engines import save_endless_policy
from tlt_lightning.data.prompts import PromptCursor

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(prompts_path: str, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    out = tmp_path_factory.mktemp("ranks")
    policy = save_endless_policy(out / "policy")
    done = run_ranks("tests.support.ranks.schedules.ahead", out, policy, prompts_path, str(out))
    assert done.statuses == [0, 0], done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_the_rank_that_waits_writes_answers_to_its_next_prompts(ranks: Ranks) -> None:
    early, late = ranks
    assert len(early["calls"]) == 2 * NUM_ITERATIONS
    assert len(late["calls"]) == NUM_ITERATIONS  # nobody waits for the last one
    asked = [[request["prompt"] for request in call] for call in early["calls"]]
    for ahead, coming in ((1, 2), (3, 4)):
        assert len(asked[ahead]) == 2 * 2
        assert sorted(map(tuple, asked[ahead] * 2)) == sorted(map(tuple, asked[coming]))


def test_it_stops_when_the_last_rank_is_done_and_keeps_what_there_is(ranks: Ranks) -> None:
    early, late = ranks
    ahead = [text for request in early["calls"][2] for text in request["earlier"][-2:]]
    assert all(len(text) == SHORT or text[-1] == 1 for text in ahead)  # all of it
    for number in (3, 5):
        assert NUM_STEPS <= early["written"][number] <= 2 * 2 * 4 * (NUM_STEPS + 1) < 2 * 2 * LONG
    assert [row["schedule/written_ahead"] for row in early["rows"]] == early["written"][1::2]
    assert early["rows"] == late["rows"]
    assert early["open"] == [True, False, False]  # callbacks have what is left of the window
    assert late["open"] == []


def test_both_ranks_know_all_answers_and_draft_from_those_to_their_prompts(ranks: Ranks) -> None:
    early, late = ranks
    assert early["history"] == late["history"]
    for iteration in range(1, NUM_ITERATIONS):
        assert early["rows"][iteration]["speculation/proposed_earlier"] > 0
        for requests in (early["calls"][2 * iteration], late["calls"][iteration]):
            held = [*early["history"][iteration - 1].values()]
            assert all(not request["earlier"] or request["earlier"] in held for request in requests)
        assert all(len(request["earlier"]) >= 2 for request in early["calls"][2 * iteration])
    kept = early["rows"][-1]["speculation/kept_earlier"]
    assert 0 <= kept <= early["rows"][-1]["speculation/proposed_earlier"]


def resume(
    schedule: str, before: int, after: int, policy_path: str, prompts_path: str, out: Path
) -> tuple[Ranks, Ranks]:
    """One iteration on a number of ranks, then three on another."""
    states = []
    for name, number, given in (("first", before, []), ("rest", after, [str(out / "first" / "end.ckpt")])):
        (folder := out / name).mkdir()
        arguments = (policy_path, prompts_path, str(folder), schedule, str(number), *given)
        done = run_ranks("tests.support.ranks.schedules.redealt", folder, *arguments, num_ranks=number)
        assert set(done.statuses) == {0}, done.stderr[-3000:]
        states.append([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(number)])
    first, rest = states
    return first, rest


@pytest.mark.parametrize("schedule", ["tail", "partial"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_what_waits_is_dealt_out_to_another_number_of_ranks(
    schedule: str, before: int, after: int, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    first, rest = resume(schedule, before, after, policy_path, prompts_path, tmp_path)
    learned = Counter(chain(*(each for state in (*first, *rest) for each in state["learned"])))
    waiting = [prompt for state in rest for prompt in state["aside"][-1]]
    drawn = 4 * 4 + len(waiting)
    order = PromptCursor(len(Path(prompts_path).read_text().splitlines()), 3).coming(drawn)
    assert learned + Counter(waiting * 2) == Counter(order * 2)  # a group has two responses
    assert all(row["schedule/age_max"] <= (1 if schedule == "partial" else 0) for row in rest[0]["rows"])
    if (schedule, after) == ("tail", 2):  # short, short, long on both, though one has a prompt more
        assert [[len(each) for each in state["aside"]] for state in rest] == [[2, 3, 1], [1, 2, 0]]
