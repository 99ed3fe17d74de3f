"""The head that is trained is the one that vLLM runs, and its acceptance measured on text the one that it reaches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.drafters.draft_texts import draft_logits, make_drafter, pack, quality_on, read_by_target, train
from tests.support.speculation_engines import (
    GREEDY,
    PROMPTS,
    ScriptedSelector,
    engine_of,
    greedy_texts,
    save_endless_policy,
    siblings,
    write,
)
from tlt_lightning import Sampling
from tlt_lightning.drafter.architectures.training_time_test import unroll
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import plan_packs
from tlt_lightning.drafter.quality import AcceptanceRule, DraftQuality
from tlt_lightning.drafter.vocabulary import drafted_tokens
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.patches.finite_drafts import LARGEST
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request
from tlt_lightning.speculation.strategy import Strategy

pytestmark = pytest.mark.vllm

NUM_DRAFTS = 3
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"architecture": "qwen2"},
    "llama, untied, scaled positions": {
        "architecture": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    },
    "qwen2, some of the tokens": {"architecture": "qwen2", "draft_vocab_size": 16},
}


class Setup(NamedTuple):
    drafter: DrafterModule
    engine: VLLMEngine
    quality: DraftQuality


@pytest.fixture(scope="module", params=list(CASES))
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    case = dict(CASES[request.param])
    draft_vocab_size = case.pop("draft_vocab_size", None)
    path = tmp_path_factory.mktemp("alignment")
    policy = save_endless_policy(path / "policy", **case)
    texts = greedy_texts(policy, 64)
    drafter = DrafterModule(policy, draft_vocab_size=draft_vocab_size, num_draft_tokens=NUM_DRAFTS)
    drafter.choose_vocabulary(torch.bincount(torch.tensor(texts).flatten(), minlength=32))
    drafter.configure_model()
    batches = pack(read_by_target(policy, texts, len(PROMPTS[0]), drafter.layer_ids), 384)
    train(drafter, batches, num_steps=80)
    drafter.acceptance = AcceptanceRule(temperature=0)  # as the engine writes below
    quality = quality_on(drafter, batches)
    head = drafter.export(path / "head", quality)
    selector = ScriptedSelector(longest=NUM_DRAFTS)
    selector.script = lambda state: Strategy(NUM_DRAFTS, "learned")
    speculation = Speculation(selector=selector, head=str(head), max_draft_tokens=NUM_DRAFTS)
    with engine_of(policy, speculation) as engine:
        yield Setup(drafter, engine, quality)


class Draft(NamedTuple):
    """What the engine drafted from: the text so far, and the logits of each draft."""

    num_written: int
    logits: list[Tensor]


def record_drafts(engine: VLLMEngine, request: Request) -> tuple[list[int], list[Draft]]:
    """Write one response; return it, and what was drafted in each engine step."""
    model = engine.inspect().model_runner.drafter.model
    compute, seen, drafts = model.compute_logits, [], []

    def spy(states: Tensor) -> Tensor:
        logits = compute(states)
        seen.append(logits[0].clone())
        return logits

    def after_step(progress: Any) -> None:
        drafts.append(Draft(progress.tokens, list(seen)))
        seen.clear()

    model.compute_logits = spy
    try:
        (response,) = engine.generate([request], GREEDY, seed=0, on_progress=after_step)
    finally:
        del model.compute_logits
    # What was drafted when the limit was reached started from tokens beyond it.
    return list(response.token_ids), [draft for draft in drafts if draft.num_written < request.max_tokens]


def as_sequence(drafter: DrafterModule, policy: Any, text: list[int], drafted: list[int]) -> PolicyText:
    """The text with drafts behind it; the target has not seen those, so their states must not matter."""
    (seen,) = read_by_target(policy, [text], 1, drafter.layer_ids)
    unseen = lambda states: torch.cat([states, torch.full((len(drafted), states.shape[1]), 1e3)])  # noqa: E731
    ids = torch.cat([seen.input_ids, torch.tensor(drafted)])
    return PolicyText(ids, unseen(seen.states), unseen(seen.last_states), 1)


def check_alignment(setup: Setup, policy: Any) -> None:
    """Compare the logits of every draft of a response with those of the packed training pass over what it wrote."""
    response, drafts = record_drafts(setup.engine, Request(id=0, prompt_ids=PROMPTS[0], max_tokens=24))
    assert len(drafts) > 4
    head, sequences, lengths = setup.drafter.head, [], []
    for draft in drafts:
        text = [*PROMPTS[0], *response[: draft.num_written]]
        drafted = [int(logits.argmax()) for logits in draft.logits]
        sequences.append(as_sequence(setup.drafter, policy, text, drafted))
        lengths.append(len(text))
    tokens = torch.arange(32) if head.d2t is None else drafted_tokens(head.d2t)
    plan = plan_packs([len(sequence) for sequence in sequences], 1024)
    for batch, pieces in zip(pack(sequences, 1024), plan, strict=True):
        with torch.no_grad():
            logits = draft_logits(head, unroll(head, batch, NUM_DRAFTS))
        for number, piece in enumerate(pieces):
            is_here = (batch.document_ids[0] == number) & (batch.position_ids[0] == lengths[piece.sequence] - 2)
            expected = torch.stack(drafts[piece.sequence].logits)
            assert (expected > -LARGEST).sum() == NUM_DRAFTS * len(tokens)
            torch.testing.assert_close(logits[:, is_here].squeeze(1), expected[:, tokens], atol=1e-4, rtol=1e-4)


def test_the_engine_drafts_what_the_trained_head_does(setup: Setup) -> None:
    check_alignment(setup, setup.drafter.target)


def test_measured_acceptance_is_what_the_engine_reaches(setup: Setup) -> None:
    write(setup.engine, siblings())
    reached = setup.engine.stats()["speculation/acceptance_length"]
    assert setup.quality.acceptance_length > 1.5
    assert reached == pytest.approx(setup.quality.acceptance_length, rel=0.1)


def test_pushed_to_the_engine_it_stays_aligned_after_the_policy_has_moved(setup: Setup) -> None:
    policy = load_policy(setup.drafter.target)
    with torch.no_grad():
        for parameter in [*policy.parameters(), *(p for p in setup.drafter.parameters() if p.requires_grad)]:
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    setup.drafter.refresh_target(policy)
    setup.engine.update_weights(PolicyWeights(policy), 1)
    setup.engine.update_drafter(setup.drafter.trainable_tensors(), 1)
    check_alignment(setup, policy)


@pytest.mark.slow
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
    with engine_of(policy, speculation, max_num_seqs=64) as engine:
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
