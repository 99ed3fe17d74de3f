from typing import Any

import pytest
import torch

from tlt_lightning.engine.vllm.patches.cublas_workspaces import owned_workspaces


def test_workspaces_are_dropped_right_before_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("dropped"), raising=False)
    monkeypatch.setattr(torch.cuda.graph, "__enter__", lambda graph: done.append("captures"))
    enter = torch.cuda.graph.__enter__

    def capture_two_and_fail(graph: Any) -> None:
        with owned_workspaces():
            torch.cuda.graph.__enter__(graph)
            torch.cuda.graph.__enter__(graph)
            raise KeyError

    with pytest.raises(KeyError):
        capture_two_and_fail(object.__new__(torch.cuda.graph))
    assert done == ["dropped", "captures"] * 2
    assert torch.cuda.graph.__enter__ is enter


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_keeps_its_workspace_when_the_others_are_freed() -> None:
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    a, b = torch.randn(16, 8192, device="cuda"), torch.randn(8192, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with owned_workspaces():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wanted = a @ b  # the rehearsal, which makes a workspace of the stream
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            got = a @ b

    torch._C._cuda_clearCublasWorkspaces()  # as Lightning does
    torch.cuda.empty_cache()
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(pool)]
    assert sum(each["total_size"] for each in segments) >= 4 * 2**20  # the product alone takes 2 MiB
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=0.5)
