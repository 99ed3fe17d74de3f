"""Compare block drafters, which write all drafts in one pass, with EAGLE-3: how they learn, and how fast they serve.

On one GPU, after `python -m benchmarks target --parts policy`:

    python -m benchmarks block_drafts

Parts: `rollouts` writes text of the policy at temperature 1. `heads` trains each of `--heads` on it from random
weights, each token once, all heads at the same time: `eagle3` as beside a policy, KIND-LAYERS-BLOCK by the same
optimizer with the loss of `speculators`; a KIND is `dflash` or `dspark`. `serve` times vLLM's own runner with these
heads at one draft length, as in `dflash-1-8=7`, `plain` without any. `steps` does so with a policy of 7B shape and
random weights: only what steps cost. `--tiny` runs the first parts on a CPU in minutes, with the quickstart's policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from multiprocessing import Manager
from pathlib import Path
from typing import Any

from benchmarks.block_drafts.learn import learn
from benchmarks.block_drafts.report import render
from benchmarks.block_drafts.serve import Turn, serve, time_steps
from benchmarks.common.arguments import ASSETS, parser_of
from benchmarks.common.processes import run_apart
from benchmarks.common.results import about, save

PARTS = ("rollouts", "heads", "serve", "steps")


def write_rollouts(args: Any) -> dict[str, Any]:
    """Write `--num-tokens` tokens of responses, whole ones, to `--completions`."""
    from tlt_lightning.engine import VLLMEngine
    from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer
    from tlt_lightning.rollout import Request, Sampling

    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 512, "sleep": False}
    if args.tiny:
        settings |= {"dtype": "float32", "max_num_seqs": 64, "kv_cache_gib": 0.25}
    tokenizer = load_tokenizer(args.policy)
    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    engine, written, number = VLLMEngine(**settings), 0, 0
    engine.setup(args.policy, max_model_len=max(map(len, prompts)) + args.max_tokens, seed=args.seed)
    engine.update_weights(PolicyWeights(load_policy(args.policy)), 0)
    args.completions.parent.mkdir(parents=True, exist_ok=True)
    with args.completions.open("w") as file:
        while written < args.num_tokens:
            requests = [Request(id=i, prompt_ids=prompt) for i, prompt in enumerate(prompts)]
            responses = engine.generate(requests, Sampling(max_tokens=args.max_tokens), seed=args.seed + number)
            for response in sorted(responses, key=lambda response: response.request_id):  # short ones end first
                ids = list(response.token_ids)
                row = {"prompt_ids": list(prompts[response.request_id]), "response_ids": ids}
                file.write(json.dumps(row) + "\n")
                written += len(ids)
            number += 1
    engine.close()
    return {"tokens": written, "responses": number * len(prompts)}


def train_all(args: Any) -> dict[str, Any]:
    """Train all heads side by side, each in a process of its own."""
    with ThreadPoolExecutor(1 if args.tiny else len(args.heads)) as pool:
        running = {arm: pool.submit(run_apart, learn, args, arm, args.models / arm) for arm in args.heads}
    return {arm: outcome(future) for arm, future in running.items()}


def run_engines(part: str, args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each engine of a part measures; `--at-once` of them start together."""
    arms = args.serve if part == "serve" else args.steps_of
    with Manager() as manager:
        for first in range(0, len(arms), args.at_once):
            group = arms[first : first + args.at_once]
            turn = Turn(manager.Barrier(len(group)), manager.Lock())
            with ThreadPoolExecutor(len(group)) as pool:
                running = {pool.submit(run_apart, turn.of, *given(part, args, arm)): arm for arm in group}
                for future in as_completed(running):
                    yield running[future], outcome(future)


def given(part: str, args: Any, arm: str) -> tuple[Any, ...]:
    """Return a function and its arguments for `arm`, HEAD=DRAFTS."""
    name, _, drafts = arm.partition("=")
    if part == "steps":
        return time_steps, args, name, int(drafts)
    return serve, args, name, int(drafts), None if name == "plain" else str(args.models / name)


def outcome(future: Future[dict[str, Any]]) -> dict[str, Any]:
    """Return what came of it, or its error: the others must not be lost with it."""
    error = future.exception()
    return future.result() if error is None else {"failed": f"{type(error).__name__}: {error}"}


def main(arguments: Sequence[str]) -> None:
    """Run the parts one after the other, and write the results after each step."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to do")
    parser.add_argument("--policy", default="target/policy", help="directory of the policy")
    parser.add_argument("--prompts", default="target/train.jsonl", help="file of prompts, JSON lines")
    parser.add_argument(
        "--models", type=Path, default=Path("target/blocks"), help="directory of the heads and their text"
    )
    parser.add_argument("--num-tokens", type=int, default=1_600_000, help="of text to train on")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a response")
    parser.add_argument("--heads", nargs="+", default=["eagle3", "dflash-1-8", "dspark-1-8"], help="heads to train")
    parser.add_argument("--portion", type=int, default=100_000, help="tokens between two measurements")
    parser.add_argument("--portions", type=int, default=12, help="measurements, at most")
    parser.add_argument("--judged", type=int, default=30_000, help="tokens of held-out text")
    parser.add_argument("--pack-tokens", type=int, default=4096, help="of `LongTailIdleCallback`")
    parser.add_argument(
        "--anchors", type=float, default=1.0, help="blocks of a training step for each token of response"
    )
    parser.add_argument("--serve", nargs="+", default=["plain=0", "eagle3=3"], help="HEAD=DRAFTS to serve")
    parser.add_argument(
        "--steps-of", nargs="+", default=["plain=0", "eagle3=7"], help="HEAD=DRAFTS to time in 7B shape"
    )
    parser.add_argument("--draft-sampling", choices=("greedy", "probabilistic"), default="probabilistic")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=64, help="steps timed in each of two rounds")
    parser.add_argument("--at-once", type=int, default=2, help="engines that start side by side")
    parser.add_argument("--name", default="block_drafts", help="of the result files")
    args = parser.parse_args(arguments)
    args.temperature, args.draft_vocab_size, args.rounds, args.shape = 1.0, None, 2, "7b"
    if args.tiny:
        args.policy, args.prompts, args.shape = str(ASSETS / "policy"), str(ASSETS / "train.jsonl"), "tiny"
        args.num_tokens, args.max_tokens, args.portion, args.portions, args.judged = 20_000, 128, 4000, 2, 2000
        args.batches, args.steps, args.pack_tokens, args.at_once = [1, 4], 8, 2048, 1
    args.completions = args.models / "completions.jsonl"
    results: dict[str, Any] = {"about": about("tiny" if args.tiny else "25m", args.note, args.seed)}
    for part in [part for part in PARTS if part in args.parts]:
        print(f"--- {part}", flush=True)
        if part == "rollouts":
            results[part] = run_apart(write_rollouts, args)
        elif part == "heads":
            results[part] = train_all(args)
        else:
            results[part] = {}
            for arm, found in run_engines(part, args):
                results[part][arm] = found
                print(arm, found.get("cells") or found, found.get("natural", ""), flush=True)
                save(args.out / args.name, results, render(results))
        save(args.out / args.name, results, render(results))
    print("\n".join(render(results)))
