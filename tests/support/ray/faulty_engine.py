"""An engine without a model that dies, or raises, of certain tokens in a prompt."""

import os
import signal
import time
from collections.abc import Collection, Sequence

from benchmarks.common.cheap_engine import CheapEngine
from tlt_lightning.rollout import Request

DEADLY, FAULTY = 666, 667


class FaultyEngine(CheapEngine):
    def add(self, requests: Sequence[Request]) -> None:
        prompts: Collection[int] = {token for request in requests for token in request.prompt_ids}
        if DEADLY in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULTY in prompts:
            raise ValueError(f"token {FAULTY} is beyond me")
        super().add(requests)


class SlowToLoad(CheapEngine):
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        time.sleep(1.5)
