"""What a skipped head has missed, kept in one buffer and worked off in one batch."""

from typing import Any

import pytest
import torch

from tlt_lightning.engine.vllm import kv_catch_up
from tlt_lightning.engine.vllm.kv_catch_up import KVCatchUp

WIDTH = 3


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """(hidden, next ids, positions, slots) of every batch that was written."""
    batches: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(kv_catch_up, "check_catches_up", lambda model: None)

    def write(model: Any, *tensors: torch.Tensor) -> None:
        batches.append(tuple(tensor.clone() for tensor in tensors))

    monkeypatch.setattr(kv_catch_up, "write_keys", write)
    return batches


def add(catch_up: KVCatchUp, step: int, names: str) -> None:
    """A step in which request r at position `step` was followed by token 100 * step + r; rows are in reverse."""
    numbers = [ord(name) - ord("a") for name in names]
    hidden = [torch.tensor([[step, number, part] for number in numbers], dtype=torch.float32) for part in range(2)]
    last = torch.arange(26).flip(0) + 100 * step  # of all requests, by their rows
    catch_up.add(
        list(names),
        hidden,
        last,
        torch.full((len(names),), step),
        rows=torch.tensor([25 - number for number in numbers]),
    )


def flush(catch_up: KVCatchUp, alive: str) -> None:
    table = 1000 * torch.arange(128)[:, None] + torch.arange(8)  # a block a token
    catch_up.flush({name: ord(name) for name in alive}, table, 1)


def test_what_was_missed_is_written_once_for_those_still_there(written: list[tuple[torch.Tensor, ...]]) -> None:
    catch_up = KVCatchUp(None, max_batch_size=4)
    for alive, expected in [
        ("abc", [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2)]),
        ("ac", [("a", 1), ("c", 1), ("a", 2), ("c", 2)]),
        ("", []),
    ]:
        written.clear()
        add(catch_up, 1, "abc")
        add(catch_up, 2, "ac")
        assert len(catch_up) == 2
        flush(catch_up, alive)
        assert len(catch_up) == 0
        assert len(written) == bool(expected)
        for hidden, next_ids, positions, slots in written:
            numbers = [ord(name) - ord("a") for name, _ in expected]
            assert hidden.tolist() == [
                [step, number, 0, step, number, 1] for number, (_, step) in zip(numbers, expected, strict=True)
            ]
            assert next_ids.tolist() == [100 * step + n for n, (_, step) in zip(numbers, expected, strict=True)]
            assert positions.tolist() == [step for _, step in expected]
            assert slots.tolist() == [1000 * ord(name) + step for name, step in expected]
    assert catch_up.num_flushes == 2


def test_a_preempted_request_is_forgotten_as_it_reads_everything_anew(
    written: list[tuple[torch.Tensor, ...]],
) -> None:
    catch_up = KVCatchUp(None, max_batch_size=4)
    add(catch_up, 1, "abc")
    catch_up.drop({"b"})
    add(catch_up, 2, "ac")
    flush(catch_up, "abc")  # b is back, with fewer blocks than it had
    (batch,) = written
    assert batch[1].tolist() == [100, 102, 200, 202]
    assert batch[0].shape[0] == len(batch[3]) == 4


def test_rows_in_order_need_no_index(written: list[tuple[torch.Tensor, ...]]) -> None:
    catch_up = KVCatchUp(None, max_batch_size=4)
    catch_up.add(["a", "b"], [torch.ones(2, WIDTH)], torch.tensor([7, 8]), torch.tensor([3, 4]))
    flush(catch_up, "ab")
    assert written[0][1].tolist() == [7, 8]


def test_room_ends_with_steps_or_with_tokens_but_a_batch_always_fits(written: list[tuple[torch.Tensor, ...]]) -> None:
    def steps(batch_size: int, max_batch_size: int = 1024) -> int:
        catch_up = KVCatchUp(None, max_batch_size)
        while catch_up.has_room(batch_size):
            catch_up._steps.append([])
            catch_up._num_tokens += batch_size
        return len(catch_up._steps)

    assert [steps(1), steps(64), steps(128), steps(1024), steps(1500, 1500)] == [16, 16, 8, 1, 1]


def test_the_buffer_is_used_again(written: list[tuple[torch.Tensor, ...]]) -> None:
    catch_up = KVCatchUp(None, max_batch_size=2)
    catch_up.max_tokens = 4
    places = set()
    for step in range(1, 6):
        if not catch_up.has_room(2):
            flush(catch_up, "ab")
        add(catch_up, step, "ab")
        places.add(catch_up._hidden.data_ptr())
    assert len(places) == 1
    assert [batch[2].tolist() for batch in written] == [[1, 1, 2, 2], [3, 3, 4, 4]]
    catch_up.clear()
    flush(catch_up, "ab")
    assert len(written) == 2
