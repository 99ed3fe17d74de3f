"""Run by test_tensor_parallel.py, once per rank: one engine over two processes, whose clocks disagree."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from typing_extensions import override

from tests.support.drafters.held_weights import different_weights
from tests.support.speculation_engines import GREEDY, MAX_MODEL_LEN, ScriptedSelector, siblings, write
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm import request_writer
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.ranks.joined_ranks import JoinedRanks
from tlt_lightning.rollout import Request, Sampling
from tlt_lightning.speculation import calibration
from tlt_lightning.speculation.strategy import MeasuredStep, Strategy


class ClockSelector(ScriptedSelector):
    """Chooses by the clock, and by a look at which rank it is."""

    def __init__(self, rank: int) -> None:
        super().__init__(("learned", "sibling", "mixed"), longest=3)
        self.num_chosen, self.measured = 0, list[MeasuredStep]()
        self.script = lambda state: self.choose(rank)

    def choose(self, rank: int) -> Strategy:
        self.num_chosen += 1
        return self.all_arms[(time.perf_counter_ns() + rank) % len(self.all_arms)]

    @property
    @override
    def wants_calibration(self) -> bool:
        return not self.measured

    @override
    def calibrate(self, steps: Sequence[MeasuredStep]) -> None:
        self.measured = list(steps)


def asked(num: int = 3) -> list[Request]:
    """`siblings`, half as long."""
    return [replace(each, max_tokens=(each.max_tokens or 0) // 2) for each in siblings(num)]


def stop_one(engine: VLLMEngine, rank: int) -> list[list[Any]]:
    """After its first response, which is its last request's, rank 1 stops its first request and adds another one."""
    answers: list[list[Any]] = []
    requests = asked(1)
    requests[-1] = replace(requests[-1], max_tokens=8)
    for response in engine.generate(requests, GREEDY, seed=0):
        if rank == 1 and not answers:
            engine.stop([requests[0].id])
            engine.add([replace(requests[0], id=9)])
        answers.append([response.request_id, response.finish_reason, list(response.token_ids)])
    return sorted(answers)


def write_between_sleeps(policy: str, head: str) -> dict[str, Any]:
    """Greedy texts of two ranks before and after sleeps, under drafts chosen by the clock; with graphs on a GPU."""
    say = partial(print, f"rank {torch.distributed.get_rank()} at", file=sys.stderr, flush=True)
    is_gpu = torch.cuda.is_available()
    speculation = Speculation(selector=ClockSelector(0), head=head, siblings=True, steps_per_choice=1)
    engine = VLLMEngine(
        dtype="bfloat16" if is_gpu else "float32",
        kv_cache_gib=0.0625,
        max_num_seqs=16,
        enforce_eager=not is_gpu,
        speculation=speculation,
        tensor_parallel=2,
    )
    say("the start of its engine")
    engine.setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
    texts = []
    for version in range(3):
        say(f"waking {version}")
        engine.wake()
        engine.update_weights(PolicyWeights(load_policy(policy)), version)
        say(f"calibration {version}")
        engine.warm_up()
        say(f"rollout {version}")
        texts.append(write(engine, siblings()))
        stats = engine.stats()
        engine.sleep()
    engine.close()
    return {"texts": texts, "stats": stats}


def part(policy: str, rank: int) -> dict[str, Any]:
    """Let rank 1 sample with other noise, and then decide after it has noted something else."""
    found: dict[str, Any] = {}
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625, max_num_seqs=16, enforce_eager=True, tensor_parallel=2)
    engine.setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
    engine.update_weights(PolicyWeights(load_policy(policy)), 0)
    if rank == 1:
        request_writer.noise_seed = lambda request: 7
    try:
        write(engine, siblings(), Sampling(max_tokens=64, top_k=4))  # none of which ends a text
    except RuntimeError as error:
        found["written apart"] = str(error)
    engine.close()
    group = JoinedRanks(torch.distributed.group.WORLD)
    group.note([rank])
    try:
        group.decide(lambda: rank)
    except RuntimeError as error:
        found["decided apart"] = str(error)
    return found


def main(policy: str, other_policy: str, head: str, better_head: str, out: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["VLLM_RPC_BASE_PATH"] = out
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    selector = ClockSelector(rank)
    calibration.STEPS, calibration.MAX_SECONDS = 1, 600.0  # few, and enough time for them on a busy machine
    engine = VLLMEngine(
        dtype="float32",
        kv_cache_gib=0.0625,
        max_num_seqs=8,
        enforce_eager=True,
        speculation=Speculation(selector=selector, head=head, siblings=True, steps_per_choice=1),
        tensor_parallel=2,
    )
    engine.setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
    found: dict[str, Any] = {"open sockets": sum(path.is_socket() for path in Path(out).iterdir())}
    engine.update_weights(PolicyWeights(load_policy(other_policy)), 0)
    found["other"] = write(engine, asked() if rank == 0 else asked()[:5])  # each has requests of its own
    engine.update_weights(PolicyWeights(load_policy(policy)), 1)
    engine.warm_up()
    found["measured"] = [[step.batch_size, repr(step.strategy), step.seconds] for step in selector.measured]
    found["greedy"] = write(engine, asked())
    better = load_file(Path(better_head) / "model.safetensors")
    engine.update_drafter(better.items(), 1)
    assert different_weights(engine, better.items()) == []
    found["with a better head"] = write(engine, asked())
    found["stats"] = {name: n for name, n in engine.stats().items() if not name.endswith("_per_s")}
    found["sampled"] = write(engine, asked(), Sampling(max_tokens=64), seed=3)
    found["chosen"], found["learned"] = selector.num_chosen, len(selector.records)
    found["none"] = write(engine, [] if rank == 0 else asked())
    found["stopped"] = stop_one(engine, rank)
    engine.close()
    found |= part(policy, rank)
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(found))
