"""The training loop of the drafter, with a drafter of one weight."""

import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.trainer import WARMUP_STEPS, DrafterTrainer


class OneWeight(nn.Module):
    """Is worth as many tokens as its weight; two steps of learning move it by 0.25."""

    num_draft_tokens = 1

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.fc = nn.Parameter(torch.full((2,), weight))
        self.policy_rows = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.direction, self.seconds = -1.0, 0.0
        self.seen: list[int] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([self.fc], lr=0.25 / (1 / WARMUP_STEPS + 2 / WARMUP_STEPS))

    def loss(self, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        time.sleep(self.seconds)
        self.seen.append(int(batch.input_ids.sum()))
        return self.direction * self.fc.sum() * batch.input_ids.float().mean(), {}

    def measure(self, batch: PackedBatch) -> Tensor:
        sums = torch.ones(1, 6, 1, dtype=torch.float64)
        sums[0, 0] = self.fc.detach().mean()
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


def make_trainer(drafter: Any = None, sum_over_ranks: Any = None, **buffer: int) -> DrafterTrainer:
    trainer = DrafterTrainer(
        drafter or OneWeight(),
        make_buffer(**buffer),
        pack_tokens=128,
        device=torch.device("cpu"),
        sum_over_ranks=sum_over_ranks,
    )
    trainer.begin(0)
    return trainer


def steps(number: int) -> Callable[[], bool]:
    left = itertools.chain([True] * number, itertools.repeat(False))
    return lambda: next(left)


def weight(trainer: DrafterTrainer) -> list[float]:
    return dict(trainer.drafter.trainable_tensors())["fc.weight"].tolist()


def test_training_stops_within_one_micro_step_of_the_end_of_its_window() -> None:
    drafter = OneWeight()
    drafter.seconds = 0.02
    trainer = make_trainer(drafter)
    closes = time.perf_counter() + 0.11
    burst = trainer.train(lambda: time.perf_counter() < closes)
    late = time.perf_counter() - closes
    assert 3 <= burst.micro_steps <= 6
    assert late < 0.04
    assert late <= burst.overrun < 0.04  # what is logged is never less than the truth
    assert 0.1 < burst.seconds < 0.15
    assert trainer.train(lambda: False).overrun == 0


def test_better_weights_are_published_and_worse_ones_are_taken_back() -> None:
    trainer = make_trainer(OneWeight(0.1))
    assert trainer.settle() is None
    trainer.train(steps(2))
    decision = trainer.settle()
    assert decision is not None
    assert decision.is_published
    assert (decision.before.acceptance_length, decision.after.acceptance_length) == pytest.approx((1.1, 1.35), abs=0.01)
    assert (trainer.version, trainer.data_version, trainer.num_stale) == (1, 3, 0)
    assert trainer.settle() is None
    good = weight(trainer)
    trainer.drafter.direction = 1.0
    for stale in (1, 2):
        trainer.train(steps(3))
        decision = trainer.settle()
        assert decision is not None
        assert not decision.is_published
        assert decision.quality is decision.before
        assert weight(trainer) == good
        assert (trainer.version, trainer.num_stale) == (1, stale)


def test_a_good_head_survives_the_first_steps_of_a_fresh_optimizer() -> None:
    trainer = make_trainer(OneWeight(1.0))
    full = trainer.optimizer.param_groups[0]["initial_lr"]
    rates, moved = [], []
    for _ in range(WARMUP_STEPS + 2):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        before = weight(trainer)[0]
        trainer.train(steps(1))
        moved.append(weight(trainer)[0] - before)
    assert moved[0] == pytest.approx(full / WARMUP_STEPS, rel=0.01)  # Adam's first step is the rate itself
    assert rates == sorted(rates)
    assert rates[-4] < rates[-3] == rates[-1] == full


def test_a_failure_makes_the_optimizer_forget_nothing() -> None:
    """Steps after it would be those of a fresh optimizer, which made it fail."""
    trainer = make_trainer(OneWeight(0.1))
    trainer.drafter.direction = 1.0
    for _ in range(3):
        trainer.train(steps(2))
        decision = trainer.settle()
        assert decision is not None
        assert not decision.is_published
    assert weight(trainer) == pytest.approx([0.1, 0.1])
    assert trainer.optimizer.state[trainer.drafter.fc]["step"] == 6
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(7 / WARMUP_STEPS * 0.25 / (3 / WARMUP_STEPS))


def test_what_travels_is_what_was_published_and_the_policys_rows_of_now() -> None:
    trainer = make_trainer(OneWeight(0.1))
    trainer.train(steps(2))
    trainer.settle()
    trainer.train(steps(2))
    trainer.drafter.policy_rows.fill_(7.0)
    assert {name: tensor[0].item() for name, tensor in trainer.published()} == pytest.approx(
        {"fc.weight": 0.35, "lm_head.weight": 7.0}, abs=0.01
    )
    trainer.drafter.direction = 1.0
    trainer.train(steps(8))
    trainer.settle()
    assert trainer.drafter.policy_rows[0] == 7  # rolling back leaves them alone


def test_nothing_is_decided_without_held_out_text() -> None:
    trainer = make_trainer(num_sequences=1)
    trainer.train(steps(1))
    assert trainer.settle() is None
    assert trainer.num_pending == 1


def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    trainer = make_trainer(OneWeight(0.5))
    trainer.drafter.direction = float("nan")
    assert trainer.train(steps(2)).micro_steps == 2
    assert weight(trainer) == [0.5, 0.5]


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    class Steep(OneWeight):
        def loss(self, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return (self.fc - 0.5).sqrt().sum(), {}

    trainer = make_trainer(Steep(0.5))
    assert trainer.train(steps(2)).loss == 0
    assert weight(trainer) == [0.5, 0.5]
    assert not trainer.optimizer.state  # nor are there moments that would poison what comes after


def test_a_seed_draws_the_same_packs_again() -> None:
    trainer = make_trainer()
    for seed in (5, 6, 5):
        trainer.begin(seed)
        trainer.train(steps(4))
    first, other, again = (trainer.drafter.seen[start : start + 4] for start in (0, 4, 8))
    assert first == again != other


def test_a_resumed_trainer_goes_on_as_the_other_one() -> None:
    trainer = make_trainer(OneWeight(0.1))
    trainer.train(steps(3))
    trainer.settle()
    trainer.drafter.direction = 1.0
    trainer.train(steps(2))
    stream = io.BytesIO()
    torch.save(trainer.state_dict(), stream)
    stream.seek(0)
    other = make_trainer(OneWeight(0.9), version=8, num_sequences=4)
    other.load_state_dict(torch.load(stream, weights_only=True))
    other.drafter.direction = 1.0
    for each in (trainer, other):
        each.begin(1)
        each.train(steps(2))
    assert weight(other) == weight(trainer)
    for each in (trainer, other):
        decision = each.settle()
        assert decision is not None
        assert not decision.is_published
    assert weight(other) == weight(trainer)
    assert (other.version, other.data_version, other.num_stale) == (1, 3, 1)
    for each in (trainer, other):
        each.begin(2)
        each.train(steps(2))
    assert weight(other) == weight(trainer)


class Ranks:
    """Adds up tensors over threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=10)
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
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)


def test_ranks_end_with_the_mean_by_micro_steps_and_decide_together() -> None:
    ranks = Ranks(3)
    trainers = [make_trainer(OneWeight(0.1), ranks.sum_for(rank)) for rank in range(3)]
    decisions: dict[int, Any] = {}
    own: dict[int, float] = {}

    def work(rank: int) -> None:
        trainers[rank].train(steps((4, 0, 1)[rank]))  # rank 1 had no idle time
        own[rank] = weight(trainers[rank])[0]
        trainers[rank].average()
        decisions[rank] = trainers[rank].settle()

    ranks.run(work)
    assert own[0] > own[2] > own[1]
    for trainer in trainers:
        assert weight(trainer) == weight(trainers[0])
        assert weight(trainer) == pytest.approx([0.8 * own[0] + 0.2 * own[2]] * 2)
        assert (trainer.version, trainer.data_version) == (1, 3)
    assert all(decision.is_published for decision in decisions.values())
    assert decisions[0].after.num_steps == 3  # held-out text of all three


def test_ranks_without_any_training_meet_and_go_on() -> None:
    ranks = Ranks(2)
    trainers = [make_trainer(OneWeight(0.1), ranks.sum_for(rank)) for rank in range(2)]
    decisions: list[Any] = []

    def work(rank: int) -> None:
        trainers[rank].average()
        decisions.append(trainers[rank].settle())

    ranks.run(work)
    assert decisions == [None, None]
    assert weight(trainers[1]) == pytest.approx([0.1, 0.1])
