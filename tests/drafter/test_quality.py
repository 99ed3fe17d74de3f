import random
from itertools import product
from math import nan

import pytest
import torch

from tlt_lightning.drafter.quality import AcceptanceRule, DraftQuality, expect_acceptance, quality_of


def retraced(matches: list[list[bool]], lengths: list[int], first: int = 0) -> list[tuple[int, int]]:
    """How many drafts within the text each engine step has and how many it accepts, one document after the other."""
    steps, end = [], 0
    for length in lengths:
        at, end = end + first, end + length
        while at < end:
            accepted, drafted = 0, min(len(matches), end - at)
            while accepted < drafted and matches[accepted][at]:
                accepted += 1
            steps.append((drafted, accepted))
            at += accepted + 1
    return steps


def counted(steps: list[tuple[int, int]], num_drafts: int) -> list[list[int]]:
    return [[sum(step[kind] >= k for step in steps) for k in range(1, num_drafts + 1)] for kind in (1, 0)]


@pytest.mark.parametrize("seed", range(10))
def test_steps_of_an_engine_with_greedy_drafts_are_retraced(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [1, *(draw.randint(1, 20) for _ in range(6))]  # the first is shorter than a step's drafts
    first = 2
    matches = [[draw.random() < 0.7 for _ in range(sum(lengths))] for _ in range(3)]
    is_response = torch.cat([torch.arange(length) >= first for length in lengths])
    certain = torch.tensor(matches).float()  # what was written is all that might have been
    found = expect_acceptance(certain, certain, lengths, is_response).sum(0).tolist()
    assert found == counted(retraced(matches, lengths, first), 3)


def test_steps_of_an_engine_with_sampled_drafts_are_retraced_on_average() -> None:
    num_drafts, length = 2, 5
    chances = torch.rand(num_drafts, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, num_drafts, dtype=torch.float64)
    for bits in product((False, True), repeat=num_drafts * length):  # every way that drafts may match
        matches = torch.tensor(bits).view(num_drafts, length)
        weight = torch.where(matches, chances, 1 - chances).prod()
        expected += weight * torch.tensor(counted(retraced(matches.tolist(), [length]), num_drafts))
    found = expect_acceptance(chances, chances, [length], torch.ones(length).bool())
    torch.testing.assert_close(found, expected[None])


def test_padding_and_prompts_are_not_drafted() -> None:
    matches = torch.ones(2, 9)
    is_response = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 0]).bool()
    # One step from entry 2 accepts both drafts; of the next one's, from entry 5, the second is beyond the text.
    assert expect_acceptance(matches, matches, [6], is_response).tolist() == [[[2, 1], [2, 1]]]


