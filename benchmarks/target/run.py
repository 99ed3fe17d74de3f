"""Train the benchmarks' policy and its heads from scratch, without downloads.

On one H200, in about seven minutes with everything:

    python -m benchmarks target

`target/policy` is a Qwen2 of 23 million weights (float32) that has learnt the text of `target/text.py`; `train.jsonl`
and `val.jsonl` are questions to go on from with reinforcement learning. `target/head` is an EAGLE-3 head for it,
`head-brief` the same after a tenth of its training, and `head-random` before it. `--models` names another directory
than `target`. `--tiny` runs the same on a CPU within a minute, to see that it works.

    python -m benchmarks target --parts head block --beside

trains a DSpark head too, `target/head-block`, for as many seconds on the same text; `--beside`: while the other learns.

    python -m benchmarks target --parts sft

fine-tunes the policy on fresh text, into `target/sft/policy`, and trains a head along, `target/sft/drafter/final`.

    python -m benchmarks target --base models/SmolLM2-135M-Instruct --models target/smollm2

goes on from a pre-trained model instead, with its tokenizer, which spells a number digit by digit.

What is real: lengths, entropy, accuracy and acceptance are measured on what a trained policy samples. What is not: the
text is made by rules, so that numbers in the range of reasoning models are not those of any. A step of the policy that
`python -m benchmarks pad_to_7b` makes of it costs what one of 7B weights costs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import parser_of
from benchmarks.common.processes import run_apart
from benchmarks.common.results import about, heading, save, table
from benchmarks.target.head import train_heads
from benchmarks.target.policy import LARGE, PRETRAINED, TINY, Scale, train_policy
from benchmarks.target.sft import fine_tune
from benchmarks.target.text import make_questions
from recipes.assets.make_countdown import write_questions
from tlt_lightning.drafter.architectures.base import DraftArchitecture
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.drafter.architectures.eagle3 import Eagle3

HEADS: dict[str, tuple[str, DraftArchitecture]] = {"head": ("head", Eagle3()), "block": ("head-block", DSpark())}
"""Names of the heads, and what they are, by the parts that train them."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
SAMPLES = 4


