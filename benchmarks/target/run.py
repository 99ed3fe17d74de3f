"""Train the benchmarks' policy and its draft heads from scratch: something to measure on without downloads.

On one H200, in about seven minutes with everything:

    python -m benchmarks target --out target

`target/policy` is a Qwen2 of 23 million weights (float32) that has learnt the text of `target/text.py`; `train.jsonl`
and `val.jsonl` are questions to go on from with reinforcement learning. `target/head` is an EAGLE-3 head for it,
`head-brief` the same after a tenth of its training, and `head-random` before it. `target.{json,md,png}` go to
`--results`. `--tiny` runs the same on a CPU within a minute, to see that it works.

What is real: lengths, entropy, accuracy and acceptance are measured on what a trained policy samples. What is not: the
text is made by rules, so that numbers in the range of reasoning models are not those of any. A step of the
policy that `pad_to_7b.py` makes of it costs what one of 7B weights costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results_file import about, heading, save, table
from benchmarks.target.policy import LARGE, TINY, Scale
from benchmarks.target.text import make_questions
from recipes.assets.make_countdown import write_questions

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("policy", "head", "measure")
HEADS = ("head-random", "head-brief", "head")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def run_policy(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Draw the questions and train the policy."""
    from benchmarks.target.policy import train_policy

    train, val = make_questions(args.seed, scale.num_train, scale.num_val)
    write_questions(args.out / "train.jsonl", train)
    write_questions(args.out / "val.jsonl", val)
    held_out = {question.key for question in val}
    return train_policy(scale, held_out, args.seconds, args.device, args.seed, args.out / "policy")


def run_head(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Train the draft heads."""
    from benchmarks.target.head import train_heads

    return train_heads(args.out / "policy", args.out, scale, args.head_seconds, args.device, args.seed)


def run_measure(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Sample responses to held-out questions at temperature 1: lengths and accuracy."""
    from tlt_lightning.engine import Request, RolloutEngine, Sampling, TransformersEngine, VLLMEngine
    from tlt_lightning.policy import load_policy, load_tokenizer, stream_weights
    from tlt_lightning.rewards.countdown import countdown

    path = str(args.out / "policy")
    policy, tokenizer = load_policy(path).to(args.device), load_tokenizer(path)
    rows = [json.loads(line) for line in (args.out / "val.jsonl").read_text().splitlines()][: scale.prompts]
    rows = [row for row in rows for _ in range(scale.samples)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    engine: RolloutEngine = TransformersEngine()
    if args.device == "cuda":
        engine = VLLMEngine(dtype="bfloat16", max_num_seqs=256, sleep=False)
    engine.setup(path, max_model_len=max(map(len, prompts)) + scale.max_tokens, seed=args.seed)
    engine.attach(policy)
    engine.update_weights(stream_weights(policy), 0)
    requests = [Request(id=index, prompt_ids=prompt) for index, prompt in enumerate(prompts)]
    started = time.perf_counter()
    responses = list(engine.generate(requests, Sampling(max_tokens=scale.max_tokens), seed=args.seed))
    seconds = time.perf_counter() - started
    engine.close()
    lengths = sorted(len(response.token_ids) for response in responses)
    rewards = [
        countdown("", tokenizer.decode(response.token_ids, skip_special_tokens=True), rows[response.request_id])
        for response in responses
    ]
    logps = [logp for response in responses for logp in response.logps]
    return {
        "responses": len(responses),
        "seconds": round(seconds, 1),
        "accuracy": round(sum(rewards) / len(rewards), 4),
        "cut": sum(response.finish_reason == "length" for response in responses) / len(responses),
        "nats_per_token": round(-sum(logps) / len(logps), 4),
        "mean": round(sum(lengths) / len(lengths), 1),
        **{name: lengths[int(share * (len(lengths) - 1))] for name, share in QUANTILES.items()},
        "lengths": lengths,
    }


def render(results: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = heading("Target", results)
    if policy := results.get("policy"):
        lines += [
            f"Trained for {policy['steps']} steps on {policy['tokens'] / 1e6:.0f}M tokens of fresh text, "
            f"{policy['tokens_per_s']:,} tokens/s, to {policy['loss']:.4f} nats per token.\n"
        ]
    if measured := results.get("measure"):
        names = ["responses", "accuracy", "nats_per_token", "mean", *QUANTILES, "cut"]
        lines += [f"Responses to held-out questions at temperature 1, in {measured['seconds']:.0f} s:\n"]
        lines += table(names, [[measured[name] for name in names]])
    if head := results.get("head"):
        drafts = range(1, 8)
        rows = []
        for name in HEADS:
            quality = head["quality"][name]
            rates = [f"{quality[f'acceptance_rate_pos_{k}']:.3f}" for k in drafts]
            rows.append([name, f"{quality['acceptance_length']:.2f}", *rates])
        lines += ["Tokens per step of 7 greedy drafts, text at temperature 1, and how often each draft is accepted:\n"]
        lines += table(["head", "tokens per step", *map(str, drafts)], rows)
    taken = [f"{part} {results[part]['seconds_in_all']:.0f}" for part in PARTS if part in results]
    lines += [f"Seconds in all, start-up included: {', '.join(taken)}."]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the curves of the losses and the tail of the lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    for axis, part, name in zip(axes, ("policy", "head"), ("policy: nats per token", "head: loss"), strict=False):
        curve = results.get(part, {}).get("curve", [])
        axis.plot([point["seconds"] for point in curve], [point["loss"] for point in curve])
        axis.set(xlabel="seconds of training", title=name, yscale="log")
    if lengths := results.get("measure", {}).get("lengths"):
        longer = [1 - index / len(lengths) for index in range(len(lengths))]
        axes[2].step(lengths, longer)
        axes[2].set(xlabel="tokens", title="share of responses at least as long", xscale="log", yscale="log")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def run_part(part: str, args: argparse.Namespace) -> int:
    """Run a part in a process of its own, which leaves the device's memory to the next; its exit status."""
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--part", part]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode


def finish_part(part: str, args: argparse.Namespace, scale: Scale) -> None:
    """Run a part in this process and leave its result beside what it made."""
    started = time.perf_counter()
    result = {"policy": run_policy, "head": run_head, "measure": run_measure}[part](args, scale)
    result["seconds_in_all"] = round(time.perf_counter() - started, 1)
    result_file(args.out, part).write_text(json.dumps(result))


def result_file(out: Path, part: str) -> Path:
    """Where a part leaves its result."""
    return out / f"{part}.result.json"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the policy, the heads and the questions")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks/results")))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seconds", type=float, default=240, help="of the policy's training, start-up not counted")
    parser.add_argument("--head-seconds", type=float, default=45, help="of the head's training, start-up not counted")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to do")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny policy on the CPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.device = "cpu"
    return args


def main() -> None:
    """Run the parts one after the other; after each, the report holds what is known."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        finish_part(args.part, args, TINY if args.tiny else LARGE)
        return
    args.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in args.parts:
        print(f"--- {part}", flush=True)
        result_file(args.out, part).unlink(missing_ok=True)
        if status := run_part(part, args):
            print(f"Part {part!r} failed with exit status {status}.", file=sys.stderr, flush=True)
            failed.append(part)
        results = about("tiny" if args.tiny else "25m", "", args.seed)
        done = [name for name in PARTS if result_file(args.out, name).is_file()]
        results |= {name: json.loads(result_file(args.out, name).read_text()) for name in done}
        save(args.results / "target.json", results)
        (args.results / "target.md").write_text(render(results))
        draw(results, args.results / "target.png")
    print((args.results / "target.md").read_text())
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
