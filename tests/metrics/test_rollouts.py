from types import SimpleNamespace

import pytest
import torch

from tlt_lightning.metrics.iteration_log import IterationLog, combine
from tlt_lightning.metrics.rollouts import log_conversation, log_rollouts, tail_share, zero_std_share
from tlt_lightning.objectives import group_statistics
from tlt_lightning.rollout import Prompt, Response, Rollout, has_spread


def rollout(group: int, reward: float, length: int = 3, reason: str = "stop") -> Rollout:
    response = Response(0, [2] * length, [-1.0] * length, reason, (0,))
    return Rollout(Prompt("q", [2]), response, "text", group, {"score": reward}, reward)


def test_rollout_metrics_count_what_they_say() -> None:
    rollouts = [rollout(0, 1.0, 10), rollout(0, 1.0, 20), rollout(1, 0.0, 30, "length"), rollout(1, 1.0, 40)]
    log = IterationLog()
    log_rollouts(log, rollouts)
    metrics = combine([log.read()])
    assert metrics["rollout/tokens"] == 100
    assert metrics["rollout/length_max"] == 40
    assert metrics["rollout/length_mean"] == metrics["rollout/length_p50"] == 25
    assert metrics["rollout/length_p90"] == pytest.approx(37)  # between the third and the fourth
    assert metrics["rollout/length_p99"] == pytest.approx(39.7)
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["reward/mean"] == metrics["reward/score"] == 0.75
    assert metrics["reward/std"] == pytest.approx(torch.tensor([1.0, 1, 0, 1]).std(correction=0).item())
    assert metrics["reward/zero_std_groups"] == zero_std_share(rollouts) == 0.5
    assert zero_std_share(rollouts[:2]) == 1


def test_conversations_are_logged_in_the_mean_and_what_went_wrong_is_counted() -> None:
    log, names = IterationLog(), ("num_turns", "num_cut_turns", "seconds", "num_calls", "num_failed_calls", "error")
    for values in ((2, 1, 0.25, 3, 1, None), (4, 2, 0.75, 1, 0, ValueError()), (3, 0, 0.5, 2, 0, None)):
        log_conversation(log, SimpleNamespace(**dict(zip(names, values, strict=True))))  # type: ignore[arg-type]
    found = {name.removeprefix("environment/"): value for name, value in combine([log.read()]).items()}
    sums = {"cut_turns": 3, "calls": 6, "failed_calls": 1, "failures": 1}
    assert found == {"turns": 3, "tool_seconds": 0.5, **sums}


def test_two_ranks_report_what_one_does() -> None:
    rollouts = [
        rollout(n // 2, reward, length) for n, (reward, length) in enumerate(((0.1, 1), (0.1, 2), (0.9, 3), (0.4, 99)))
    ]
    ranks, seen = (rollouts[:2], rollouts[2:]), []
    for own in ranks:
        log_rollouts(IterationLog(), own, lambda measured: seen.append(measured) or [measured])  # type: ignore[func-returns-value]
    logs = [IterationLog() for _ in (0, 1)]
    for log, own in zip(logs, ranks, strict=True):
        log_rollouts(log, own, lambda _: seen)
    alone = IterationLog()
    log_rollouts(alone, rollouts)
    assert combine([log.read() for log in logs]) == combine([alone.read()])


def test_a_reward_is_averaged_over_the_responses_to_which_it_applies() -> None:
    rollouts = [rollout(0, 1.0), rollout(1, 1.0), rollout(1, 0.0)]
    rollouts[0].rewards, rollouts[1].rewards, rollouts[2].rewards = {"math": 1.0}, {"code": 1.0}, {"code": 0.0}
    log = IterationLog()
    log_rollouts(log, rollouts)
    numbers = combine([log.read()])
    assert (numbers["reward/math"], numbers["reward/code"]) == (1.0, 0.5)
    assert [each.is_correct for each in rollouts] == [True, True, False]


@pytest.mark.parametrize("other", [0.8, 0.8001, 0.0])
def test_a_group_has_a_signal_exactly_where_its_advantages_do(other: float) -> None:
    group = [rollout(0, 0.7 + 0.1), rollout(0, other)]
    centred, _, _ = group_statistics(torch.tensor([each.reward for each in group]), torch.zeros(2).long())
    assert has_spread(group) == bool(centred.any()) == (other != 0.8)


def test_lengths_are_of_what_the_policy_wrote() -> None:
    response = Response(0, [2] * 4, [-1.0] * 4, "stop", (0,)).observing([3, 3])
    log = IterationLog()
    log_rollouts(log, [Rollout(Prompt("q", [2]), response, "text", 0, {"score": 1.0}, 1.0)])
    metrics = combine([log.read()])
    assert [metrics[f"rollout/{name}"] for name in ("tokens", "length_mean", "length_max")] == [4, 4, 4]


def test_drafts_are_counted_by_drafter_as_proposed_and_as_kept() -> None:
    drafts = [(0, "ngram", 3, 2), (4, "sibling", 2, 0), (5, "ngram", 1, 1)]
    response = Response(0, [2] * 9, [-1.0] * 9, "stop", (0,), drafts)
    rollouts = [Rollout(Prompt("q", [2]), response, "text", group, {"score": 1.0}, 1.0) for group in (0, 1)]
    log = IterationLog()
    log_rollouts(log, rollouts)
    metrics = combine([log.read()])
    assert {name: metrics[name] for name in metrics if name.startswith("speculation/")} == {
        "speculation/kept_ngram": 6.0,
        "speculation/kept_sibling": 0.0,
        "speculation/proposed_ngram": 8.0,
        "speculation/proposed_sibling": 4.0,
    }


def test_tail_share_is_the_time_with_few_unfinished() -> None:
    trace = [(1.0, 20), (2.0, 10), (4.0, 2), (10.0, 0)]
    assert tail_share(trace, 20) == pytest.approx(0.6)
    assert tail_share([], 20) == 0.0
    assert tail_share(trace[:2], 20) == 0.0  # stopped before few were left


@pytest.mark.parametrize(
    ("trace", "num_requests", "share"),
    [
        ([(0.0, 0)], 20, 0.0),
        ([(1.0, 2), (3.0, 1), (4.0, 0)], 5, 1 / 4),
        ([(0.1, 4), (0.3, 3), (0.4, 2), (0.5, 0)], 25, 1 / 5),
    ],
)
def test_tail_share_of_few_requests_is_that_of_the_last(
    trace: list[tuple[float, int]], num_requests: int, share: float
) -> None:
    assert tail_share(trace, num_requests) == pytest.approx(share)
