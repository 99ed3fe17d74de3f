"""A run that names no engine has the one that suits the machine."""

import pytest
import torch

from tlt_lightning import TransformersEngine, VLLMEngine
from tlt_lightning.engine import usual


@pytest.mark.parametrize(("has_gpu", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_vllm_computes_in_the_type_of_the_trainer(has_gpu: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    engine = usual.usual_engine()
    assert isinstance(engine, VLLMEngine)
    assert (engine.dtype, engine.enforce_eager, engine.kv_cache_gib) == (dtype, not has_gpu, None if has_gpu else 1.0)


def test_without_vllm_the_policy_writes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual.importlib.util, "find_spec", lambda name: None)
    assert isinstance(usual.usual_engine(), TransformersEngine)
