"""The environment variables that an engine sets for vLLM."""

import os
from pathlib import Path

import pytest

from tlt_lightning.engine.vllm import internals


@pytest.mark.parametrize("given", [None, "/elsewhere"])
def test_kernels_are_kept_for_engines_with_other_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    environment = {"VLLM_CACHE_ROOT": str(tmp_path)} | ({} if given is None else {"TRITON_CACHE_DIR": given})
    monkeypatch.setattr(os, "environ", environment)
    internals.set_environment()
    assert environment["TRITON_CACHE_DIR"] == (given or str(tmp_path / "triton"))
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
