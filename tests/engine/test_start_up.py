"""A start is timed by part, and what takes long is named while it lasts."""

import threading
import time

import pytest

from tests.support.speculation_engines import engine_of
from tlt_lightning.engine.start_up import StartUp
from tlt_lightning.engine.vllm import internals


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "not ready yet" in record.getMessage()]


def test_whoever_waits_is_told_for_what_until_it_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("tlt_lightning.engine.start_up.PATIENCE", 0.05)
    start_up = StartUp()
    with start_up.part("knitting"):
        while len(told(caplog)) < 2:
            time.sleep(0.01)
    assert "knitting has taken 0 s" in told(caplog)[0]
    assert start_up.seconds["knitting"] >= 0.1
    before = {*threading.enumerate()}
    with pytest.raises(ValueError, match="a stitch"), start_up.part("knitting"):
        raise ValueError("lost a stitch")
    for thread in {*threading.enumerate()} - before:
        thread.join(100)
        assert not thread.is_alive()  # whatever became of it


def test_parts_of_one_name_add_up() -> None:
    start_up = StartUp()
    for _ in range(2):
        with start_up.part("a"):
            time.sleep(0.05)
    with start_up.part("that has nothing to do"):
        pass
    assert start_up.seconds["a"] >= 0.1
    assert str(start_up) == f"a {start_up.seconds['a']:.1f}"


@pytest.mark.vllm
def test_an_engine_says_what_its_start_took(policy_path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with engine_of(policy_path, None) as engine:
        start_up = internals.live_executor(engine.inspect().engine).start_up
    parts = start_up.seconds
    assert list(parts) == ["reading weights", "compiling and measuring memory", "warming up, with CUDA graphs"]
    assert all(seconds > 0 for seconds in parts.values())
    (line,) = (record.getMessage() for record in caplog.records if "is ready after" in record.getMessage())
    assert line.endswith(f"({start_up})")
