import torch

from tests.test_policy import make_batch
from tlt_lightning.hidden_states import HiddenStates
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.features import draft_sequences, rows_to_keep


def keep(share: float | None, max_bytes: int = 1 << 30) -> list[int]:
    buffer = DrafterBuffer(max_bytes, held_out_share=0.5)
    return rows_to_keep(make_batch([10] * 40, [90] * 40), buffer, hidden_size=64, share=share, seed=0)


def test_no_more_rows_are_kept_than_fit_or_are_trained_on() -> None:
    bytes_per_row = 100 * (4 * 2 * 64 + 8)
    assert len(keep(None)) == 40
    assert len(keep(None, 7 * bytes_per_row + 1)) == 7
    assert len(keep(0.1)) == 8  # a tenth to train on, as much to hold out
    assert len(keep(0.1, 3 * bytes_per_row)) == 3
    assert len(keep(0.001)) == 2  # one to train on, one to hold out
    assert keep(0.1) == keep(0.1)


def test_sequences_are_cut_to_their_tokens() -> None:
    batch = make_batch([3, 5], [6, 1])
    batch.hidden_states = {1: HiddenStates(torch.zeros(6, 12).bfloat16(), torch.ones(6, 4).bfloat16())}
    (sequence,) = draft_sequences(batch, 7)
    assert torch.equal(sequence.input_ids, batch.input_ids[1, :6])
    assert (sequence.prompt_length, sequence.policy_version) == (5, 7)
    assert sequence.input_ids.untyped_storage().nbytes() == 6 * 8  # no view that keeps the batch
    batch.hidden_states = None
    assert draft_sequences(batch, 7) == []
