import signal
import time
from pathlib import Path

import pytest

from tests.support.rank_processes import run_ranks

DIED = "The run cannot go on: rank 1 has died: its process ended without a word."
STOPPED = "The run cannot go on: rank 1 ended with SIGTERM."


@pytest.mark.parametrize(
    ("signal_name", "ranks", "place", "statuses", "sentence"),
    [
        ("SIGTERM", "1", "rollout", [1, 143], STOPPED),
        ("SIGTERM", "1", "update", [1, 143], STOPPED),
        ("SIGTERM", "0,1", "rollout", [143, 143], None),
        ("SIGKILL", "1", "start", [1, -signal.SIGKILL], DIED),
        ("SIGKILL", "1", "update", [1, -signal.SIGKILL], DIED),
        ("SIGKILL", "1", "checkpoint", [1, -signal.SIGKILL], DIED),
        ("SIGKILL", "1", "stuck", [1, -signal.SIGKILL], DIED),
    ],
)
def test_the_end_of_a_rank_ends_all_with_a_failure_that_names_it(
    signal_name: str,
    ranks: str,
    place: str,
    statuses: list[int],
    sentence: str | None,
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
) -> None:
    arguments = (policy_path, prompts_path, str(tmp_path), signal_name, ranks, place)
    ended = run_ranks("tests.support.two_ranks_faults", tmp_path, *arguments, timeout=100)
    seconds = time.time() - float((tmp_path / "signalled").read_text())
    assert ended.statuses == statuses, ended.stderr[-3000:]
    assert sentence is None or sentence in ended.stderr
    assert seconds < 30
