"""The training loop of the drafter, with a drafter of one weight."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.support.drafters.draft_texts import make_drafter, random_sequence
from tests.support.drafters.one_weight import OneWeight, Ranks, make_trainer, steps, weight
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.long_tail import curriculum
from tlt_lightning.long_tail import trainer as trainer_module
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.publishing import DrafterPublisher
from tlt_lightning.long_tail.trainer import MAX_GRAD_NORM, WARMUP_STEPS, DrafterTrainer, TrainingStretch
from tlt_lightning.metrics.iteration_log import IterationLog, combine


def test_training_stops_within_one_micro_step_of_the_end_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]

    class Slow(OneWeight):
        def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
            now[0] += 2.0
            return super().loss(batch, compares=compares)

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer = make_trainer(Slow())
    stretch = trainer.train(lambda: now[0] < 12.0)
    assert len(stretch.losses) == 4
    assert (stretch.seconds, stretch.overrun) == (8.0, 2.0)  # what is logged is never less than the truth, here 1.0
    assert trainer.train(lambda: False).overrun == 0


def test_packs_of_a_draw_come_once_and_in_order_however_often_training_stops() -> None:
    whole, parts = (make_trainer(pack_tokens=128) for _ in range(2))
    whole.train(steps(9))
    for number in (1, 3, 5):
        parts.train(steps(number))
        assert parts._ahead is None  # between bursts a pack takes no memory
    assert parts.drafter.seen == whole.drafter.seen
    assert len(set(whole.drafter.seen)) > 1


def test_ranks_choose_the_vocabulary_by_what_all_have_seen() -> None:
    class Choosing(OneWeight):
        def choose_vocabulary(self, counts: Tensor) -> None:
            self.counts = counts.tolist()

        def refresh_target(self, policy: Any) -> None:
            self.refreshed = (policy, self.counts)

    mine, others = torch.tensor([0, 5, 1]), torch.tensor([7, 0, 0])
    drafter, policy = Choosing(), nn.Module()
    make_trainer(drafter, sum_over_ranks=lambda tensor: tensor + others).choose_vocabulary(mine, policy)
    assert drafter.refreshed == (policy, [7, 5, 1])
    make_trainer(drafter).choose_vocabulary(mine, policy)
    assert drafter.counts == [0, 5, 1]


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


def test_a_random_head_begins_fast_and_learns_longer_drafts_the_better_it_drafts() -> None:
    class Random(OneWeight):
        head_path = None

    trainer, lengths, young = make_trainer(Random()), [], []
    for acceptance_length in (1.0, 2.0, 2.1, 3.0, 1.0):
        trainer.train(steps(1))
        lengths.append(trainer.drafter.most_steps)
        trainer.note_quality(acceptance_length)
        young.append(trainer.learns_first_drafts)
    resumed = make_trainer(Random())
    resumed.load_state_dict(trainer.state_dict())
    resumed.begin(0)
    resumed.train(steps(1))
    assert [*lengths, resumed.drafter.most_steps] == [3, 3, 3, 4, 5, 5]
    assert young == [True, True, False, False, False]
    rates = [group["lr"] / group["initial_lr"] for group in resumed.optimizer.param_groups]
    assert rates == [pytest.approx(7 / curriculum.RISING_STEPS)]


def test_another_learning_rate_of_the_recipe_is_used_on_resume_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def resumed(lr: float) -> DrafterTrainer:
        drafter = OneWeight()
        drafter.configure_optimizers = lambda: torch.optim.Adam([drafter.fc], lr=lr)  # type: ignore[method-assign]
        trainer = make_trainer(drafter)
        trainer.load_state_dict(copy.deepcopy(saved))
        return trainer

    (first := make_trainer()).train(steps(3))
    saved = first.state_dict()
    rate = first.optimizer.defaults["lr"]
    assert resumed(rate).optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
    assert "Resumed with" not in caplog.text
    other = resumed(rate / 10)
    assert f"another `lr` of the drafter's optimizer: {rate / 10} instead of {rate}" in caplog.text
    rates = []
    for each in (first, other):
        each.begin(1)
        each.train(steps(1))
        rates.append(each.optimizer.param_groups[0]["lr"])
    assert rates[1] == pytest.approx(rates[0] / 10)


def test_an_optimizer_that_is_not_the_checkpoints_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    (saved := make_trainer()).train(steps(3))
    drafter = OneWeight()
    drafter.configure_optimizers = lambda: torch.optim.SGD([drafter.fc], lr=0.1)  # type: ignore[method-assign]
    resumed = make_trainer(drafter)
    resumed.load_state_dict(saved.state_dict())
    assert "The drafter's optimizer begins anew: it is SGD, that of the checkpoint was Adam." in caplog.text
    assert weight(resumed) == weight(saved)
    resumed.train(steps(1))
    assert weight(resumed) > weight(saved)


@pytest.mark.parametrize(
    ("head_path", "num_tokens", "draft_length"), [(None, [256, 256, 512], 8), ("given", [1024, 1024, 1024], None)]
)
def test_a_head_that_was_random_learns_from_small_packs(
    head_path: str | None, num_tokens: list[int], draft_length: int | None
) -> None:
    class Measuring(OneWeight):
        def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
            sizes.append(batch.input_ids.numel())
            return super().loss(batch, compares=compares)

    sizes: list[int] = []
    drafter = Measuring()
    drafter.head_path = head_path
    trainer = make_trainer(drafter, pack_tokens=1024)
    for acceptance_length in (1.0, 2.0, 5.0):
        trainer.note_quality(acceptance_length)
        trainer.begin(0)
        trainer.train(steps(2))
        sizes.append(trainer.num_seen)
    assert sizes == [size for num in num_tokens for size in (num, num, 2 * num)]
    assert trainer.drafter.most_steps == draft_length
    assert make_trainer(drafter, pack_tokens=256).step_tokens == (256 if head_path else 128)


def test_a_step_moves_by_its_own_gradient_alone_and_by_a_spike_no_further_than_by_others() -> None:
    class Plain(OneWeight):
        steepness = 1.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([self.fc], lr=1.0 * WARMUP_STEPS)

        def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
            return -self.steepness * self.fc.sum(), {}

    trainer = make_trainer(Plain())
    trainer.drafter.steepness = 1e6
    trainer.train(steps(1))
    assert torch.tensor(weight(trainer)).norm() == pytest.approx(MAX_GRAD_NORM)
    trainer = make_trainer(Plain())
    trainer.drafter.steepness = 0.1
    trainer.train(steps(2))  # at rates of 1 and 2
    assert weight(trainer) == pytest.approx([0.3, 0.3])


class Hungry(OneWeight):
    """Has memory for packs of so many tokens."""

    room = 128

    def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.input_ids.numel() > self.room:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return super().loss(batch, compares=compares)


def test_out_of_memory_is_counted_and_ends_the_stretch_alone(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(Hungry(), pack_tokens=640)
    for room in (640, 128):
        trainer.drafter.room = room
        stretch = trainer.train(steps(6))
    assert (len(stretch.losses), stretch.num_out_of_memory) == (0, 1)
    assert "no memory for a training step and stops for now: Tried to allocate" in caplog.text
    assert trainer.drafter.fc.grad is None
    trainer.drafter.room = 640
    assert (len(trainer.train(steps(6)).losses), trainer.num_pending) == (6, 12)


def test_one_step_is_tried_before_the_run_and_changes_nothing() -> None:
    trainer = make_trainer(Hungry(0.5), pack_tokens=256)
    trainer.drafter.room = 0
    with pytest.raises(MisconfigurationException, match=r"pack_tokens=256.*does not fit.*Tried to allocate 2.00 GiB"):
        trainer.try_step()
    trainer.drafter.room = 256
    trainer.try_step()
    assert weight(trainer) == [0.5, 0.5]
    assert trainer.drafter.fc.grad is None
    assert not trainer.optimizer.state
    assert trainer.num_pending == trainer.num_passes == 0


@pytest.mark.parametrize(("is_on_gpu", "sizes"), [(False, [(128, 4)]), (True, [(512, None), (256, 4)])])
def test_what_a_step_and_a_judged_token_take_is_known_before_the_run(
    is_on_gpu: bool, sizes: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU by a second pass: the first one compiles, and shows that memory suffices for a whole pack."""
    now, seen = [0.0], []

    class Slow(OneWeight):
        most_steps = None

        def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
            seen.append((batch.input_ids.numel(), self.most_steps))
            now[0] += 8.0 * batch.input_ids.numel()
            return super().loss(batch, compares=compares)

        def measure(self, batch: PackedBatch) -> Tensor:
            now[0] += 2.0 * batch.input_ids.numel()
            return super().measure(batch)

    class New(Slow):
        head_path = None

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer = make_trainer(New(), pack_tokens=512)
    trainer._is_mixed, trainer._draft_length = is_on_gpu, 4  # steps of half a pack
    costs = trainer.try_step()
    assert (costs.step, costs.judged_token, seen) == (8.0 * 256, 2.0, sizes)


