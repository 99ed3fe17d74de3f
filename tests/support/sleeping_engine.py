"""Rolls out before and after a sleep, in a process of its own: vLLM allows one engine that can sleep in each.

`python -m tests.support.sleeping_engine POLICY HEAD [WEIGHTS]` prints acceptance lengths and texts as a line of JSON.
"""

import json
import sys
from typing import Any

from tests.support.speculation_engines import ScriptedSelector, engine_of, siblings, write
from tlt_lightning.engine import Quantization
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import load_policy, stream_weights
from tlt_lightning.speculation.strategy import Strategy


def main(policy: str, head: str, weights: Any = None) -> None:
    selector = ScriptedSelector()
    selector.script = lambda state: Strategy(5)
    speculation = Speculation(selector=selector, head=head, max_draft_tokens=5, steps_per_choice=1)
    accepted, texts = [], []
    settings: Any = {"enforce_eager": False, "sleep": True, "dtype": "bfloat16"}
    if weights is not None:
        settings["quantization"] = Quantization(weights)
    with engine_of(policy, speculation, **settings) as engine:
        for version in (1, 2):
            texts.append(write(engine, siblings()))
            accepted.append(engine.stats()["speculation/acceptance_length"])
            engine.sleep()
            engine.wake()
            engine.update_weights(stream_weights(load_policy(policy)), version)
    print("RESULT " + json.dumps({"accepted": accepted, "texts": texts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