def test_texts_shorter_than_a_draft_are_judged_by_what_they_have() -> None:
    """Or a run of short answers would never publish a head that drafts further than they go."""
    matches = torch.ones(7, 8)
    ((accepted, steps),) = expect_acceptance(matches, matches, [3], torch.arange(8) >= 1).tolist()
    assert accepted == steps == [1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("samples_drafts", [False, True])
def test_expected_acceptance_is_what_an_engine_that_writes_the_text_has(samples_drafts: bool) -> None:
    """Against the engine's rule itself, over texts of three tokens that do not depend on each other."""
    temperature, num_drafts, length = 0.7, 2, 30_000
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(2, 3, generator=generator)
    p, q = (targets / temperature).softmax(-1), (logits / temperature).softmax(-1)
    rule = AcceptanceRule(samples_drafts, temperature)
    written = torch.multinomial(p, length, replacement=True, generator=generator)
    rates, matches = rule.judge(logits.expand(length, -1), targets.expand(length, -1), written)
    rate = torch.minimum(p, q).sum() if samples_drafts else p[q.argmax()]
    torch.testing.assert_close(rates, rate.expand(length))
    assert matches.mean() == pytest.approx(rate.item(), abs=0.01)  # a text's own matches are so on average
    each = [row.expand(num_drafts, -1) for row in (rates, matches)]
    ((accepted, steps),) = expect_acceptance(*each, [length], torch.ones(length).bool()).tolist()
    # Each engine step accepts the first draft with `rate` and, independently here, the second.
    assert accepted[0] / steps[0] == pytest.approx(rate.item(), abs=1e-6)
    assert accepted[1] / steps[0] == pytest.approx(rate.item() ** 2, abs=0.01)


def test_drafts_that_share_the_noise_are_accepted_as_often_as_both_draw_the_same() -> None:
    temperature, num_draws, vocab_size = 0.8, 200_000, 20
    generator = torch.Generator().manual_seed(1)
    targets = 4 * torch.randn(vocab_size, generator=generator)
    logits = targets + torch.randn(vocab_size, generator=generator)
    noise = -torch.empty(num_draws, vocab_size).exponential_(generator=generator).log()
    written, drafts = ((values / temperature + noise).argmax(-1) for values in (targets, logits))
    rule = AcceptanceRule(samples_drafts=True, temperature=temperature, shares_noise=True)
    tokens = written.unique()
    rates, matches = rule.judge(logits.expand(len(tokens), -1), targets.expand(len(tokens), -1), tokens)
    same = drafts == written
    assert rates[0].item() == pytest.approx(same.float().mean().item(), abs=0.008)
    for token, match in zip(tokens.tolist(), matches.tolist(), strict=True):
        if (is_token := written == token).sum() > 2000:
            assert match == pytest.approx(same[is_token].float().mean().item(), abs=0.04), token
    sampled, _ = AcceptanceRule(samples_drafts=True, temperature=temperature).judge(
        logits[None], targets[None], tokens[:1]
    )
    likeliest, _ = AcceptanceRule(temperature=temperature).judge(logits[None], targets[None], tokens[:1])
    assert likeliest.item() < rates[0].item() < sampled.item()


CUTS = [{"top_p": 0.7}, {"top_k": 3}, {"top_p": 0.8, "top_k": 6}, {"top_p": 1e-6}]


@pytest.mark.vllm
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_what_the_engine_cuts_from_the_policy_is_cut_here(cut: dict[str, float], temperature: float) -> None:
    """Against vLLM's own filters, for all three ways of drafting."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    generator = torch.Generator().manual_seed(0)
    targets, logits = 2 * torch.randn(2, 64, 40, generator=generator)
    p, q = (values.div(temperature).softmax(-1) for values in (targets, logits))
    left = targets.div(temperature)
    top_k, top_p = torch.full((64,), cut.get("top_k", 40)), torch.full((64,), cut.get("top_p", 1.0))
    p = apply_top_k_top_p_pytorch(left, top_k, top_p).softmax(-1)
    token = p.multinomial(1, generator=generator)
    likeliest, sampled, coupled = (
        AcceptanceRule(*way, **cut).judge(logits, targets, token[:, 0])
        for way in ((False, temperature), (True, temperature), (True, temperature, True))
    )
    torch.testing.assert_close(likeliest[0], p.gather(-1, q.argmax(-1, keepdim=True))[:, 0])
    torch.testing.assert_close(sampled[0], torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(sampled[1], (q / p).gather(-1, token)[:, 0].clamp(max=1))
    same = same_draws(logits, temperature * p.log(), temperature)
    torch.testing.assert_close(coupled[0].double(), (p * same).nansum(-1), atol=0.02, rtol=0)


def test_a_nucleus_of_very_many_tokens_is_not_cut() -> None:
    rates = [
        AcceptanceRule(top_p=top_p).judge(torch.ones(1, 5000), torch.ones(1, 5000), torch.tensor([3]))[0].item()
        for top_p in (1.0, 0.9)
    ]
    assert rates == [pytest.approx(1 / 5000)] * 2


def test_more_tokens_than_the_likeliest_that_are_usually_looked_at_may_be_kept() -> None:
    targets = torch.linspace(0, 1, 5000)[None]
    p = (targets[0, -2000:].softmax(-1)[-1]).item()
    rates, _ = AcceptanceRule(top_k=2000).judge(targets, targets, torch.tensor([4999]))
    assert rates.item() == pytest.approx(p)


def same_draws(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the chance that the head draws each token with the noise by which the target draws it, (n, V)."""
    p, q = (values.double().div(temperature).softmax(-1)[..., None] for values in (targets, logits))
    return 1 / torch.maximum(p.mT, q.mT * (p / q)).sum(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("vocab_size", [2, 8, 600])
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("error", [0.1, 1.0, 4.0])
def test_drafts_that_share_the_noise_are_judged_to_a_hundredth(
    temperature: float, vocab_size: int, spread: float, error: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = (spread * torch.randn(8, vocab_size, generator=generator)).bfloat16()
    logits = (targets + error * torch.randn(8, vocab_size, generator=generator)).bfloat16()
    p, same = targets.double().div(temperature).softmax(-1), same_draws(logits, targets, temperature)
    token = p.multinomial(1, generator=generator)
    rule = AcceptanceRule(samples_drafts=True, temperature=temperature, shares_noise=True)
    rates, matches = rule.judge(logits, targets, token[:, 0])
    torch.testing.assert_close(rates.double(), (p * same).sum(-1), atol=0.015, rtol=0)
    torch.testing.assert_close(matches.double(), same.gather(-1, token)[:, 0], atol=0.03, rtol=0)


@pytest.mark.parametrize("samples_drafts", [False, True])
def test_logits_in_bfloat16_are_judged_in_float32(samples_drafts: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    targets, logits = torch.randn(2, 8, 600, generator=generator).bfloat16()
    p, q = (values.double().softmax(-1) for values in (targets, logits))
    rates, _ = AcceptanceRule(samples_drafts).judge(logits, targets, torch.zeros(8, dtype=torch.long))
    expected = torch.minimum(p, q).sum(-1) if samples_drafts else p.gather(-1, q.argmax(-1, keepdim=True))[:, 0]
    torch.testing.assert_close(rates.double(), expected, atol=0, rtol=1e-5)


def test_no_token_is_kept_with_more_than_certainty() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = 10 * torch.randn(50, generator=generator)
    logits, tokens = targets + 20 * torch.randn(50, generator=generator), torch.arange(50)
    for shares_noise in (False, True):
        rule = AcceptanceRule(samples_drafts=True, shares_noise=shares_noise)
        _, matches = rule.judge(logits.expand(50, -1), targets.expand(50, -1), tokens)
        assert matches.min() >= 0
        assert matches.max() == 1, shares_noise


def test_a_head_sure_of_tokens_that_the_target_never_writes_is_hardly_ever_kept() -> None:
    targets, logits = torch.zeros(1, 400), torch.zeros(1, 400)
    targets[:, :40], logits[:, :40] = -200, 12
    rule = AcceptanceRule(samples_drafts=True, shares_noise=True)
    rates, matches = rule.judge(logits, targets, torch.tensor([100]))
    assert 0 < rates.item() < 1e-3
    assert rates.item() == pytest.approx(matches.item())


def test_a_token_that_the_head_cannot_draft_is_a_rejection() -> None:
    rates, matches = AcceptanceRule().judge(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([-1, 0]))
    assert rates.tolist() == [0, pytest.approx(1 / 3)]
    assert matches.tolist() == [0, 1]


def test_at_temperature_zero_a_draft_is_accepted_or_not() -> None:
    targets = torch.tensor([[0.0, 0.1], [0.1, 0.0]])
    rates, _ = AcceptanceRule(temperature=0).judge(torch.tensor([[0.0, 1.0]] * 2), targets, torch.tensor([1, 0]))
    assert rates.tolist() == pytest.approx([1, 0])


def test_a_token_that_neither_distribution_holds_is_a_rejection() -> None:
    logits = torch.tensor([[0.0, 1.0]] * 2)
    for shares_noise in (False, True):
        rule = AcceptanceRule(samples_drafts=True, temperature=0, shares_noise=shares_noise)
        rates, matches = rule.judge(logits, logits, torch.tensor([-1, 0]))
        assert rates.tolist() == [0, 1]
        assert matches.tolist() == [0, 0]


@pytest.mark.parametrize("rule", [AcceptanceRule(), AcceptanceRule(True), AcceptanceRule(True, shares_noise=True)])
def test_a_head_that_is_no_number_drafts_nothing(rule: AcceptanceRule) -> None:
    logits, targets = torch.tensor([[nan] * 3, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]), torch.zeros(3, 3)
    targets[1] = nan
    for part in rule.judge(logits, targets, torch.tensor([0, 0, 2])):
        assert part[:2].tolist() == [0, 0]
        assert part[2] > 0


def test_quality_is_the_mean_over_steps_and_positions() -> None:
    sums = torch.tensor([[6, 2], [8, 8], [5, 4], [10, 6], [20, 40], [10, 8]])
    quality = quality_of(sums)
    assert quality == DraftQuality((0.75, 0.25), (0.5, 0.5), (1, 0.75), (2, 5), num_steps=8)
    assert quality.acceptance_length == 2
    metrics = quality.metrics()
    assert metrics["drafter/acceptance_length"] == 2
    assert metrics["drafter/top3_pos_2"] == 0.75
    assert metrics["drafter/acceptance_rate_pos_1"] == 0.75


def test_nothing_measured_is_no_acceptance() -> None:
    assert quality_of(torch.zeros(6, 3)).acceptance_length == 1


def test_a_later_answer_of_a_text_is_drafted_by_steps_of_its_own() -> None:
    matches = torch.ones(2, 9)
    is_response = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0]).bool()
    # A step of two drafts from entry 1, and one from entry 5; none reaches into what others wrote.
    assert expect_acceptance(matches, matches, [8], is_response).tolist() == [[[2, 2], [2, 2]]]
