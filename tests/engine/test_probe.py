import logging

import pytest
import torch

from tlt_lightning.engine.probe import TOLERANCES, check_same_logps, warn_of_mismatch

ROWS = [[-1.0, -2.0], [-3.0]]
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def padded(shift: float) -> torch.Tensor:
    return torch.tensor([[-1.0, -2.0], [-3.0, -99.0]]) + shift


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int8"])
def test_log_probs_within_the_tolerance_of_their_type_pass(dtype: str) -> None:
    shift = 0.9 * TOLERANCES[dtype]
    assert check_same_logps(ROWS, padded(shift), MASK, dtype=dtype, when="") == pytest.approx(shift, rel=1e-2)


@pytest.mark.parametrize(
    ("dtype", "shift"), [("float32", 0.02), ("bfloat16", 0.2), ("fp8", 0.5), ("float32", float("nan"))]
)
def test_others_end_the_run_with_both_numbers_and_the_way_out(dtype: str, shift: float) -> None:
    with pytest.raises(RuntimeError, match=rf"After it .*3 tokens differ by .* in {dtype}.*TransformersEngine"):
        check_same_logps(ROWS, padded(shift), MASK, dtype=dtype, when="After it")


def test_in_8_bit_the_message_says_how_to_tell_too_few_bits_from_a_fault() -> None:
    for dtype, is_told in {"bfloat16": False, "fp8": True}.items():
        with pytest.raises(RuntimeError) as caught:
            check_same_logps(ROWS, padded(9.0), MASK, dtype=dtype, when="")
        for remedy in ("`python -m benchmarks mismatch`", "`quantization.layers_in_16_bit`", "`quantization: null`"):
            assert (remedy in str(caught.value)) == is_told


def test_a_large_kl_is_a_warning_in_every_iteration(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_mismatch(0.005, 1)
        warn_of_mismatch(0.05, 1, "fp8")
        assert not caplog.records
        warn_of_mismatch(0.3, 2)
        warn_of_mismatch(0.3, 3)
    assert [record.getMessage()[:12] for record in caplog.records] == ["Iteration 2:", "Iteration 3:"]
    assert "TransformersEngine" in caplog.text
