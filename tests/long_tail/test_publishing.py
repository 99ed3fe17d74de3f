"""Decisions about what is published, with a drafter of one weight."""

import io
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.long_tail.test_buffer import sequence
from tests.support.drafters.one_weight import OneWeight, Ranks, make_buffer, make_trainer, steps, weight
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail import publishing
from tlt_lightning.long_tail.publishing import (
    DrafterPublisher,
    PublishDecision,
    gain_and_margin,
    held_out_sample,
    prompt_clusters,
)


def publisher_of(drafter: Any = None, sum_over_ranks: Any = None, **buffer: int) -> DrafterPublisher:
    return DrafterPublisher(make_trainer(drafter or OneWeight(0.1), sum_over_ranks, **buffer))


def test_better_weights_are_published() -> None:
    publisher = publisher_of()
    assert publisher.publish_if_better() is None
    assert (publisher.version, publisher.data_version) == (0, -1)
    publisher.trainer.train(steps(2))
    decision = publisher.publish_if_better()
    assert decision is not None
    assert decision.is_published
    assert (decision.before.acceptance_length, decision.after.acceptance_length) == pytest.approx((1.1, 1.35), abs=0.01)
    assert decision.gain == pytest.approx(0.25, abs=0.01)
    assert (publisher.version, publisher.data_version) == (1, 3)
    assert publisher.publish_if_better() is None


