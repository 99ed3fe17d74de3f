"""Several processes that are one engine."""

import logging
import os

import pytest
import torch
from typing_extensions import override

from benchmarks.common.cheap_engine import CheapEngine
from tlt_lightning import RayEngine, Request, Sampling, VLLMEngine
from tlt_lightning.policy import PolicyWeights, load_policy

pytestmark = pytest.mark.ray

ASKED = [Request(number, [12 + number % 5, 13, 3, 15, 4], group=number // 2) for number in range(12)]
GREEDY = Sampling(max_tokens=40, temperature=0)


def vllm(tensor_parallel: int) -> VLLMEngine:
    settings = {"dtype": "float32", "kv_cache_gib": 0.0625, "max_num_seqs": 16, "enforce_eager": True, "sleep": False}
    return VLLMEngine(**settings, tensor_parallel=tensor_parallel)  # type: ignore[arg-type]


ON_TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.vllm), pytest.param("cuda", marks=ON_TWO_GPUS)]
)
def test_a_tensor_parallel_host_writes_what_an_engine_alone_writes(
    cluster: None, policy_path: str, device: str
) -> None:
    texts: list[list[dict[int, list[int]]]] = []
    for engine in (RayEngine(vllm(2)), vllm(1)):
        model = load_policy(policy_path).to(device)
        engine.setup(policy_path, max_model_len=64, seed=0)
        texts.append([])
        for version in range(2):
            engine.update_weights(PolicyWeights(model), version)
            stream = engine.generate(ASKED, GREEDY, seed=0)
            responses = [next(stream)]
            engine.add([Request(50, [12, 13, 3, 15, 4], group=50)])
            responses += stream
            texts[-1].append({each.request_id: [*each.token_ids] for each in responses})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1.05
        engine.close()
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


class MortalTeam(CheapEngine):
    """One engine of two processes, the second of which ends when it is first warmed up."""

    num_ranks = 2

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    @override
    def warm_up(self, num_requests: int = 1) -> None:
        if torch.distributed.get_rank() == 1 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(1)


def test_an_engine_that_loses_a_process_is_replaced(
    cluster: None, tmp_path: os.PathLike[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = RayEngine(MortalTeam(os.path.join(tmp_path, "mark")))
    engine.setup("", max_model_len=32, seed=0)
    engine.update_weights([("w", torch.ones(3))], 0)
    engine.warm_up()
    with caplog.at_level(logging.WARNING):
        (response,) = engine.generate([Request(0, [5])], Sampling(max_tokens=2), seed=0)
    assert [*response.token_ids] == [8, 9]
    assert "Engine 0 died, and a new one takes its place" in caplog.text
    engine.close()
