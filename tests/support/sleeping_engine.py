"""Rolls out before and after a sleep, in a process of its own: vLLM lets one engine at a time sleep in each.

`python -m tests.support.sleeping_engine POLICY HEAD [WEIGHTS]` prints acceptance lengths, texts and the bytes
that closing the sleeping engine gave back, while others held nearly all of the device, as one line of JSON.
"""

import contextlib
import json
import sys
from typing import Any

import torch

from tests.support.speculation_engines import MAX_MODEL_LEN, ScriptedSelector, engine_of, siblings, write
from tlt_lightning.engine import Quantization, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.speculation.strategy import Strategy

ROOM = 40 * 2**20  # less than the KV cache has, which is one allocation


def main(policy: str, head: str, weights: Any = None) -> None:
    selector = ScriptedSelector()
    selector.script = lambda state: Strategy(5)
    speculation = Speculation(selector=selector, head=head, max_draft_tokens=5, steps_per_choice=1)
    accepted, texts = [], []
    settings: Any = {"enforce_eager": False, "sleep": True, "dtype": "bfloat16"}
    if weights is not None:
        settings["quantization"] = Quantization(weights)
    with contextlib.suppress(ValueError):  # a cache without room, found out with the weights on the device
        VLLMEngine(dtype="bfloat16", kv_cache_gib=1e-5).setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
        raise AssertionError("an engine started without a cache")
    with engine_of(policy, speculation, **settings) as engine:
        for version in (1, 2):
            texts.append(write(engine, siblings()))
            accepted.append(engine.stats()["speculation/acceptance_length"])
            engine.sleep()
            engine.wake()
            engine.update_weights(PolicyWeights(load_policy(policy)), version)
        engine.sleep()
        held = torch.empty(torch.cuda.mem_get_info()[0] - ROOM, dtype=torch.uint8, device="cuda")
        free = torch.cuda.mem_get_info()[0]
    given_back = torch.cuda.mem_get_info()[0] - free
    del held
    again = torch.ones(1, device="cuda").item()  # the device still works
    print("RESULT " + json.dumps({"accepted": accepted, "texts": texts, "given_back": given_back, "again": again}))


if __name__ == "__main__":
    main(*sys.argv[1:])
