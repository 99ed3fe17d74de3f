"""Run by schedules/test_two_ranks.py, once per rank: rank 0 writes short answers, and meanwhile answers ahead.

Nothing depends on the clock. Rank 1 writes on once rank 0 has written ahead: in the first iteration all of it, after
which callbacks have the window; in the others `NUM_STEPS` engine steps, and rank 0 waits for its window to close.
"""

import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from tests.support.ranks.drafters.beside import make_trainer
from tests.support.rl_runs import make_data, make_module
from tlt_lightning import EarlierAnswers, RolloutCallback, Sampling
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.rollout import Request, Response
from tlt_lightning.speculation import FixedSelector

SHORT, LONG, NUM_STEPS, NUM_ITERATIONS = 6, 40, 5, 3


class Staged(VLLMEngine):
    """Notes what it is asked for; rank 0's every second call writes ahead."""

    rank: int
    out: Path

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls: list[list[dict[str, Any]]] = []
        self.written: list[int] = []
        self.was_stopped = False

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: Any = None
    ) -> Iterator[Response]:
        number, self.was_stopped = len(self.calls), False
        is_ahead = self.rank == 0 and number % 2 == 1
        event = self.out / f"ahead{number // 2 if self.rank == 0 else number}"
        limit = LONG if self.rank == 1 or (is_ahead and number > 1) else SHORT
        kept = [{"prompt": [*r.prompt_ids], "earlier": [[*text] for text in r.earlier_answers]} for r in requests]
        self.calls.append(kept)
        num_steps = 0

        def staged(progress: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            on_progress(progress)
            if is_ahead and number > 1 and num_steps == NUM_STEPS:
                event.touch()
                while not self.was_stopped:
                    on_progress(progress)
                    time.sleep(0.005)
            while self.rank == 1 and not event.exists():
                time.sleep(0.005)

        asked = [replace(request, max_tokens=limit) for request in requests]
        num_tokens = 0
        for response in super().generate(asked, sampling, seed=seed, on_progress=staged):
            num_tokens += len(response.token_ids)
            yield response
        self.written.append(num_tokens)

    def stop(self, ids: Collection[int]) -> None:
        self.was_stopped = True
        super().stop(ids)


class Observer(RolloutCallback):
    """Notes windows, what is remembered, and metrics."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rows: list[dict[str, float]] = []
        self.history: list[dict[int, list[list[int]]]] = []
        self.open: list[bool] = []

    def on_rollout_idle(self, trainer, pl_module, window):
        self.open.append(window.is_open())
        (self.out / f"ahead{trainer.current_epoch}").touch()

    def on_rollout_end(self, trainer, pl_module, rollouts):
        texts = trainer.datamodule.history.texts
        self.history.append({prompt: [text.tolist() for text in held] for prompt, held in texts.items()})

    def on_iteration_end(self, trainer, pl_module, iteration, metrics):
        self.rows.append(metrics)


def main(policy: str, prompts: str, out: str) -> None:
    L.seed_everything(3)
    engine = Staged(
        dtype="float32",
        kv_cache_gib=0.0625,
        max_num_seqs=16,
        enforce_eager=True,
        speculation=Speculation(selector=FixedSelector(3, "sibling"), siblings=True),
    )
    data = make_data(
        prompts,
        engine,
        val=None,
        micro_batch_tokens=256,
        num_minibatches=1,
        sampling=Sampling(max_tokens=LONG),
        earlier_answers=EarlierAnswers(ahead=2),
    )
    observer = Observer(Path(out))
    trainer = make_trainer(Path(out), NUM_ITERATIONS, observer)
    engine.rank, engine.out = trainer.global_rank, Path(out)
    trainer.fit(make_module(policy), data)
    state = {"calls": engine.calls, "written": engine.written}
    state |= {name: getattr(observer, name) for name in ("rows", "history", "open")}
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(state))


if __name__ == "__main__":
    main(*sys.argv[1:])
