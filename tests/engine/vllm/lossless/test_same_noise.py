"""On vLLM's V2 runner drafts that are single tokens leave a seed's text as plain decoding writes it.

In float32, and up to rounding: a pass over more tokens may add up otherwise, which once in some ten thousand tokens
turns a draw. So one of the responses may differ, and from there on has other text.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.speculation_engines import (
    ScriptedSelector,
    engine_of,
    save_endless_policy,
    save_trained_head,
    siblings,
    write,
    write_in_pieces,
)
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.runner_v2 import keep_drawn
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.rollout import Request, Sampling
from tlt_lightning.seeds import seed_of
from tlt_lightning.speculation.strategy import Strategy

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]

SAMPLINGS = [Sampling(max_tokens=64, temperature=temperature) for temperature in (0.5, 1.0)]


class Setup(NamedTuple):
    engine: VLLMEngine
    selector: ScriptedSelector
    policy: str
    plain: list[list[list[int]]]  # texts without speculation, for each of `SAMPLINGS`


def seeded() -> list[Request]:
    return [replace(request, seed=seed_of(7, request.id)) for request in siblings()]


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    if not internals.runs_v2():
        pytest.skip("the V1 runner verifies by rejection sampling")
    path = tmp_path_factory.mktemp("noise")
    policy = save_endless_policy(path / "policy")
    head = save_trained_head(policy, path / "head")
    with engine_of(policy, None) as engine:
        plain = [write(engine, seeded(), sampling) for sampling in SAMPLINGS]
    selector = ScriptedSelector(("learned", "sibling", "mixed"))
    speculation = Speculation(
        selector=selector,
        head=head,
        siblings=True,
        max_draft_tokens=5,
        steps_per_choice=1,
        draft_sampling=request.param,
    )
    with engine_of(policy, speculation) as engine:
        controller: Any = engine.inspect().controller
        controller.alarm.window = 10**9  # the head knows greedy text alone
        yield Setup(engine, selector, policy, plain)


def assert_plain(setup: Setup) -> None:
    for sampling, plain in zip(SAMPLINGS, setup.plain, strict=True):
        texts = write(setup.engine, seeded(), sampling, seed=1)
        assert setup.engine.stats()["speculation/acceptance_length"] > 1
        same = [text == other for text, other in zip(texts, plain, strict=True)]
        assert sum(same) >= len(same) - 1, same


@pytest.mark.parametrize("drafter", ["learned", "sibling", "mixed"])
def test_drafts_of_one_length_leave_the_text_of_a_seed(setup: Setup, drafter: Any) -> None:
    setup.selector.script = lambda state: Strategy(3, drafter)
    assert_plain(setup)


def test_drafts_of_random_lengths_leave_the_text_of_a_seed(setup: Setup) -> None:
    setup.selector.at_random(0)
    assert_plain(setup)


def test_responses_stopped_and_continued_keep_their_noise(setup: Setup) -> None:
    setup.selector.at_random(1)
    for sampling, plain in zip(SAMPLINGS, setup.plain, strict=True):
        responses = write_in_pieces(setup.engine, seeded(), sampling, num_steps=7, seed=1)
        same = [list(response.token_ids) == text for response, text in zip(responses, plain, strict=True)]
        assert sum(same) >= len(same) - 1, same


def test_drafts_are_counted_without_a_wait_for_the_device() -> None:
    drawn = torch.tensor([5, 6, 7, 5, 6, 5], device="cuda")
    drafts = torch.tensor([9, 5, 6, 9, 4, 9], device="cuda", dtype=torch.int32)
    bounds = torch.tensor([0, 3, 5, 6], device="cuda", dtype=torch.int32)
    columns = torch.arange(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, counts = keep_drawn(drawn, drafts, bounds, columns)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)] == [[5, 6, 7], [5], [5]]
