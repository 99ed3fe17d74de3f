import pytest
import torch

from tlt_lightning.metrics.peak_memory import PeakMemory


@pytest.mark.gpu
def test_the_peak_of_a_stage_is_what_the_device_held_in_it() -> None:
    gib = 2**30
    torch.cuda.init()
    peak = PeakMemory()
    kept = torch.empty(gib, dtype=torch.uint8, device="cuda")
    peak.take()
    before = torch.cuda.memory_allocated()
    del kept
    first = torch.empty(gib // 2, dtype=torch.uint8, device="cuda")
    with peak.followed(lambda: 0.0):  # what was held before counts
        del first
        torch.cuda.empty_cache()
    assert peak.take() == pytest.approx(before, abs=2**24)
    assert peak.take() == pytest.approx(torch.cuda.memory_allocated(), abs=2**24)


def test_what_a_sleeping_engine_has_unmapped_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [0.0]  # by PyTorch, since its last reset

    def reset() -> None:
        del counted[:-1]

    monkeypatch.setattr(PeakMemory, "_is_measured", True)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: max(counted))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    peak = PeakMemory()
    counted += [9.0, 7.0]  # 5 of the engine, 2 of the trainer; before it falls asleep, 2 more
    with peak.followed(lambda: 5.0):
        pass
    assert peak.take() == 9.0
    assert peak.take() == 2.0
    counted += [8.0, 7.0]
    with peak.followed(lambda: 0.0):
        pass
    assert peak.take() == 7.0  # it is awake
    assert peak.take() == 7.0
