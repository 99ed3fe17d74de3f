"""What a skipped head has missed, kept in one buffer and worked off in one batch."""

from typing import Any

import pytest
import torch

from tlt_lightning.engine.vllm import kv_catch_up
from tlt_lightning.engine.vllm.kv_catch_up import DrafterBacklog

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


def add(backlog: DrafterBacklog, step: int, names: str) -> None:
    """A step in which request r at position `step` was followed by token 100 * step + r; rows are in reverse."""
    numbers = [ord(name) - ord("a") for name in names]
    hidden = [torch.tensor([[step, number, part] for number in numbers], dtype=torch.float32) for part in range(2)]
    last = torch.arange(26).flip(0) + 100 * step  # of all requests, by their rows
    backlog.add(
        list(names),
        hidden,
        last,
        torch.full((len(names),), step),
        rows=torch.tensor([25 - number for number in numbers]),
    )


def flush(backlog: DrafterBacklog, alive: str) -> None:
    backlog.flush({name: ord(name) for name in alive}, lambda rows, positions: 1000 * rows + positions)


def test_what_was_missed_is_written_once_for_those_still_there(written: list[tuple[torch.Tensor, ...]]) -> None:
    backlog = DrafterBacklog(None, max_batch_size=4, max_steps=3, max_tokens=100)
    for alive, expected in [
        ("abc", [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2)]),
        ("ac", [("a", 1), ("c", 1), ("a", 2), ("c", 2)]),
        ("", []),
    ]:
        written.clear()
        add(backlog, 1, "abc")
        add(backlog, 2, "ac")
        assert len(backlog) == 2
        flush(backlog, alive)
        assert len(backlog) == 0
        assert len(written) == bool(expected)
        for hidden, next_ids, positions, slots in written:
            numbers = [ord(name) - ord("a") for name, _ in expected]
            assert hidden.tolist() == [
                [step, number, 0, step, number, 1] for number, (_, step) in zip(numbers, expected, strict=True)
            ]
            assert next_ids.tolist() == [100 * step + n for n, (_, step) in zip(numbers, expected, strict=True)]
            assert positions.tolist() == [step for _, step in expected]
            assert slots.tolist() == [1000 * ord(name) + step for name, step in expected]
    assert backlog.num_flushes == 2


def test_rows_in_order_need_no_index(written: list[tuple[torch.Tensor, ...]]) -> None:
    backlog = DrafterBacklog(None, max_batch_size=4)
    backlog.add(["a", "b"], [torch.ones(2, WIDTH)], torch.tensor([7, 8]), torch.tensor([3, 4]))
    flush(backlog, "ab")
    assert written[0][1].tolist() == [7, 8]


def test_room_ends_with_steps_or_with_tokens_but_a_batch_always_fits() -> None:
    def steps(batch_size: int, max_tokens: int) -> int:
        backlog = DrafterBacklog.__new__(DrafterBacklog)
        backlog.max_steps, backlog.max_tokens = 16, max(max_tokens, 4)
        backlog._steps, backlog._num_tokens = [], 0
        while backlog.has_room(batch_size):
            backlog._steps.append([])
            backlog._num_tokens += batch_size
        return len(backlog._steps)

    assert [steps(1, 1024), steps(64, 1024), steps(128, 1024), steps(1024, 1024), steps(4, 1)] == [16, 16, 8, 1, 1]


def test_the_buffer_is_used_again(written: list[tuple[torch.Tensor, ...]]) -> None:
    backlog = DrafterBacklog(None, max_batch_size=2, max_tokens=4)
    places = set()
    for step in range(1, 6):
        if not backlog.has_room(2):
            flush(backlog, "ab")
        add(backlog, step, "ab")
        places.add(backlog._hidden.data_ptr())
    assert len(places) == 1
    assert [batch[2].tolist() for batch in written] == [[1, 1, 2, 2], [3, 3, 4, 4]]
    backlog.clear()
    flush(backlog, "ab")
    assert len(written) == 2
