"""Attention within documents equals softmax over masked scores, gradients too, and makes no square of them."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tlt_lightning.drafter.architectures.document_attention import Documents, attend_in_documents

LENGTHS, ROWS = (37, 5, 1, 60), 128  # the pack is not full
SEEN = {1: 21, 3: 70}  # entries before a document that is a later piece of a sequence
HEADS, KEY_HEADS, SIZE = 4, 2, 16
ON_GPU = pytest.mark.gpu


def random_pack(steps: int, lengths: tuple[int, ...], rows: int, seen: dict[int, int], dtype: torch.dtype) -> Any:
    torch.manual_seed(steps)
    query = torch.randn(1, HEADS, rows, SIZE, dtype=dtype)
    key, value = (torch.randn(1, KEY_HEADS, steps * rows, SIZE, dtype=dtype) for _ in range(2))
    contexts = [
        tuple(torch.randn(1, KEY_HEADS, seen[number], SIZE, dtype=dtype) for _ in range(2)) if number in seen else None
        for number in range(len(lengths))
    ]
    return query, key, value, Documents(lengths, contexts)


def by_mask(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attend by a dense mask, document by document."""
    rows, outputs = query.shape[2], []
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1).unflatten(2, (-1, rows)) for x in (key, value))
    for length, end, context in zip(documents.lengths, accumulate(documents.lengths), documents.contexts, strict=True):
        here = slice(end - length, end)
        k, v = (x[:, :, :, here].flatten(2, 3) for x in (key, value))
        own = torch.eye(length, dtype=torch.bool)
        mask = torch.cat([own.new_ones(length, length).tril(), *[own] * (key.shape[2] - 1)], 1)
        if context is not None:
            before = [x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in context]
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
            mask = torch.cat([own.new_ones(length, before[0].shape[2]), mask], 1)
        scores = query[:, :, here] @ k.transpose(2, 3) / SIZE**0.5
        outputs.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v)
    rest = query.new_zeros(1, HEADS, rows - sum(documents.lengths), SIZE)
    return torch.cat([*outputs, rest], 2).transpose(1, 2)


def value_and_gradients(attend: Any, tensors: list[Tensor]) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    output = attend(*inputs)
    ramp = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * ramp).sum(), inputs)]


@pytest.mark.parametrize("seen", [{}, SEEN], ids=["whole texts", "later pieces"])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-5),
        pytest.param("cuda", torch.float32, 1e-4, marks=ON_GPU),
        pytest.param("cuda", torch.bfloat16, 3e-2, marks=ON_GPU),
    ],
)
def test_values_and_gradients_are_those_of_a_dense_mask(
    device: str, dtype: torch.dtype, tolerance: float, steps: int, seen: dict[int, int]
) -> None:
    *tensors, documents = random_pack(steps, LENGTHS, ROWS, seen, torch.float64)
    expected = value_and_gradients(lambda q, k, v: by_mask(q, k, v, documents), tensors)
    moved = [context and tuple(x.to(device, dtype) for x in context) for context in documents.contexts]
    there = Documents(LENGTHS, moved)
    found = value_and_gradients(
        lambda q, k, v: attend_in_documents(None, q, k, v, there, scaling=SIZE**-0.5)[0],
        [tensor.to(device, dtype) for tensor in tensors],
    )
    for mine, its in zip(found, expected, strict=True):
        scale = its.abs().max().item()
        torch.testing.assert_close(mine.cpu().double(), its, atol=tolerance * scale, rtol=tolerance)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_nothing_grows_with_the_square_of_a_document() -> None:
    found = []
    for rows in (512, 1024):
        *tensors, documents = random_pack(3, (rows,), rows, {0: rows}, torch.float32)
        with LargestTensor() as largest:
            value_and_gradients(
                lambda q, k, v, its=documents: attend_in_documents(None, q, k, v, its, scaling=0.25)[0], tensors
            )
        found.append(largest.elements)
    assert found[1] == 2 * found[0] < 1024 * 1024


class Operations(TorchDispatchMode):
    """Counts operations, on a GPU kernels."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seen", [{}, SEEN], ids=["whole texts", "later pieces"])
def test_the_number_of_operations_does_not_grow_with_the_steps_and_what_is_seen_is_gathered_once(
    seen: dict[int, int],
) -> None:
    found = []
    for steps in (2, 7):
        *tensors, documents = random_pack(steps, LENGTHS, ROWS, seen, torch.float32)
        for _ in range(2):
            with Operations() as operations:
                value_and_gradients(
                    lambda q, k, v, its=documents: attend_in_documents(None, q, k, v, its, scaling=0.25)[0], tensors
                )
            found.append(operations.number)
    first, again, *more = found
    assert more == [first, again]
    assert first - again >= 2 * len(seen)
