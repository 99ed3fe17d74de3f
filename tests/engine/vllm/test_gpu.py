"""Speculation with CUDA graphs: planned, replayed, kept over sleep. The other tests run without graphs on a GPU.

In bfloat16, as vLLM's attention for GPUs wants it. Rounding then depends on how many tokens a pass reads, so texts are
not compared token by token: every token must be the likeliest there within what bfloat16 can tell apart.
`VLLM_USE_V2_MODEL_RUNNER=0` runs what applies to vLLM's V1 model runner.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from benchmarks.common.full_graph_pool import FullGraphPool
from tests.support.speculation_engines import (
    ScriptedSelector,
    engine_of,
    greedy_gap,
    save_endless_policy,
    save_trained_head,
    siblings,
    write,
)
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.speculation import BucketedGraphPool
from tlt_lightning.speculation.graph_plan import GraphPlan
from tlt_lightning.speculation.strategy import OFF, Strategy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
]

Paths = tuple[str, str]
TOLERANCE = 0.3
"""Logits; a token that rejection sampling let through by mistake is off by 2 to 4."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    path = tmp_path_factory.mktemp("gpu")
    policy = save_endless_policy(path / "policy")
    return policy, save_trained_head(policy, path / "head")


@pytest.fixture(scope="module", params=[BucketedGraphPool, FullGraphPool])
def engine(request: pytest.FixtureRequest, paths: Paths) -> Iterator[VLLMEngine]:
    if request.param is FullGraphPool and not internals.runs_v2():
        pytest.skip("the V1 runner captures graphs of its own, whatever the pool")
    speculation = Speculation(
        selector=ScriptedSelector(("learned", "sibling", "mixed")),
        head=paths[1],
        siblings=True,
        max_draft_tokens=5,
        steps_per_choice=1,
        graph_pool=request.param(),
    )
    with engine_of(paths[0], speculation, enforce_eager=False, dtype="bfloat16") as made:
        yield made


def script(engine: VLLMEngine, rule: Any) -> None:
    assert engine.speculation is not None
    selector: Any = engine.speculation.selector
    rule(selector)


def assert_greedy(paths: Paths, texts: list[list[int]]) -> None:
    requests = siblings()
    assert [len(text) for text in texts] == [request.max_tokens for request in requests]
    assert greedy_gap(paths[0], [list(request.prompt_ids) for request in requests], texts) < TOLERANCE


def test_rounding_alone_stays_within_the_tolerance(paths: Paths) -> None:
    with engine_of(paths[0], None, enforce_eager=False, dtype="bfloat16") as plain:
        assert_greedy(paths, write(plain, siblings()))


def test_text_stays_greedy_while_strategies_change(engine: VLLMEngine, paths: Paths) -> None:
    script(engine, lambda selector: selector.at_random(0))
    assert_greedy(paths, write(engine, siblings()))
    script(engine, lambda selector: selector.off_and_on(Strategy(4), steps=7))
    assert_greedy(paths, write(engine, siblings()))


@pytest.mark.parametrize("drafter", ["learned", "sibling", "mixed"])
def test_drafters_are_accepted(engine: VLLMEngine, paths: Paths, drafter: Any) -> None:
    script(engine, lambda selector: setattr(selector, "script", lambda state: Strategy(5, drafter)))
    assert_greedy(paths, write(engine, siblings()))
    assert engine.stats()["speculation/acceptance_length"] > 1.3


def test_switched_on_the_head_is_accepted_as_if_it_had_never_been_off(engine: VLLMEngine) -> None:
    accepted = []
    for rule in (
        lambda selector: setattr(selector, "script", lambda state: Strategy(4)),
        lambda selector: selector.off_and_on(Strategy(4), steps=9),
    ):
        script(engine, rule)
        write(engine, siblings())
        accepted.append(engine.stats()["speculation/acceptance_length"])
    assert engine.stats()["speculation/catch_ups"] > 0
    assert accepted[1] > 0.85 * accepted[0]


def test_keeping_up_with_a_skipped_head_never_waits_for_the_device(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.inspect().speculative_runner

    def guarded(method: Any) -> Any:
        def called(*args: Any, **inputs: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                method(*args, **inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return called

    monkeypatch.setattr(runner, "_skip", guarded(runner._skip))
    script(engine, lambda selector: setattr(selector, "script", lambda state: OFF))
    write(engine, siblings())
    assert engine.stats()["speculation/catch_ups"] > 1


def test_decode_steps_replay_graphs_and_captures_are_reported(engine: VLLMEngine) -> None:
    graphs = engine.inspect().graphs
    if graphs is None:
        pytest.skip("graphs are planned for the V2 runner")
    for strategy in (OFF, Strategy(3), Strategy(5)):
        script(engine, lambda selector, strategy=strategy: setattr(selector, "script", lambda state: strategy))
        write(engine, siblings())
        assert engine.stats()["speculation/graph_hits"] > 0.8
    assert set(graphs.seconds) == {"target", "drafter_prefill", "drafter_decode", "piecewise"}
    assert sum(graphs.mib.values()) > 0
    assert "drafter decode" in graphs.plan.table(graphs.mib, graphs.seconds)


class WithoutSmallFirstPasses(BucketedGraphPool):
    """Of the drafter's first pass only the graphs of full batches, as a budget might leave them."""

    @override
    def plan(self, arms: Any, capture_sizes: Sequence[int]) -> GraphPlan:
        plan = super().plan(arms, capture_sizes)
        kept = (graph for graph in plan.graphs if graph.kind != "drafter_prefill" or graph.num_requests == max(arms))
        return replace(plan, graphs=tuple(kept))


def test_a_first_pass_without_a_graph_of_its_size_drafts_as_well(paths: Paths) -> None:
    if not internals.runs_v2():
        pytest.skip("the V1 runner captures graphs of its own, whatever the pool")
    accepted = []
    for pool in (BucketedGraphPool(), WithoutSmallFirstPasses()):
        selector: Any = ScriptedSelector()
        selector.script = lambda state: Strategy(4)
        speculation = Speculation(selector=selector, head=paths[1], max_draft_tokens=5, graph_pool=pool)
        with engine_of(paths[0], speculation, enforce_eager=False, dtype="bfloat16") as engine:
            assert_greedy(paths, write(engine, siblings()))
            accepted.append(engine.stats()["speculation/acceptance_length"])
            hits = engine.inspect().graphs.hits
    assert hits["drafter_prefill_piecewise"] > 0
    assert hits["target_piecewise"] < hits["drafter_prefill_piecewise"]
    assert accepted[1] == pytest.approx(accepted[0], rel=0.05)


def test_sleep_keeps_the_head_and_a_sleeper_is_closed_on_a_full_device(paths: Paths) -> None:
    command = [sys.executable, "-m", "tests.support.sleeping_engine", *paths]
    finished = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert "CUDA Error" not in finished.stderr, finished.stderr[-4000:]
    line = next(line for line in finished.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    for texts in found["texts"]:
        assert_greedy(paths, texts)
    before, after = found["accepted"]
    assert before > 1.3
    assert after == pytest.approx(before, rel=0.1)
    assert found["given_back"] >= 0
    assert found["again"] == 1
