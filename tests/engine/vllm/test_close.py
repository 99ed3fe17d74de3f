"""An engine that is closed leaves nothing of its models behind."""

import gc
from contextlib import nullcontext
from pathlib import Path
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file

from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import MAX_MODEL_LEN, ScriptedSelector, engine_of, save_endless_policy
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation


@pytest.mark.vllm
def test_no_run_outlives_its_engine_by_an_import_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        """Holds a policy."""

    def begin(run: Run) -> ref[Run]:
        try:
            raise ImportError("no torchcodec")
        except ImportError as error:  # as `vllm.multimodal.media.audio` keeps it
            monkeypatch.setattr("vllm.version.kept", error, raising=False)
        return ref(run)

    run = begin(Run())
    assert run() is not None
    with engine_of(save_endless_policy(tmp_path / "policy"), None):
        pass
    gc.collect()
    assert run() is None


@pytest.mark.vllm
def test_no_layer_outlives_the_engine_whose_weights_were_replaced(tmp_path: Path) -> None:
    policy = save_endless_policy(tmp_path / "policy")
    head = save_head(make_head(policy), tmp_path / "head")
    with engine_of(policy, Speculation(selector=ScriptedSelector(), head=head, max_draft_tokens=5)) as engine:
        engine.update_drafter(load_file(f"{head}/model.safetensors").items(), 0)
        parts = engine.inspect()
        models = [parts.model_runner.get_model(), parts.speculative_runner.head]
        layers = {
            f"{type(model).__name__}.{name}": ref(layer) for model in models for name, layer in model.named_modules()
        }
        del parts, models
    gc.collect()
    assert engine.drafter_version == -1
    assert layers
    assert [name for name, layer in layers.items() if layer() is not None] == []


def living_layers(kind: str) -> int:
    gc.collect()
    return sum(type(each).__name__ == kind for each in gc.get_objects() if isinstance(each, torch.nn.Module))


@pytest.mark.vllm
@pytest.mark.parametrize("kv_cache_gib", [0.0625, 1e-5], ids=["closed", "failed to start"])
def test_no_layer_outlives_an_engine_whose_model_was_compiled(
    kv_cache_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # Dynamo's graphs, without Inductor's kernels, which take a minute
    policy = save_endless_policy(tmp_path / "policy")
    engine = VLLMEngine(dtype="float32", kv_cache_gib=kv_cache_gib, enforce_eager=False)
    with nullcontext() if kv_cache_gib > 1e-5 else pytest.raises(ValueError, match="cache"):
        engine.setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
        engine.close()
    assert [living_layers(kind) for kind in ("QKVParallelLinear", "RotaryEmbedding")] == [0, 0]
    assert not torch.distributed.is_initialized()
