"""Time rollouts of conversations whose tools take their time, with and without speculation.

    python -m benchmarks environments --size 25m

Each conversation has three turns; behind each of the first two a simulated tool sleeps, meanwhile the engine writes
the others. Arms: no drafts, drafts from siblings, and those of the size's head, each length by `CostModelSelector`. A
rollout is written once untimed. `--tiny` takes the quickstart's policy, fewer conversations and shorter waits.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from benchmarks.common.arguments import sized_parser_of, take_size
from benchmarks.common.results import about, heading, note_of, save, table
from tlt_lightning import CostModelSelector, PromptSource, Request, Sampling, Speculation, VLLMEngine
from tlt_lightning.data.prompts import load_prompts, turns_of
from tlt_lightning.data.streams.conversations import ConversationStream
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer

TURNS, MAX_TOKENS, GROUP = 3, 960, 8


class Waiting:
    """Asks its question again after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, **row: Any) -> None:
        """Begin with a row."""
        self.row, self.num_heard = row, 0

    async def step(self, text: str) -> str | None:
        """Wait, and ask again."""
        self.num_heard += 1
        if self.num_heard == TURNS:
            return None
        await asyncio.sleep(self.seconds)
        return str(self.row["prompt"])


def main(arguments: list[str]) -> None:
    """Time all pairs of a wait and an engine."""
    parser = sized_parser_of(__doc__)
    parser.add_argument("--waits", type=float, nargs="+", default=[0.1, 1.0, 5.0], help="seconds that a tool takes")
    parser.add_argument("--conversations", type=int, default=64)
    args = parser.parse_args(arguments)
    take_size(args, trains=False)
    waits, number = ([0.1, 1.0], 8) if args.tiny else (args.waits, args.conversations)
    cache = 0.5 if args.tiny else 8.0
    rows: list[dict[str, Any]] = []
    arms = {"off": None, "siblings": drafts()}
    if args.head:
        arms["head"] = Speculation(selector=CostModelSelector(), head=args.head[0])
    for name, speculation in arms.items():
        engine = VLLMEngine(kv_cache_gib=cache, max_num_seqs=number, speculation=speculation)
        engine.setup(args.policy, max_model_len=1024, seed=args.seed)
        engine.update_weights(PolicyWeights(load_policy(args.policy)), 0)
        engine.warm_up(number)
        for seconds in (waits[0], *waits):
            rows.append({"drafts": name, "tool_seconds": seconds, **timed(engine, args, seconds, number)})
        del rows[-len(waits) - 1]  # the first is not timed
        engine.close()
        record = {**about(args.size, note_of(args.policy, args.note), args.seed), "rollouts": rows}
        lines = [*heading("Environments", record), *table(list(rows[0]), [list(row.values()) for row in rows])]
        save(args.out / f"environments_{args.size}", record, lines)


def drafts() -> Speculation:
    """Return drafts that need no training."""
    return Speculation(selector=CostModelSelector(drafters=("sibling",)), siblings=True)


def timed(engine: VLLMEngine, args: Any, seconds: float, number: int) -> dict[str, float]:
    """Write a rollout; return its seconds, tokens a second and tokens a step."""
    tokenizer, source = load_tokenizer(args.policy), PromptSource(path=args.prompts)
    environments = Environments(partial(Waiting, seconds))
    turns = turns_of(source, tokenizer, environments=environments)
    prompts = load_prompts(source, tokenizer, max_prompt_tokens=64, turns=turns)[: number // GROUP]
    stream = ConversationStream(engine, environments, TurnLimits(most=TURNS, tokens=240, seconds=60))
    stream.speak(source, turns, 64)
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    requests = [Request(i, prompt.ids, group=i // GROUP, seed=i) for i, prompt in enumerate(asked)]
    started = time.perf_counter()
    stream.ask(requests, Sampling(max_tokens=MAX_TOKENS), seed=args.seed, prompts=asked)
    tokens = sum(response.num_written for response in stream)
    elapsed = time.perf_counter() - started
    stream.close()
    return {
        "seconds": elapsed,
        "tokens": float(tokens),
        "tokens_per_s": tokens / elapsed,
        "tokens_per_step": engine.stats().get("speculation/acceptance_length", 1.0),
    }
