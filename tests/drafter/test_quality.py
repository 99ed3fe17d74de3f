import random

import pytest
import torch

from tlt_lightning.drafter.quality import DraftQuality, count_accepted, quality_of


def retraced(matches: list[list[bool]], lengths: list[int], first: int = 0) -> list[tuple[int, int]]:
    """Where each engine step starts and how many drafts it accepts, one document after the other."""
    steps, end = [], 0
    for length in lengths:
        at, end = end + first, end + length
        while at + len(matches) <= end:
            accepted = 0
            while accepted < len(matches) and matches[accepted][at]:
                accepted += 1
            steps.append((at, accepted))
            at += accepted + 1
    return steps


@pytest.mark.parametrize("seed", range(10))
def test_steps_of_the_engine_are_retraced(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(6)]
    first = 2
    matches = [[draw.random() < 0.7 for _ in range(sum(lengths))] for _ in range(3)]
    is_response = torch.cat([torch.arange(length) >= first for length in lengths])
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    accepted, starts = count_accepted(torch.tensor(matches), documents, is_response).tolist()
    steps = retraced(matches, lengths, first)
    assert accepted == [sum(number >= k for _, number in steps) for k in (1, 2, 3)]
    assert starts == [len(steps)] * 3


def test_padding_and_prompts_are_not_drafted() -> None:
    matches = torch.ones(2, 9, dtype=torch.bool)
    documents = torch.tensor([0, 0, 0, 0, 0, 0, -1, -1, -1])
    is_response = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 0]).bool()
    # One step from entry 2 accepts both drafts; the next would start from entry 5, whose drafts reach beyond the text.
    assert count_accepted(matches, documents, is_response).tolist() == [[1, 1], [1, 1]]


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
