"""Acceptance as it is measured on text is what the real engine then has, for sampled text and both ways of drafting."""

from pathlib import Path
from typing import Literal

import pytest

from tests.support.drafters.draft_texts import make_drafter, pack, quality_on, read_by_target, train
from tests.support.speculation_engines import ScriptedSelector, engine_of, save_endless_policy, write
from tlt_lightning import Sampling
from tlt_lightning.drafter.quality import AcceptanceRule
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.rollout import Request
from tlt_lightning.speculation.strategy import Strategy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_DRAFTS = 3


@pytest.mark.parametrize(
    ("draft_sampling", "siblings", "top_p"),
    [
        ("greedy", False, 1.0),
        ("probabilistic", False, 1.0),
        ("probabilistic", False, 0.8),
        pytest.param("probabilistic", True, 1.0, marks=pytest.mark.gpu),  # the V2 runner shares the noise
        pytest.param("probabilistic", True, 0.8, marks=pytest.mark.gpu),
    ],
)
def test_measured_acceptance_is_what_the_engine_reaches_at_a_temperature(
    draft_sampling: Literal["greedy", "probabilistic"], siblings: bool, top_p: float, tmp_path: Path
) -> None:
    sampling = Sampling(max_tokens=48, temperature=0.7, top_p=top_p)
    policy = save_endless_policy(tmp_path / "policy")
    drafter = make_drafter(policy, num_draft_tokens=NUM_DRAFTS)
    head = drafter.export(tmp_path / "head")
    selector = ScriptedSelector(("learned", "sibling") if siblings else ("learned",), longest=NUM_DRAFTS)
    speculation = Speculation(
        selector=selector,
        head=str(head),
        siblings=siblings,
        max_draft_tokens=NUM_DRAFTS,
        draft_sampling=draft_sampling,
    )
    shares_noise = speculation.couples_drafts(is_v2=internals.runs_v2())
    requests = [Request(id=i, prompt_ids=[2 + i % 29, 5, 7, 3], group=i) for i in range(64)]
    selector.script = lambda state: Strategy(NUM_DRAFTS, "learned")
    with engine_of(policy, speculation) as engine:
        texts = write(engine, requests, sampling)
        # Texts of one length, half to train on and half to measure on.
        whole = [[*request.prompt_ids, *text] for request, text in zip(requests, texts, strict=True)]
        whole = [text for text in whole if len(text) == 52]
        sequences = read_by_target(policy, whole, 4, drafter.layer_ids)
        train(drafter, pack(sequences[: len(sequences) // 2], 512), num_steps=60)
        engine.update_drafter(drafter.trainable_tensors(), 1)
        drafter.acceptance = AcceptanceRule(draft_sampling == "probabilistic", shares_noise=shares_noise).of(sampling)
        measured = quality_on(drafter, pack(sequences[len(sequences) // 2 :], 512)).acceptance_length
        write(engine, requests, sampling, seed=1)
        reached = engine.stats()["speculation/acceptance_length"]
    assert reached == pytest.approx(measured, rel=0.06)
    drafter.acceptance = AcceptanceRule(draft_sampling != "probabilistic").of(sampling)
    of_the_other = quality_on(drafter, pack(sequences[len(sequences) // 2 :], 512)).acceptance_length
    # One does not stand for the other: 1.13 greedy, 1.51 sampled; 1.16 and 1.27 with shared noise and a top_p of 0.8.
    assert of_the_other != pytest.approx(reached, rel=0.06)
