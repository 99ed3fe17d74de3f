"""`python -m benchmarks ray_throughput`: its engine, and what it concludes from the CPU's seconds."""

from benchmarks.micro.ray_throughput import ReadyEngine, cells
from tlt_lightning import Request, Sampling


def test_every_request_is_answered_with_tokens_of_its_own() -> None:
    engine, responses = ReadyEngine(), []
    for response in engine.generate([Request(number, [5]) for number in range(3)], Sampling(max_tokens=4), seed=0):
        if not responses:
            engine.add([Request(9, [5])])
        responses.append(response)
    assert [(each.request_id, len(each.token_ids), len(each.logps)) for each in responses] == [
        (number, 4, 4) for number in (0, 1, 2, 9)
    ]
    assert responses[0].token_ids is not responses[1].token_ids  # else they would be sent once


def test_the_main_thread_is_the_limit() -> None:
    row = {"engines": 4, "tokens": 64, "one_by_one": True, "per_second": 900.4, "cpu_ms": 0.4, "thread_ms": 0.25}
    assert cells(row) == [4, 64, "one by one", "900", "0.40", "0.25", "4,000"]