def test_passes_are_counted_anew_whenever_packs_are_drawn_anew() -> None:
    trainer = make_trainer()
    trainer.train(lambda: trainer.num_passes < 2)
    assert trainer.num_pending == math.ceil(2 * trainer.buffer.num_tokens / 128)
    trainer.begin(1)
    assert trainer.num_passes == 0


def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    trainer = make_trainer(OneWeight(0.5))
    trainer.drafter.direction = float("nan")
    assert len(trainer.train(steps(2)).losses) == 2
    assert weight(trainer) == [0.5, 0.5]


def test_a_loss_of_a_step_that_was_left_out_is_no_part_of_the_mean() -> None:
    log = IterationLog()
    TrainingStretch([1.0, math.nan, math.inf, 2.0]).write(log)
    assert combine([log.read()]) == {"drafter/micro_steps": 4, "drafter/loss": 1.5}
    log.clear()
    TrainingStretch([math.nan]).write(log)
    assert combine([log.read()]) == {"drafter/micro_steps": 1}


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    class Steep(OneWeight):
        def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
            return (self.fc - 0.5).sqrt().sum(), {}

    trainer = make_trainer(Steep(0.5))
    assert trainer.train(steps(2)).losses == [0, 0]
    assert weight(trainer) == [0.5, 0.5]
    assert not trainer.optimizer.state  # nor are there moments that would poison what comes after


