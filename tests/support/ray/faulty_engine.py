"""An engine without a model that dies, raises, or stands still, of certain tokens in a prompt."""

import os
import signal
import time
from collections.abc import Collection, Sequence

from benchmarks.common.cheap_engine import CheapEngine
from tlt_lightning.rollout import Request

DEADLY, FAULTY, STUNNING, LENGTHY = 666, 667, 668, 669


class FaultyEngine(CheapEngine):
    def add(self, requests: Sequence[Request]) -> None:
        prompts: Collection[int] = {token for request in requests for token in request.prompt_ids}
        if DEADLY in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if STUNNING in prompts:
            time.sleep(2)  # one that never reported has yet to start, for which it has five minutes
            os.kill(os.getpid(), signal.SIGSTOP)
        if LENGTHY in prompts:
            time.sleep(4)
        if FAULTY in prompts:
            raise ValueError(f"token {FAULTY} is beyond me")
        super().add(requests)


class SlowToLoad(CheapEngine):
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        time.sleep(1.5)
