"""Run by test_tensor_parallel.py, once per rank: short texts of an engine over two processes, under every drafter."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.engine.vllm.lossless.test_distribution import HORIZON, Setup, cycle, draw
from tests.support.speculation_engines import MAX_MODEL_LEN, ScriptedSelector
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Sampling
from tlt_lightning.speculation.strategy import Drafter

DRAFTERS: tuple[Drafter, ...] = ("learned", "sibling", "ngram", "mixed")


def main(policy: str, head: str, out: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    selector = ScriptedSelector(DRAFTERS, longest=3)
    speculation = Speculation(
        selector=selector, head=head, siblings=True, ngram=True, max_draft_tokens=3, steps_per_choice=1
    )
    engine = VLLMEngine(
        dtype="float32",
        kv_cache_gib=0.0625,
        max_num_seqs=128,
        enforce_eager=True,
        speculation=speculation,
        tensor_parallel=2,
    )
    engine.setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
    engine.update_weights(PolicyWeights(load_policy(policy)), 0)
    controller = engine.inspect().controller
    assert controller is not None
    controller.alarm.window = 10**9  # the head is meant to be wrong
    setup = Setup(engine, selector, list(DRAFTERS), policy, "two ranks", 2e-4)
    found: dict[str, Any] = {}
    for drafter in ("learned", "mixed", None):
        cycle(setup, drafter)  # type: ignore[arg-type]
        responses = draw(setup, Sampling(max_tokens=HORIZON), seed=1 + rank)
        texts = [[list(response.token_ids), list(response.logps)] for response in responses]
        found[drafter or "any"] = {"texts": texts, "acceptance": engine.stats()["speculation/acceptance_length"]}
    engine.close()
    (Path(out) / f"texts{rank}.json").write_text(json.dumps(found))