def run_policy(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Draw the questions and train the policy."""
    train, val = make_questions(args.seed, scale.num_train, scale.num_val)
    write_questions(args.models / "train.jsonl", train)
    write_questions(args.models / "val.jsonl", val)
    held_out = {question.key for question in val}
    return train_policy(scale, held_out, args.seconds, args.device, args.seed, args.models / "policy", args.base)


def run_head(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Train the EAGLE-3 heads."""
    return _train("head", args, scale)


def run_block(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Train the DSpark heads."""
    return _train("block", args, scale)


def _train(part: str, args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    return train_heads(
        args.models / "policy", args.models, *HEADS[part], scale, args.head_seconds, args.device, args.seed
    )


def run_sft(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Fine-tune the policy on fresh text, and train a head along."""
    epochs, steps = (1, 2) if args.tiny else (4, 30)
    return fine_tune(
        args.models / "policy", args.models / "sft", epochs=epochs, steps=steps, device=args.device, seed=args.seed
    )


def run_measure(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Sample responses to held-out questions at temperature 1: lengths and accuracy."""
    from tlt_lightning.engine import RolloutEngine, TransformersEngine, VLLMEngine
    from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer
    from tlt_lightning.rewards.countdown import countdown
    from tlt_lightning.rollout import Request, Sampling

    path = str(args.models / "policy")
    policy, tokenizer = load_policy(path).to(args.device), load_tokenizer(path)
    rows = [json.loads(line) for line in (args.models / "val.jsonl").read_text().splitlines()][: scale.prompts]
    rows = [row for row in rows for _ in range(SAMPLES)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    engine: RolloutEngine = TransformersEngine()
    if args.device == "cuda":
        engine = VLLMEngine(dtype="bfloat16", max_num_seqs=256, sleep=False)
    engine.setup(path, max_model_len=max(map(len, prompts)) + scale.max_tokens, seed=args.seed)
    engine.attach(policy)
    engine.update_weights(PolicyWeights(policy), 0)
    requests = [Request(id=index, prompt_ids=prompt) for index, prompt in enumerate(prompts)]
    responses = list(engine.generate(requests, Sampling(max_tokens=scale.max_tokens), seed=args.seed))
    engine.close()
    lengths = sorted(len(response.token_ids) for response in responses)
    texts = (tokenizer.decode(list(each.token_ids), skip_special_tokens=True) for each in responses)
    rewards = [countdown("", str(text), rows[each.request_id]) for each, text in zip(responses, texts, strict=True)]
    logps = [logp for response in responses for logp in response.logps]
    return {
        "responses": len(responses),
        "accuracy": round(sum(rewards) / len(rewards), 4),
        "nats per token": round(-sum(logps) / len(logps), 4),
        "mean": round(sum(lengths) / len(lengths), 1),
        **{name: lengths[int(share * (len(lengths) - 1))] for name, share in QUANTILES.items()},
        "cut": sum(response.finish_reason == "length" for response in responses) / len(responses),
    }


PARTS = {"policy": run_policy, "head": run_head, "measure": run_measure, "sft": run_sft, "block": run_block}


def run_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a part and return its result with the seconds it took."""
    started = time.perf_counter()
    result = PARTS[part](args, TINY if args.tiny else PRETRAINED if args.base else LARGE)
    return {**result, "seconds": round(time.perf_counter() - started)}


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    lines = heading("Target", results)
    if policy := results.get("policy"):
        lines += [
            f"Trained for {policy['steps']} steps on {policy['tokens'] / 1e6:.0f}M tokens of fresh text, "
            f"{policy['tokens_per_s']:,} tokens/s, to {policy['loss']:.4f} nats per token.\n"
        ]
    if measured := results.get("measure"):
        lines += ["Responses to held-out questions at temperature 1:\n"]
        lines += table(list(measured), [list(measured.values())])
    if heads := [results[part] for part in HEADS if part in results]:
        drafts, rows = range(1, 8), []
        for name, quality in (pair for head in heads for pair in head["quality"].items()):
            rates = [f"{quality[f'acceptance_rate_pos_{k}']:.3f}" for k in drafts]
            rows.append([name, f"{quality['acceptance_length']:.2f}", *rates])
        lines += ["Tokens per step of 7 greedy drafts, text at temperature 1, and how often each draft is accepted:\n"]
        lines += table(["head", "tokens per step", *map(str, drafts)], rows)
        names = ("steps", "tokens", "tokens_per_s", "us_a_token", "peak_gib")
        rows = [[HEADS[part][0], *map(results[part].get, names)] for part in HEADS if part in results]
        lines += ["What they learnt from. Microseconds a token and memory are those of a training step by itself:\n"]
        lines += table(["head", *(name.replace("_", " ") for name in names)], rows)
    if sft := results.get("sft"):
        lines += ["Fine-tuned on fresh text, a head trained along, judged on texts of the last step:\n"]
        lines += table(list(sft), [list(sft.values())])
    taken = [f"{part} {results[part]['seconds']}" for part in PARTS if part in results]
    return [*lines, f"Seconds in all, start-up included: {', '.join(taken)}."]


def main(arguments: Sequence[str]) -> None:
    """Run each part in a process of its own, and write the report after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=Path, default=Path("target"), help="directory of the policy and its heads")
    parser.add_argument("--base", type=Path, help="directory of a pre-trained model to go on from")
    parser.add_argument("--seconds", type=float, default=240, help="of the policy's training, start-up not counted")
    parser.add_argument("--head-seconds", type=float, default=45, help="of the head's training, start-up not counted")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS)[:3], help="what to do")
    parser.add_argument("--beside", action="store_true", help="train the parts `head` and `block` at the same time")
    args = parser.parse_args(arguments)
    args.device = "cpu" if args.tiny else "cuda"
    name = args.base.name.lower() if args.base else "25m"
    args.models.mkdir(parents=True, exist_ok=True)
    known = args.models / "target.json"  # parts of earlier commands
    results = json.loads(known.read_text()) if known.exists() else {}
    at_once = [part for part in args.parts if args.beside and part in HEADS]
    for parts in [[part] for part in args.parts if part not in at_once] + [at_once] * bool(at_once):
        print(f"--- {' beside '.join(parts)}", flush=True)
        with ThreadPoolExecutor(len(PARTS)) as pool:
            found = pool.map(partial(run_apart, run_part), parts, [args] * len(parts))
            results.update(zip(parts, found, strict=True))
        known.write_text(json.dumps(results))
        results = about("tiny" if args.tiny else name, args.note, args.seed, on_cpu=args.tiny) | {
            name: results[name] for name in PARTS if name in results
        }
        save(args.out / (f"target_{name}" if args.base else "target"), results, render(results))
    print("\n".join(render(results)))
