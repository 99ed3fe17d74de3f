"""Speculation with CUDA graphs: planned, replayed, kept over sleep. The other tests run without graphs on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.speculation_engines import (
    PROMPTS,
    ScriptedSelector,
    engine_of,
    save_endless_policy,
    save_trained_head,
    siblings,
    write,
)
from tlt_lightning.engine import VLLMEngine, vllm_internals
from tlt_lightning.engine.vllm_speculation import Speculation
from tlt_lightning.policy import load_policy, stream_weights
from tlt_lightning.speculation import BucketedGraphPool, FullGraphPool
from tlt_lightning.speculation.base import OFF, Strategy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Paths = tuple[str, str]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    path = tmp_path_factory.mktemp("gpu")
    policy = save_endless_policy(path / "policy")
    return policy, save_trained_head(policy, path / "head")


@pytest.fixture(scope="module")
def texts(paths: Paths) -> list[list[int]]:
    """What the plain engine writes: kernels of a GPU may round otherwise than `transformers` on a CPU."""
    with engine_of(paths[0], None) as engine:
        return write(engine, siblings())


@pytest.fixture(scope="module", params=[BucketedGraphPool, FullGraphPool])
def engine(request: pytest.FixtureRequest, paths: Paths, texts: list[list[int]]) -> Iterator[VLLMEngine]:
    if not vllm_internals.runs_v2():
        pytest.skip("graphs are planned for the V2 runner")
    selector = ScriptedSelector(("learned", "sibling"))
    speculation = Speculation(
        selector=selector,
        head=paths[1],
        siblings=True,
        max_draft_tokens=5,
        steps_per_choice=1,
        graph_pool=request.param(),
    )
    can_sleep = request.param is FullGraphPool  # the last one, as vLLM allows one such engine per process
    with engine_of(paths[0], speculation, enforce_eager=False, sleep=can_sleep) as made:
        yield made


def script(engine: VLLMEngine, rule: Any) -> None:
    assert engine.speculation is not None
    selector: Any = engine.speculation.selector
    rule(selector)


def test_greedy_text_is_the_same_while_strategies_change(engine: VLLMEngine, texts: list[list[int]]) -> None:
    script(engine, lambda selector: selector.at_random(0))
    assert write(engine, siblings()) == texts
    script(engine, lambda selector: selector.off_and_on(Strategy(4), steps=7))
    assert write(engine, siblings()) == texts


@pytest.mark.parametrize("drafter", ["learned", "sibling"])
def test_drafters_are_accepted(engine: VLLMEngine, texts: list[list[int]], drafter: Any) -> None:
    script(engine, lambda selector: setattr(selector, "script", lambda state: Strategy(5, drafter)))
    assert write(engine, siblings()) == texts
    assert engine.stats()["speculation/acceptance_length"] > 1.5


def test_decode_steps_replay_graphs_and_captures_are_reported(engine: VLLMEngine) -> None:
    for strategy in (OFF, Strategy(3), Strategy(5)):
        script(engine, lambda selector, strategy=strategy: setattr(selector, "script", lambda state: strategy))
        write(engine, siblings())
        assert engine.stats()["speculation/graph_hits"] > 0.8
    graphs = engine._session.graphs
    report = graphs.report()
    assert set(report.seconds) == {"target", "drafter_prefill", "drafter_decode", "piecewise"}
    assert sum(report.mib.values()) > 0
    assert "drafter decode" in graphs.plan.table(report)


def test_sleep_keeps_the_head(engine: VLLMEngine, paths: Paths, texts: list[list[int]]) -> None:
    if not engine.sleep_enabled:
        pytest.skip("this one cannot sleep")
    script(engine, lambda selector: setattr(selector, "script", lambda state: Strategy(5)))
    assert write(engine, siblings()) == texts
    accepted = engine.stats()["speculation/acceptance_length"]
    engine.sleep()
    engine.wake()
    engine.update_weights(stream_weights(load_policy(paths[0])), 1)
    assert write(engine, siblings()) == texts
    assert engine.stats()["speculation/acceptance_length"] == pytest.approx(accepted, rel=0.1)
    assert len(PROMPTS) == 4