def test_a_trainee_that_is_no_number_starts_over_too(policy_path: str) -> None:
    drafter = make_drafter(policy_path)
    buffer = DrafterBuffer(1 << 20)
    buffer.add([random_sequence(40, seed=seed) for seed in range(8)])
    trainer = DrafterTrainer(drafter, buffer, pack_tokens=128, device=torch.device("cpu"))
    publisher, before = DrafterPublisher(trainer), {name: each.clone() for name, each in trainer.weights().items()}
    trainer.begin(0)
    lost = []
    for _ in range(3):
        trainer.train(steps(1))
        drafter.head.norm.weight.data.fill_(torch.nan)
        decision = publisher.publish_if_better()
        assert decision.after.acceptance_length == 1 < decision.before.acceptance_length
        assert math.isfinite(decision.gain)
        lost.append(decision.has_diverged)
    assert lost == [False, False, True]
    assert all(torch.equal(each, before[name]) for name, each in trainer.weights().items())


def test_a_seed_draws_the_same_packs_again() -> None:
    trainer = make_trainer()
    for seed in (5, 6, 5):
        trainer.begin(seed)
        trainer.train(steps(4))
    first, other, again = (trainer.drafter.seen[start : start + 4] for start in (0, 4, 8))
    assert first == again != other


def test_ranks_end_with_the_mean_by_micro_steps() -> None:
    ranks = Ranks(3)
    trainers = [make_trainer(OneWeight(0.1), ranks.sum_for(rank)) for rank in range(3)]
    own: dict[int, float] = {}

    def work(rank: int) -> None:
        trainers[rank].train(steps(numbers[rank]))
        own[rank] = weight(trainers[rank])[0]
        trainers[rank].average()

    num_steps = 0
    for numbers in ((0, 0, 0), (4, 0, 1), (1, 0, 4)):  # in the first iteration no rank had idle time, later one
        ranks.run(work)
        num_steps += sum(numbers)
        mean = sum(number * own[rank] for rank, number in enumerate(numbers)) / 5 if sum(numbers) else 0.1
        for trainer in trainers:
            assert weight(trainer) == weight(trainers[0]) == pytest.approx([mean] * 2)
            assert (trainer.num_pending, trainer.seen_version) == (num_steps, 3 if num_steps else -1)
    assert own[2] > own[0] > own[1]


def test_a_rank_whose_gradients_were_not_finite_weighs_nothing_in_the_mean() -> None:
    ranks = Ranks(2)
    trainers = [make_trainer(OneWeight(0.1), ranks.sum_for(rank)) for rank in range(2)]
    trainers[1].drafter.direction = math.nan
    own: list[float] = []

    def work(rank: int) -> None:
        trainers[rank].train(steps(2))
        own.extend(weight(trainers[rank])[:1] if rank == 0 else [])
        trainers[rank].average()

    ranks.run(work)
    for trainer in trainers:
        assert weight(trainer) == pytest.approx(own * 2)
        assert trainer.num_pending == 4  # a head that is no number is to be judged, too
