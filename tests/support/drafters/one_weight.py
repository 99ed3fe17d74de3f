"""A drafter of one weight, with its buffer and its training loop, and threads that stand for ranks."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.trainer import WARMUP_STEPS, DrafterTrainer


class OneWeight(nn.Module):
    """Is worth as many tokens as its weight; two steps of learning move it by 0.25."""

    num_draft_tokens = 1
    head_path: str | None = "given"
    target_config = SimpleNamespace(hidden_size=1, vocab_size=50)

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.fc = nn.Parameter(torch.full((2,), weight))
        self.policy_rows = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.direction = -1.0
        self.seen: list[int] = []

    def compute_on(self, device: torch.device, *, is_mixed: bool) -> None:
        """Has no target."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([self.fc], lr=0.25 / (1 / WARMUP_STEPS + 2 / WARMUP_STEPS))

    def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen.append(int(batch.input_ids.sum()))
        return self.direction * self.fc.sum() * batch.input_ids.float().mean(), {}

    def measure(self, batch: PackedBatch) -> Tensor:
        sums = torch.ones(len(batch.lengths), 6, 1, dtype=torch.float64)
        sums[:, 0] = self.fc.detach().double().mean()
        return sums

    def trainable_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "fc.weight", self.fc.detach()
        yield "lm_head.weight", self.policy_rows.detach()

    @torch.no_grad()
    def load_trainable(self, tensors: Mapping[str, Tensor]) -> None:
        held = dict(self.trainable_tensors())
        assert set(held) == set(tensors)
        for name, tensor in held.items():
            tensor.copy_(tensors[name])


def make_buffer(version: int = 3, num_sequences: int = 12) -> DrafterBuffer:
    generator = torch.Generator().manual_seed(version)
    buffer = DrafterBuffer(1 << 20)
    buffer.add(
        [
            PolicyText(
                torch.randint(1, 50, (40,), generator=generator), torch.zeros(40, 3), torch.zeros(40, 1), 4, version
            )
            for _ in range(num_sequences)
        ]
    )
    return buffer


def make_trainer(
    drafter: Any = None, sum_over_ranks: Any = None, pack_tokens: int = 128, **buffer: int
) -> DrafterTrainer:
    trainer = DrafterTrainer(
        drafter or OneWeight(),
        make_buffer(**buffer),
        pack_tokens=pack_tokens,
        device=torch.device("cpu"),
        **({} if sum_over_ranks is None else {"num_ranks": 2, "sum_over_ranks": sum_over_ranks}),
    )
    trainer.begin(0)
    return trainer


def steps(number: int) -> Callable[[], bool]:
    left = itertools.chain([True] * number, itertools.repeat(False))
    return lambda: next(left)


def weight(trainer: DrafterTrainer) -> list[float]:
    return dict(trainer.drafter.trainable_tensors())["fc.weight"].tolist()


class Ranks:
    """Adds up tensors over threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=100)
        self.tensors: dict[int, Tensor] = {}

    def sum_for(self, rank: int) -> Callable[[Tensor], Tensor]:
        def add_up(tensor: Tensor) -> Tensor:
            self.tensors[rank] = tensor
            self.barrier.wait()
            total = torch.stack([self.tensors[r] for r in sorted(self.tensors)]).sum(0)
            self.barrier.wait()
            return total

        return add_up

    def run(self, work: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.barrier.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads)
