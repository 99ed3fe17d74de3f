"""What waits is dealt out to another number of ranks."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.rank_processes import run_ranks
from tlt_lightning.data.prompts import PromptCursor

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Ranks = list[dict[str, Any]]


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


@pytest.mark.parametrize(
    ("schedule", "before", "after"),
    [("tail", 1, 2), ("partial", 1, 2), ("partial", 2, 1), ("async", 2, 1)],
)
def test_what_waits_is_dealt_out_to_another_number_of_ranks(
    schedule: str, before: int, after: int, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    first, rest = resume(schedule, before, after, policy_path, prompts_path, tmp_path)
    learned = Counter(chain(*(each for state in (*first, *rest) for each in state["learned"])))
    waiting = [prompt for state in rest for prompt in state["deferred"][-1]]
    drawn = 4 * 4 + len(waiting)
    order = PromptCursor(len(Path(prompts_path).read_text().splitlines()), 3).peek(drawn)
    assert learned + Counter(waiting * 2) == Counter(order * 2)  # a group has two responses
    assert all(row.get("schedule/age_max", 0) <= 1 for row in rest[0]["rows"])
    if (schedule, after) == ("tail", 2):  # short, short, long on both, though one has a prompt more
        assert [[len(each) for each in state["deferred"]] for state in rest] == [[2, 3, 1], [1, 2, 0]]