@pytest.mark.parametrize(("speedup", "is_published"), [(None, True), (1.01, True), (1.0, False), (0.4, False)])
def test_a_better_head_that_cannot_pay_is_not_published(
    speedup: float | None, is_published: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    publisher = publisher_of()
    publisher.expected_speedup = lambda quality: speedup
    publisher.trainer.train(steps(2))
    decision = publisher.publish_if_better()
    assert decision is not None
    assert decision.bound > 0
    assert decision.is_published is bool(publisher.version) is is_published
    assert ("The engine would be" in caplog.text) is not is_published


def test_a_head_that_was_better_when_it_could_not_pay_is_not_published_once_it_is_worse() -> None:
    publisher, published = publisher_of(OneWeight(0.5)), []
    for worth, speedup in ((0.9, 0.9), (0.45, 1.1)):
        publisher.expected_speedup = lambda quality, speedup=speedup: speedup
        publisher.trainer.train(steps(1))
        publisher.trainer.drafter.fc.data.fill_(worth)
        decision = publisher.publish_if_better()
        assert decision is not None
        assert decision.bound > 0  # by what was measured before, too
        published.append(decision.is_published)
    assert published == [False, False]


def test_a_head_that_pays_for_one_rank_is_published_for_all() -> None:
    ranks, versions = Ranks(2), dict[int, int]()

    def work(rank: int) -> None:
        publisher = publisher_of(None, ranks.sum_for(rank))
        publisher.expected_speedup = lambda quality: (0.9, 1.1)[rank]
        publisher.trainer.train(steps(2))
        publisher.trainer.average()
        publisher.publish_if_better()
        versions[rank] = publisher.version

    ranks.run(work)
    assert versions == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("enough", "chosen"), [(90, [0, 3, 6, 1, 4, 7, 2, 5, 8]), (50, [0, 3, 6, 1, 4]), (1, [0, 3, 6])]
)
def test_every_prompt_has_a_say_and_more_of_its_text_where_there_is_little(
    enough: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [sequence(10, prompt, answer=answer) for prompt in (1, 2, 3) for answer in range(3)]
    monkeypatch.setattr(publishing, "ENOUGH", enough)
    assert [id(text) for text in held_out_sample(texts)] == [id(texts[number]) for number in chosen]


@pytest.mark.parametrize("first", [False, True])
def test_no_text_is_left_out_for_its_length(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long one that reaches the limit is kept; none is taken in its place, however short."""
    lengths = [10, 90, 10, 10] if first else [10, 10, 90, 10]
    texts = [sequence(length, prompt, answer=n) for n, length in enumerate(lengths) for prompt in (1, 2)]
    monkeypatch.setattr(publishing, "ENOUGH", 55)
    assert held_out_sample(texts) == texts[: 3 if first else 5]


def test_texts_of_a_single_prompt_are_no_more_than_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [sequence(10, 1, answer=answer) for answer in range(9)]
    chosen = []
    for enough in (60, 1):  # fewer than four would prove hardly anything
        monkeypatch.setattr(publishing, "ENOUGH", enough)
        chosen.append(len(held_out_sample(texts)))
    assert chosen == [6, 4]


def test_a_decision_reads_no_more_text_than_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Counted(OneWeight):
        def measure(self, batch: PackedBatch) -> Tensor:
            read.append(len(batch.lengths))
            return super().measure(batch)

    monkeypatch.setattr(publishing, "ENOUGH", 1)
    publisher = publisher_of(Counted(0.1), version=5)  # of three held-out texts, which fill a pack
    texts = publisher.trainer.buffer.held_out
    publisher.trainer.buffer._held_out = [replace(text, policy_version=n) for text in texts for n in range(4)]
    publisher.trainer.train(steps(1))
    publisher.publish_if_better()
    assert sum(read) == 2 * len(texts)  # before and after


def test_a_refusal_throws_no_training_away() -> None:
    """A dip that comes before an improvement is trained through; what is served is what it was."""
    publisher = publisher_of(OneWeight(1.0))
    trainer, served = publisher.trainer, {}
    trainer.drafter.direction = 1.0
    for _ in range(2):
        trainer.train(steps(2))
        trained = weight(trainer)
        decision = publisher.publish_if_better()
        assert decision is not None
        assert not decision.is_published
        assert decision.quality is decision.before
        assert weight(trainer) == trained
        served = dict(publisher.published())
        assert served["fc.weight"].tolist() == [1.0, 1.0]
    assert trainer.optimizer.state[trainer.drafter.fc]["step"] == 4
    trainer.drafter.direction = -1.0
    trainer.train(steps(9))
    assert publisher.publish_if_better().is_published  # type: ignore[union-attr]
    assert publisher.version == 1


def test_a_trainee_that_has_truly_diverged_starts_over_from_what_is_published(caplog: pytest.LogCaptureFixture) -> None:
    publisher = publisher_of(OneWeight(1.0))
    trainer = publisher.trainer
    trainer.drafter.direction = 1.0
    trainer.train(steps(9))
    lost = []
    for _ in range(3):
        trainer.train(steps(1))
        decision = publisher.publish_if_better()
        assert decision is not None
        lost.append(decision.has_diverged)
    assert lost == [False, False, True]
    assert weight(trainer) == [1.0, 1.0]
    assert not trainer.optimizer.state
    assert "has diverged and starts over" in caplog.text
    assert decision.metrics()["drafter/started_over"] == 1


@pytest.mark.parametrize(("kept", "has_diverged"), [(0.42, False), (0.38, True)])
def test_a_trainee_has_diverged_once_half_of_what_drafts_gained_is_lost(kept: float, has_diverged: bool) -> None:
    publisher = publisher_of(OneWeight(0.8))
    for _ in range(3):
        publisher.trainer.train(steps(1))
        publisher.trainer.drafter.fc.data.fill_(kept)
        decision = publisher.publish_if_better()
        assert decision is not None
    assert decision.has_diverged is has_diverged


def test_evidence_is_pooled_over_four_decisions_and_forgotten_with_the_weights_that_it_is_of() -> None:
    publisher, counts = publisher_of(OneWeight(1.0)), []
    publisher.trainer.train(steps(20))  # of a head that is young nothing is pooled
    for worth in (*[0.9] * 6, 1.5):  # the last is published
        publisher.trainer.train(steps(1))
        publisher.trainer.drafter.fc.data.fill_(worth)
        publisher.publish_if_better()
        counts.append(len(publisher.state_dict()["evidence"]))
    assert counts == [1, 2, 3, 4, 4, 4, 0]
    assert publisher.version == 1


def test_a_trainee_is_lost_three_times_in_a_row_before_it_starts_over_and_so_again() -> None:
    publisher, lost = publisher_of(OneWeight(1.0)), []
    for worth in (0.1, 0.1, 0.9, *[0.1] * 7):
        publisher.trainer.train(steps(1))
        publisher.trainer.drafter.fc.data.fill_(worth)
        lost.append(publisher.publish_if_better().has_diverged)  # type: ignore[union-attr]
        assert (publisher.state_dict()["evidence"] == []) is lost[-1]
    assert [number for number, is_lost in enumerate(lost) if is_lost] == [5, 8]


def test_the_published_weights_are_lent_and_training_goes_on_from_its_own() -> None:
    publisher = publisher_of(OneWeight(0.5))
    publisher.trainer.drafter.direction = 1.0
    publisher.trainer.train(steps(3))
    publisher.publish_if_better()
    trained = weight(publisher.trainer)
    with publisher.loaded() as drafter:
        assert drafter.fc.tolist() == [0.5, 0.5]
    assert weight(publisher.trainer) == trained != [0.5, 0.5]


class Uneven(OneWeight):
    """Gains much on some texts and loses on others."""

    def measure(self, batch: PackedBatch) -> Tensor:
        sums = super().measure(batch)
        first = [int(batch.input_ids[0, at]) for at in torch.tensor([0, *batch.lengths]).cumsum(0)[:-1]]
        sums[:, 0] *= torch.tensor([[3.0 if token % 2 else -1.0] for token in first])
        return sums


def test_what_few_prompts_say_is_not_enough_and_evidence_is_pooled_over_decisions() -> None:
    publisher = publisher_of(Uneven(0.5))
    gains, bounds, published = [], [], []
    for version in (10, 13, 15, 18, 19, 20, 22, 23):  # of two held-out texts each
        publisher.trainer.buffer.add(make_buffer(version).training)
        publisher.trainer.begin(version)
        publisher.trainer.train(steps(1))
        decision = publisher.publish_if_better()
        assert decision is not None
        gains.append(decision.after.acceptance_length - decision.before.acceptance_length)
        bounds.append(decision.bound)
        published.append(decision.is_published)
    assert not published[0]
    assert gains[0] > 0  # a strict comparison would have published here
    assert any(published)
    assert bounds[published.index(True)] > 0
    assert all(bound <= 0 for bound, is_published in zip(bounds, published, strict=True) if not is_published)


@pytest.mark.parametrize("head_path", [None, "given"])
def test_evidence_of_a_young_head_is_not_held_against_it(head_path: str | None) -> None:
    drafter = OneWeight(0.4)
    drafter.head_path = head_path
    publisher, published, learns_first = publisher_of(drafter), [], []
    for worth in (0.1, 0.5, 1.1):  # a fall, as its drafts get longer, that later gains have not made up for
        publisher.trainer.train(steps(1))
        drafter.load_trainable(dict(drafter.trainable_tensors()) | {"fc.weight": torch.full((2,), worth)})
        published.append(publisher.publish_if_better().is_published)  # type: ignore[union-attr]
        learns_first.append(publisher.trainer.learns_first_drafts)
    assert published == [False, head_path is None, True]
    assert learns_first == [head_path is None] * 2 + [False]  # of more than two tokens per step


def test_the_error_of_a_gain_is_that_of_drawing_prompts_again() -> None:
    generator = torch.Generator().manual_seed(0)
    num_prompts = 40
    num_steps = 5 + 100 * torch.rand(num_prompts, generator=generator).double()
    worth = 1 + torch.randn(num_prompts, generator=generator).double() * 0.3  # texts of a prompt are alike
    gains = 0.05 + 0.2 * torch.randn(num_prompts, generator=generator).double()
    before = torch.stack([worth * num_steps, num_steps], -1)
    after = torch.stack([(worth + gains) * num_steps * 0.9, num_steps * 0.9], -1)
    first = torch.stack([before, after])
    second = first * torch.tensor([0.5, 0.8])  # drafts that fewer steps have
    pair = torch.stack([first, second], -1)
    gain, error = gain_and_margin(pair)
    assert gain == pytest.approx(1.625 * float((gains * num_steps).sum() / num_steps.sum()))
    drawn = torch.randint(num_prompts, (4000, num_prompts), generator=generator)
    again = pair[:, drawn].sum(2)  # (2, 4000, 2, 2)
    ratios = (again[:, :, 0] / again[:, :, 1]).sum(-1)
    assert error == pytest.approx(1.304 * float((ratios[1] - ratios[0]).std()), rel=0.05)  # Student's, 39 degrees


def test_a_single_prompt_proves_nothing() -> None:
    gain, error = gain_and_margin(torch.tensor([[[1.0, 2.0], [0.0, 0.0]], [[2.0, 2.0], [0.0, 0.0]]])[..., None])
    assert (gain, error) == (0.5, float("inf"))


def test_what_travels_is_what_was_published_and_the_policys_rows_of_now() -> None:
    publisher = publisher_of()
    trainer = publisher.trainer
    trainer.train(steps(2))
    publisher.publish_if_better()
    trainer.train(steps(2))
    trainer.drafter.policy_rows.fill_(7.0)
    assert {name: tensor[0].item() for name, tensor in publisher.published()} == pytest.approx(
        {"fc.weight": 0.35, "lm_head.weight": 7.0}, abs=0.01
    )
    with publisher.loaded():
        assert trainer.drafter.policy_rows[0] == 7  # which nothing takes back


def test_nothing_is_decided_without_held_out_text() -> None:
    publisher = publisher_of(num_sequences=1)
    publisher.trainer.train(steps(1))
    assert publisher.publish_if_better() is None
    assert publisher.trainer.num_pending == 1


def test_a_resumed_run_goes_on_as_the_other_one() -> None:
    def saved(publisher: DrafterPublisher) -> Any:
        stream = io.BytesIO()
        torch.save((publisher.trainer.state_dict(), publisher.state_dict()), stream)
        stream.seek(0)
        return torch.load(stream, weights_only=True)

    publisher = publisher_of()
    publisher.trainer.train(steps(3))
    publisher.publish_if_better()
    publisher.trainer.drafter.direction = 1.0
    publisher.trainer.train(steps(2))
    publisher.trainer.drafter.fc.data.fill_(0.5)
    publisher.publish_if_better()  # refused
    publisher.trainer.train(steps(2))
    other = publisher_of(OneWeight(0.9), version=8, num_sequences=4)
    trainer, mine = saved(publisher)
    other.trainer.load_state_dict(trainer)
    other.load_state_dict(mine)
    torch.testing.assert_close(other.state_dict(), publisher.state_dict(), rtol=0, atol=0)
    assert other.state_dict()["evidence"]
    other.trainer.drafter.direction = 1.0
    decisions = []
    for each in (publisher, other):
        each.trainer.begin(1)
        each.trainer.train(steps(2))
        decisions.append(each.publish_if_better())
    assert decisions[0] == decisions[1]
    assert weight(other.trainer) == weight(publisher.trainer)
    mine, its = ((each.version, each.data_version) for each in (publisher, other))
    assert mine == its
    assert dict(other.published())["fc.weight"].tolist() == dict(publisher.published())["fc.weight"].tolist()
    assert len(publisher.state_dict()["evidence"]) == len(other.state_dict()["evidence"]) > 0
    other.trainer.drafter.num_draft_tokens = 5  # of a run whose drafts are longer
    other.load_state_dict(publisher.state_dict())
    assert other.state_dict()["evidence"] == []
    assert other.quality is None


def test_ranks_decide_together_on_the_held_out_text_of_all() -> None:
    ranks = Ranks(3)
    publishers = [publisher_of(None, ranks.sum_for(rank), version=version) for rank, version in enumerate((5, 12, 14))]
    decisions: dict[int, Any] = {}

    def work(rank: int) -> None:
        publishers[rank].trainer.average()
        assert publishers[rank].publish_if_better() is None  # nobody has trained
        publishers[rank].trainer.train(steps((4, 0, 1)[rank]))
        publishers[rank].trainer.average()
        decisions[rank] = publishers[rank].publish_if_better()

    ranks.run(work)
    assert decisions[0] == decisions[1] == decisions[2]
    assert decisions[0].is_published
    assert decisions[0].after.num_steps == 9  # three texts of each
    assert [publisher.version for publisher in publishers] == [1, 1, 1]


@pytest.mark.parametrize(
    ("prompts", "num_clusters"),
    [
        ([[1] * 6], 6),  # all there is, so texts have to do
        ([[1, 1, 2, 2]], 2),
        ([[1, 1, 1], [2, 2, 2]], 2),  # one of each rank's
        ([[1, 1, 1], []], 3),
        ([[1, 1], [1, 1], [1, 1]], 6),
        ([[1, 1, 1], [2, 3]], 3),
    ],
)
def test_a_prompt_is_one_piece_of_evidence_whichever_rank_holds_it(
    prompts: list[list[int]], num_clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "NUM_CLUSTERS", 1 << 16)  # so that none meet
    ranks = Ranks(len(prompts))
    found: dict[int, list[int]] = {}

    def work(rank: int) -> None:
        texts = [sequence(10, prompt, answer=10 * rank + number) for number, prompt in enumerate(prompts[rank])]
        found[rank] = prompt_clusters(texts, ranks.sum_for(rank))

    ranks.run(work)
    assert [len(found[rank]) for rank in range(len(prompts))] == list(map(len, prompts))
    assert len({cluster for clusters in found.values() for cluster in clusters}) == num_clusters


def test_two_prompts_whose_clusters_are_the_same_are_not_told_apart_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "NUM_CLUSTERS", 1)
    texts = [sequence(10, prompt, answer=answer) for prompt in (1, 2) for answer in range(3)]
    monkeypatch.setattr(publishing, "text_key", lambda text: pytest.fail("by text"))
    assert prompt_clusters(texts, lambda own: own) == [0] * 6


@pytest.mark.parametrize(
    ("num_clusters", "quantile"), [(2, 2.6993), (3, 1.8477), (5, 1.5290), (10, 1.3827), (31, 1.3104), (1001, 1.2824)]
)
def test_the_margin_is_a_quantile_of_students_over_clusters_that_are_there(num_clusters: int, quantile: float) -> None:
    """Student's at 90% are 3.078, 1.886, 1.533, 1.383, 1.310, 1.282; the expansion is too small at few degrees."""
    gains = torch.arange(num_clusters).double()
    steps = torch.ones(num_clusters).double()
    pair = torch.stack([torch.stack([0 * gains, steps], -1), torch.stack([gains, steps], -1)])
    empty = torch.zeros(2, 7, 2, dtype=torch.float64)
    gain, error = gain_and_margin(torch.cat([empty, pair], 1)[..., None])
    assert gain == pytest.approx(gains.mean().item())
    assert error == pytest.approx(quantile * (gains.std() / num_clusters**0.5).item(), rel=1e-4)


BEFORE, AFTER = (DraftQuality((length - 1,), (0.5,), (0.75,), (2.0,), 9) for length in (1.5, 1.75))


@pytest.mark.parametrize(("is_published", "in_force"), [(True, 1.75), (False, 1.5)])
def test_the_quality_is_that_of_the_weights_in_force(is_published: bool, in_force: float) -> None:
    metrics = PublishDecision(BEFORE, AFTER, 0.25, 0.1, is_published, has_diverged=False).metrics()
    assert metrics["drafter/acceptance_length"] == in_force
    assert (metrics["drafter/acceptance_before"], metrics["drafter/acceptance_after"]) == (1.5, 1.75)
    assert (metrics["drafter/acceptance_gain"], metrics["drafter/acceptance_gain_bound"]) == (0.25, 0.1)
    assert (metrics["drafter/published"], metrics["drafter/started_over"]) == (is_published, 0.0)


def test_a_bound_that_a_single_text_does_not_give_is_not_logged() -> None:
    metrics = PublishDecision(BEFORE, AFTER, 0.25, -inf, is_published=False, has_diverged=True).metrics()
    assert "drafter/acceptance_gain_bound" not in metrics
    assert metrics["drafter/started_over"] == 1.0
