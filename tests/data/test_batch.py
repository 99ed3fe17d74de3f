import json

import torch

from tests.support.rollout_loop import make_rollout
from tlt_lightning.data.batch import Prompt, Rollout, RolloutBatch
from tlt_lightning.engine import Response


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
