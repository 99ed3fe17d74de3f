import json
from dataclasses import replace

import pytest
import torch

from tests.support.rollout_loop import make_rollout
from tlt_lightning.engine.requests import joined
from tlt_lightning.rollout import Prompt, Request, Response, Rollout, RolloutBatch, Sampling, collate


def make_batch() -> RolloutBatch:
    """Two sequences of prompts of 1 and 2 tokens and responses of 6 and 2; a tool wrote half of the first."""
    mask = torch.tensor([[1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]).float()
    rows = torch.arange(2)
    return RolloutBatch(
        input_ids=torch.arange(14).view(2, 7),
        prompt_lengths=torch.tensor([1, 2]),
        response_mask=mask,
        rollout_logps=torch.zeros(2, 6),
        rewards=rows.float(),
        groups=rows,
        policy_versions=rows,
        truncated=rows > 0,
        response_lengths=torch.tensor([6, 2]),
    )


def test_a_masked_span_counts_in_the_length_and_not_in_the_loss() -> None:
    batch = make_batch()
    assert batch.lengths.tolist() == [7, 4]
    first = batch.select([0])
    assert first.response_mask.tolist() == [[1, 0, 0, 0, 1, 1]]
    assert first.input_ids.shape == (1, 7)
    assert batch.count_loss([0, 1]) == (5.0, 2.0)
    assert batch.select([1]).input_ids.shape == (1, 4)


def test_lengths_that_are_not_given_are_the_masks() -> None:
    batch = make_batch()
    plain = RolloutBatch(*(getattr(batch, name) for name in RolloutBatch.__slots__[:8]))
    assert plain.response_lengths.tolist() == [3, 2]
    assert plain.temperature == 1.0  # the policy's own distribution, unless somebody says otherwise


def test_filters_are_the_settings_that_leave_a_part_of_the_distribution() -> None:
    assert Sampling().filters == {}
    given = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_tokens": 2}
    assert Sampling(**given).filters == given
    assert Sampling(top_p=0.5).filters == {"top_p": 0.5}


def test_a_rollout_that_was_not_scored_has_no_reward() -> None:
    rollout = Rollout(Prompt("q", [2]), Response(0, [3], [-0.5], "stop", (0,)), "text", 0)
    assert rollout.reward == 0.0
    assert not rollout.is_truncated
    assert not rollout.is_correct
    assert make_rollout(0.6).is_correct
    assert not make_rollout(0.5).is_correct


def test_a_rollout_as_a_row_is_json_of_what_was_asked_written_and_earned() -> None:
    response = Response(0, (3, 4), [-0.5, -1.0], "length", (0,))
    rollout = Rollout(Prompt("q", [2], answer="a"), response, "text", 0, {"exact": 1.0, "short": 0.5}, 1.5)
    assert rollout.is_truncated
    assert json.loads(json.dumps(rollout.to_row())) == {
        "index": 0,
        "prompt": "q",
        "response": "text",
        "answer": "a",
        "reward": 1.5,
        "rewards": {"exact": 1.0, "short": 0.5},
        "correct": True,
        "tokens": 2,
        "finish_reason": "length",
        "deferrals": 0,
        "prompt_ids": [2],
        "response_ids": [3, 4],
    }


def rollout(prompt_length: int, length: int, group: int = 0, version: int = 3) -> Rollout:
    response = Response(0, list(range(10, 10 + length)), [-0.5] * length, "length", (version, version + 1))
    prompt = Prompt("q", list(range(2, 2 + prompt_length)))
    return Rollout(prompt, response, "text", group, {"score": 1.0}, 0.25)


@pytest.fixture
def batch() -> RolloutBatch:
    return collate([rollout(3, 2), rollout(1, 5, group=1), rollout(2, 1)], pad_id=0, temperature=0.7)


def test_sequences_are_padded_on_the_right(batch: RolloutBatch) -> None:
    assert batch.input_ids.tolist() == [[2, 3, 4, 10, 11, 0], [2, 10, 11, 12, 13, 14], [2, 3, 10, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert batch.response_lengths.tolist() == [2, 5, 1]
    assert batch.rollout_logps[0].tolist() == [-0.5, -0.5, 0, 0, 0]
    assert batch.policy_versions.tolist() == [3, 3, 3]
    assert batch.groups.tolist() == [0, 1, 0]
    assert batch.response_mask.dtype == batch.rollout_logps.dtype == batch.rewards.dtype == torch.float32


def test_selected_rows_are_trimmed_to_their_own_length(batch: RolloutBatch) -> None:
    batch.advantages = torch.arange(15.0).view(3, 5)
    part = batch.select([2, 0])
    assert (batch.rows, part.rows) == ((), (2, 0))
    assert part.input_ids.tolist() == [[2, 3, 10, 0, 0], [2, 3, 4, 10, 11]]
    assert part.response_mask.tolist() == [[1, 0], [1, 1]]
    assert part.advantages is not None
    assert part.advantages.tolist() == [[10, 11], [0, 1]]
    assert part.temperature == 0.7
    assert len(part) == 2


def conversation() -> Response:
    """Three tokens of weights 0, two observed, one of weights 0 and two of weights 1, one observed."""
    first = Response(0, [10, 11, 12], [-0.1, -0.2, -0.3], "stop", (0,), [(1, "ngram", 4, 4)]).observing([20, 21])
    went_on = joined(Request(0, [2], written=first), Response(0, [13], [-0.4], "unfinished", (0,)))
    more = Response(0, [14, 15], [-0.5, -0.6], "stop", (1,), [(1, "sibling", 3, 3)])
    return joined(Request(0, [2], written=went_on), more).observing([22])


def test_what_an_environment_wrote_is_part_of_the_text_and_of_no_turn_of_the_policys() -> None:
    response = conversation()
    assert response.token_ids == [10, 11, 12, 20, 21, 13, 14, 15, 22]
    assert response.logps == [-0.1, -0.2, -0.3, 0, 0, -0.4, -0.5, -0.6, 0]
    assert response.observed == ((3, 2), (8, 1))
    assert response.turns == ((0, 3), (5, 8), (9, 9))
    assert response.num_written == 6
    assert response.segments == ((0, 6), (1, 3))  # without gaps
    assert response.is_unfinished
    assert response.num_kept == {"ngram": 2, "sibling": 1}  # of the turn whose draft it was


def test_observations_have_no_mask_and_no_weight_in_the_loss() -> None:
    first, second = rollout(1, 4), rollout(2, 3)
    first = replace(first, response=conversation(), turn_rewards=(0.5, 0.0, 0.25))
    batch = collate([first, second], pad_id=0, temperature=1.0)
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [[0, 0, 0.5, 0, 0, 0, 0, 0, 0.25], [0.0] * 9]
    assert batch.response_mask.tolist() == [[1, 1, 1, 0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.response_lengths.tolist() == [9, 3]
    assert batch.observed is not None
    assert batch.observed.nonzero().tolist() == [[0, 3], [0, 4], [0, 8]]
    assert batch.select([1]).count_loss([0]) == (3.0, 1.0)
    assert collate([second], pad_id=0, temperature=1.0).observed is None


def test_a_row_says_what_was_observed() -> None:
    row = json.loads(json.dumps(replace(rollout(1, 1), response=conversation()).to_row()))
    assert row["observed"] == [[3, 2], [8, 1]]
