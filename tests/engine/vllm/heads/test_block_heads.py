"""A DSpark head in the engine, on a GPU: any part of its block is verified, it catches up, and is replaced in place."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.drafters.draft_texts import make_drafter, pack, quality_on, read_by_target
from tests.support.drafters.held_weights import different_weights
from tests.support.speculation_engines import (
    PROMPTS,
    ScriptedSelector,
    engine_of,
    greedy_gap,
    greedy_texts,
    save_endless_policy,
    siblings,
    train_block_head,
    write,
)
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import AcceptanceRule
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.speculation.strategy import OFF, Strategy

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]

TOLERANCE = 0.3
"""Logits that bfloat16 cannot tell apart."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_endless_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def trained(policy: str) -> DrafterModule:
    return train_block_head(policy)


def speculation_of(head: Any, **arguments: Any) -> Speculation:
    drafters = ("learned", "sibling", "mixed") if arguments.get("siblings") else ("learned",)
    selector = ScriptedSelector(drafters)  # type: ignore[arg-type]
    return Speculation(selector=selector, head=str(head), max_draft_tokens=5, steps_per_choice=1, **arguments)


@pytest.fixture(scope="module")
def engine(policy: str, trained: DrafterModule, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    head = trained.export(tmp_path_factory.mktemp("head"))
    speculation = speculation_of(head, siblings=True)
    with engine_of(policy, speculation, enforce_eager=False, dtype="bfloat16", sleep=True) as made:
        yield made


def written(engine: VLLMEngine, policy: str, script: Any) -> float:
    """Write by a script; check that the text is greedy; return tokens per request and step."""
    assert engine.speculation is not None
    selector: Any = engine.speculation.selector
    if callable(script):
        script(selector)
    else:
        selector.script = lambda state: script
    requests = siblings()
    texts = write(engine, requests)
    assert [len(text) for text in texts] == [request.max_tokens for request in requests]
    assert greedy_gap(policy, [list(request.prompt_ids) for request in requests], texts) < TOLERANCE
    return engine.stats()["speculation/acceptance_length"]


def taken(whole: DrafterModule, reduced: DrafterModule) -> dict[str, torch.Tensor]:
    """Tensors of a head of the whole vocabulary, of the rows that a reduced one has."""
    drafted = reduced.vocabulary
    assert drafted is not None
    tensors = dict(whole.trainable_tensors())
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][drafted]
    return tensors


@pytest.mark.parametrize(("draft_sampling", "draft_vocab_size"), [("greedy", None), ("probabilistic", 24)])
def test_weights_that_it_is_given_are_those_that_it_drafts_with(
    policy: str,
    trained: DrafterModule,
    draft_sampling: Any,
    draft_vocab_size: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    counts = torch.zeros(trained.target_config.vocab_size)
    for text in greedy_texts(policy, 64):
        counts += torch.bincount(torch.tensor(text), minlength=len(counts))
    cold = make_drafter(
        policy, architecture=DSpark(num_layers=2, block_size=6, markov_rank=8), draft_vocab_size=draft_vocab_size
    )
    speculation = speculation_of(cold.export(tmp_path_factory.mktemp("cold")), draft_sampling=draft_sampling)
    with engine_of(policy, speculation, enforce_eager=False, dtype="bfloat16") as engine:
        controller: Any = engine.inspect().controller
        controller.alarm.window = 10**9
        assert written(engine, policy, Strategy(5)) < 1.5
        warm = trained
        if draft_vocab_size is not None:
            warm = make_drafter(policy, architecture=cold.architecture, draft_vocab_size=draft_vocab_size)
            warm.choose_vocabulary(counts)
            warm.refresh_target(load_policy(policy))
            assert warm.head is not None
            warm.load_trainable(dict(warm.trainable_tensors()) | taken(trained, warm))
        tokens = [] if warm.head is None or warm.head.d2t is None else [("d2t", warm.head.d2t)]
        engine.update_drafter([*warm.trainable_tensors(), *tokens], 1)
        assert different_weights(engine, warm.trainable_tensors()) == []
        assert written(engine, policy, Strategy(5)) > 2


def test_any_part_of_a_block_is_verified_in_any_step(engine: VLLMEngine, policy: str, trained: DrafterModule) -> None:
    lengths = {k: written(engine, policy, Strategy(k)) for k in (1, 3, 5)}
    assert 1.2 < lengths[1] <= 2 < lengths[3] < lengths[5]
    texts = read_by_target(policy, greedy_texts(policy, 64), len(PROMPTS[0]), trained.layer_ids)
    trained.acceptance = AcceptanceRule(temperature=0)
    expected = quality_on(trained, pack(texts, 512)).accepted
    for k, length in lengths.items():
        assert length == pytest.approx(1 + sum(expected[:k]), rel=0.25)
    written(engine, policy, lambda selector: selector.at_random(0))
    graphs = engine.inspect().graphs
    assert graphs is not None
    assert {"drafter_prefill_full"} == {name for name in graphs.hits if name.startswith("drafter")}


def test_it_catches_up_as_if_it_had_never_been_off(engine: VLLMEngine, policy: str) -> None:
    always = written(engine, policy, Strategy(4))
    written(engine, policy, OFF)
    assert engine.stats()["speculation/skipped_passes"] > 0
    assert engine.stats()["speculation/catch_ups"] > 1
    selector: Any = engine.speculation.selector  # type: ignore[union-attr]
    selector.records.clear()
    written(engine, policy, lambda selector: selector.off_and_on(Strategy(4), steps=9))
    found = [n for _, arm, tokens, _ in selector.records if not arm.is_off for n in tokens]
    assert sum(found) / len(found) > 0.85 * always


def test_it_drafts_the_same_after_sleep(engine: VLLMEngine, policy: str) -> None:
    before = written(engine, policy, Strategy(5))
    engine.sleep()
    torch.empty(2**28, dtype=torch.uint8, device="cuda").fill_(255)  # what was unmapped is gone
    engine.wake()
    engine.update_weights(PolicyWeights(load_policy(policy)), 1)
    assert written(engine, policy, Strategy(5)) == pytest.approx(before, rel=0.02)
