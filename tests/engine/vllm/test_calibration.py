"""Steps are measured before the first rollout, for who wants it, and the rollouts cannot tell."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.eagle_head import make_head, save_head
from tests.support.speculation_engines import ScriptedSelector, engine_of, save_endless_policy, siblings, write
from tlt_lightning.engine import Request, RolloutProgress, Sampling, VLLMEngine
from tlt_lightning.engine.base import OnProgress
from tlt_lightning.engine.vllm import calibration
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import load_policy, stream_weights
from tlt_lightning.speculation import CostModelSelector, FixedSelector
from tlt_lightning.speculation.strategy import OFF, MeasuredStep, SelectorState, Strategy


class CuriousSelector(ScriptedSelector):
    """Remembers what it was told before the first rollout."""

    def __init__(self) -> None:
        super().__init__(("learned", "sibling"))
        self.all_arms = (OFF, Strategy(2), Strategy(4, "sibling"))
        self.measured: list[MeasuredStep] = []

    @property
    def wants_calibration(self) -> bool:
        return not self.measured

    def calibrate(self, steps: Sequence[MeasuredStep]) -> None:
        self.measured = list(steps)


class Setup(NamedTuple):
    engine: VLLMEngine
    selector: CuriousSelector
    policy: str
    trace: Path
    log: str


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    path = tmp_path_factory.mktemp("calibration")
    policy = save_endless_policy(path / "policy")
    selector = CuriousSelector()
    speculation = Speculation(
        selector=selector,
        head=save_head(make_head(policy, seed=5), path / "head"),
        siblings=True,
        max_draft_tokens=5,
        steps_per_choice=1,
        trace=str(path / "steps.jsonl"),
    )
    handler = Lines()
    calibration.log.addHandler(handler)
    calibration.log.setLevel(logging.INFO)
    with engine_of(policy, speculation) as engine:
        engine.warm_up()
        calibration.log.removeHandler(handler)
        yield Setup(engine, selector, policy, path / "steps.jsonl", "\n".join(handler.lines))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.vllm
def test_every_arm_was_measured_at_every_batch_size_and_said_so(setup: Setup) -> None:
    measured = {(step.batch_size, step.strategy): step for step in setup.selector.measured}
    assert set(measured) == {(size, arm) for size in (1, 4, 8) for arm in setup.selector.all_arms}
    assert all(0 < step.seconds < 1 and step.mean_context > 8 for step in measured.values())
    for size in (1, 4, 8):
        assert measured[size, Strategy(2)].seconds > measured[size, OFF].seconds  # the head's passes
    assert setup.log.count("\n") == 0
    assert "batch 8, ms: off " in setup.log
    assert "sibling_4 " in setup.log


@pytest.mark.vllm
def test_rollouts_cannot_tell(setup: Setup) -> None:
    engine, session = setup.engine, setup.engine._session
    assert session is not None
    assert not setup.trace.exists()
    assert session.control.counters.decode_steps == 0
    assert not session.control.alarm._steps
    assert not session.texts.scores.scores
    assert not session.texts._texts
    assert setup.selector.records == []
    setup.selector.script = lambda state: OFF
    weights = list(stream_weights(load_policy(setup.policy)))
    texts = []
    for measured in (setup.selector.measured, []):
        setup.selector.measured = measured
        before = torch.get_rng_state()
        engine.update_weights(weights, 1)
        engine.warm_up()
        assert torch.equal(torch.get_rng_state(), before)
        assert setup.selector.measured
        pool: Any = engine.inspect().scheduler.kv_cache_manager.block_pool
        assert len(pool.cached_block_hash_to_block) == 0
        texts.append(write(engine, siblings(), Sampling(max_tokens=64), seed=3))
    assert texts[0] == texts[1]
    session.trace.flush()
    rows = [json.loads(line) for line in setup.trace.read_text().splitlines()]
    assert {row["rollout"] for row in rows} == {0, 1}
    assert {row["drafts"] for row in rows} == {"off"}


@pytest.mark.vllm
def test_only_who_knows_nothing_is_told(setup: Setup) -> None:
    session = setup.engine._session
    assert session is not None
    new, resumed = (CostModelSelector(num_draft_tokens=(2,), drafters=("sibling",)) for _ in range(2))
    resumed.calibrate([MeasuredStep(1, OFF, 20.0, 0.125)])
    resumed.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    original, was_measured = session.control.selector, {}
    try:
        for name, selector in {"fixed": FixedSelector(2), "resumed": resumed, "new": new}.items():
            session.control.selector, knew = selector, selector.wants_calibration
            setup.engine.warm_up()
            was_measured[name] = knew and not selector.wants_calibration
    finally:
        session.control.selector = original
    assert was_measured == {"fixed": False, "resumed": False, "new": True}
    assert resumed.step_time.seconds(1, OFF, 20.0) == pytest.approx(0.125, rel=0.01)
    assert new.step_time.seconds(1, OFF, 20.0) < 0.1
    assert not new.wants_calibration


def decode_with(dial: calibration.Dial, seconds: Callable[[int, Strategy], float], settle: int = 1) -> Any:
    """A loop like the engine's, in which a strategy's first `settle` steps teach nothing."""

    def decode(requests: Sequence[Request], on_progress: OnProgress) -> Iterator[Any]:
        size, last, steps = len(requests), None, 0
        for _ in range(1000):
            strategy = dial.select(SelectorState(size))
            steps, last = steps + 1 if strategy == last else 1, strategy
            if steps > settle:
                dial.record(SelectorState(size, 20.0), strategy, (1,) * size, seconds(size, strategy))
            on_progress(RolloutProgress(0, size, 0, size, 1, 0.0))
            yield from ()

    return decode


def test_the_fastest_settled_step_counts() -> None:
    dial = calibration.Dial(lambda: 0)
    times = iter(range(10**6))
    decode = decode_with(dial, lambda size, strategy: 1.0 + next(times) % 3 + strategy.num_draft_tokens)
    steps = calibration.measure_steps(dial, decode, FixedSelector(3), 8)
    assert [(step.batch_size, step.strategy, step.seconds) for step in steps] == [
        (size, strategy, 1.0 + strategy.num_draft_tokens) for size in (1, 4, 8) for strategy in (OFF, Strategy(3))
    ]


def test_strategies_that_miss_a_graph_are_left_out() -> None:
    misses = {"count": 0}
    dial = calibration.Dial(lambda: misses["count"])

    def seconds(size: int, strategy: Strategy) -> float:
        misses["count"] += not strategy.is_off and size > 4
        return 0.001

    steps = calibration.measure_steps(dial, decode_with(dial, seconds), FixedSelector(3), 16)
    assert {(step.batch_size, step.strategy.num_draft_tokens) for step in steps} == {
        (1, 0), (1, 3), (4, 0), (4, 3), (16, 0)
    }  # fmt: skip


def test_what_never_settles_and_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    dial = calibration.Dial(lambda: 0)
    assert calibration.measure_steps(dial, decode_with(dial, lambda *_: 1.0, settle=50), FixedSelector(3), 4) == []
    monkeypatch.setattr(calibration, "MAX_SECONDS", 0.1)
    dial = calibration.Dial(lambda: 0)
    decode = decode_with(dial, lambda *_: time.sleep(0.002) or 1.0)
    steps = calibration.measure_steps(dial, decode, CostModelSelector(), 256)
    assert {1} <= {step.batch_size for step in steps} <= {1, 4}


def test_batches_grow_up_to_the_largest() -> None:
    assert [calibration.batch_sizes(number) for number in (1, 4, 6, 256)] == [
        [1], [1, 4], [1, 4, 6], [1, 4, 16, 64, 256]
    ]  # fmt: skip


def test_a_filler_is_found_for_every_look_up_and_replaces_no_head() -> None:
    texts = calibration.FillerTexts(siblings=True, ngram=True, keeps=False)
    texts.add("a", [1, 2, 3])
    found = texts.propose("a", [2, 3], Strategy(3, "sibling"), 3)
    assert found is not None
    assert len(found.tokens) == 3
    assert texts.propose("a", [2, 3], Strategy(3, "mixed"), 3) is None
