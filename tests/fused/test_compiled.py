"""Functions that are compiled on a GPU: once for any number of rows, and never to a run's end."""

import os
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import save_policy
from tests.test_policy import make_batch
from tlt_lightning.adapters import LoRA
from tlt_lightning.fused import compiled as compiling
from tlt_lightning.fused.compiled import compiled_on_gpu
from tlt_lightning.policy import load_policy, response_logps


def double(x: Tensor) -> Tensor:
    return 2 * x


def squared(x: Tensor) -> Tensor:
    return x @ x  # a kernel of PyTorch's own, so that no compiler of C++ takes its time


def test_on_a_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert compiled_on_gpu(double)(torch.ones(3)).tolist() == [2, 2, 2]


def test_what_cannot_be_compiled_runs_as_it_is_written_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Tensor) -> Tensor:
        raise TorchDynamoException("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with FakeTensorMode():
        rows, call = torch.ones(3, 2, device="cuda"), compiled_on_gpu(double)
        assert [call(rows).shape for _ in range(3)] == [(3, 2)] * 3
    assert caplog.text.count("`double` could not be compiled and takes longer: no compiler here") == 1


def test_faults_of_the_function_are_no_matter_of_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: faulty)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="out of memory"):
        compiled_on_gpu(double)(torch.ones(3, device="cuda"))


def test_rows_alone_are_marked_to_vary_and_no_gradient_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *given: given)
    with FakeTensorMode():
        rows = torch.ones(3, 2, device="cuda", requires_grad=True)
        weight = torch.nn.Parameter(torch.ones(3, device="cuda"))  # as wide as there are rows, by chance
        *given, number = compiled_on_gpu(double)(rows, weight, torch.ones(2, device="cuda"), 0.5)  # type: ignore[call-arg]
    assert [getattr(each, "_dynamo_weak_dynamic_indices", set()) for each in given] == [{0}, set(), set()]
    assert not any(each.requires_grad for each in given)
    assert number == 0.5


@pytest.mark.slow
def test_what_is_compiled_is_kept_for_runs_with_other_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, engine = tmp_path / "ours", tmp_path / "an engine's"
    monkeypatch.setattr(compiling, "_OWN_CACHE", str(ours))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(engine))  # as vLLM does while it loads
    torch._dynamo.reset()
    assert torch.equal(torch.compile(squared, backend=compiling._compile)(torch.eye(3)), torch.eye(3))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(engine)
    assert [path for path in ours.rglob("*") if path.is_file()]
    assert not [path for path in engine.rglob("*") if path.is_file()]


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, LoRA(rank=8, base_dtype="bfloat16")], ids=["full", "lora"])
def test_a_gpu_learns_what_a_cpu_does_and_compiles_once(lora: LoRA | None, tmp_path) -> None:
    path = str(
        save_policy(
            tmp_path, hidden_size=256, intermediate_size=512, initializer_range=0.05, max_position_embeddings=512
        )
    )

    def gradients(device: str, length: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = load_policy(path, lora=lora).to(device)
        batch = move_data_to_device(make_batch([3, 2], [length, 6], vocab_size=20), torch.device(device))
        with torch.autocast(device, torch.bfloat16):
            logps = response_logps(model, batch)[0]
        (logps * batch.response_mask).sum().backward()
        return {"logps": logps.detach().cpu()} | {
            name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    graphs = []
    for length in (64, 101, 333):
        ours, expected = gradients("cuda", length), gradients("cpu", length)
        graphs.append(counters["stats"]["unique_graphs"])
        assert ours.keys() == expected.keys()
        for name, gradient in ours.items():
            assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm() + 1e-6, name
    assert graphs[0] == graphs[2]
