"""Steps are measured before the first rollout, for who wants it, and the rollouts cannot tell."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import ScriptedSelector, engine_of, save_endless_policy, siblings, write
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Sampling
from tlt_lightning.speculation import CostModelSelector, FixedSelector, calibration
from tlt_lightning.speculation.strategy import OFF, MeasuredStep, Strategy


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
    log: str
    num_passes: int  # of the head over what is written, during calibration


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
    )
    handler = Lines()
    calibration.log.addHandler(handler)
    calibration.log.setLevel(logging.INFO)
    with engine_of(policy, speculation) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "MAX_SECONDS", 1000.0)  # on a busy machine, too
        num_passes = 0
        runner: Any = engine.inspect().speculative_runner
        propose = runner._propose

        def count(*args: Any, **inputs: Any) -> torch.Tensor:
            nonlocal num_passes
            reads_prompts = args[0].has_prefill if args else inputs["common_attn_metadata"].max_query_len > 8
            num_passes += not reads_prompts
            return propose(*args, **inputs)

        with pytest.MonkeyPatch.context() as counted:
            counted.setattr(runner, "_propose", count)
            engine.warm_up()
        calibration.log.removeHandler(handler)
        yield Setup(engine, selector, policy, "\n".join(handler.lines), num_passes)


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
    assert all(step.seconds > 0 and step.mean_context > 8 for step in measured.values())
    assert setup.num_passes > 20  # of the head, for it alone is dear
    assert setup.log.count("\n") == 0
    assert "of 8 requests " in setup.log
    assert "ms with 4 drafted (sibling)" in setup.log


@pytest.mark.vllm
def test_rollouts_cannot_tell(setup: Setup) -> None:
    engine, controller = setup.engine, setup.engine.inspect().controller
    assert controller is not None
    state = controller.state_dict()
    assert controller.counters.decode_steps == 0
    assert (state["alarms"], state["lookup_scores"]) == (0, {"scores": []})
    assert setup.selector.records == []
    setup.selector.script = lambda state: OFF
    weights = list(PolicyWeights(load_policy(setup.policy)))
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
    assert engine.stats()["speculation/off_share"] == 1


@pytest.mark.vllm
def test_only_who_knows_nothing_is_told(setup: Setup) -> None:
    controller = setup.engine.inspect().controller
    assert controller is not None
    new, resumed = (CostModelSelector(num_draft_tokens=(2,), drafters=("sibling",)) for _ in range(2))
    untold = new.step_time.seconds(1, OFF, 20.0)
    resumed.calibrate([MeasuredStep(1, OFF, 20.0, 0.125)])
    resumed.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    original, was_measured = controller.selector, {}
    try:
        for name, selector in {"fixed": FixedSelector(2), "resumed": resumed, "new": new}.items():
            controller.selector, knew = selector, selector.wants_calibration
            setup.engine.warm_up()
            was_measured[name] = knew and not selector.wants_calibration
    finally:
        controller.selector = original
    assert was_measured == {"fixed": False, "resumed": False, "new": True}
    assert resumed.step_time.seconds(1, OFF, 20.0) == pytest.approx(0.125, rel=0.01)
    assert new.step_time.seconds(1, OFF, 20.0) != untold
    assert not new.wants_calibration
