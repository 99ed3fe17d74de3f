"""Find the layers whose 8 bits cost the most: how far the engine is from the trainer's policy, by what stays in 16 bit.

    python -m benchmarks mismatch --policy PATH --prompts FILE

An engine a row, each in a process of its own, writes one response to each prompt; the policy scores them in the type of
the run's update, bfloat16. The rows `none` and `all` come first. On a GPU a row takes twice the policy in bfloat16 and
`KV_GIB`, on the host the policy in float32. `--tiny` takes the quickstart's policy, on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.common.arguments import sized_parser_of, take_size
from benchmarks.common.processes import run_apart
from benchmarks.common.results import about, heading, note_of, save, table
from benchmarks.lossless.checks import agreement, score
from tlt_lightning import PromptSource
from tlt_lightning.data.prompts import load_prompts
from tlt_lightning.engine import Quantization, VLLMEngine
from tlt_lightning.engine.vllm.quantization import linear_layers
from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer, policy_shapes
from tlt_lightning.rollout import Request, Sampling

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM makes one of, and computes in one type."""

KV_GIB = 4.0
"""Cache of a row's engine on a GPU, where rows run side by side."""


def choices(layers: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the rows by name: patterns of layers that stay in 16 bit; None quantizes nothing."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    blocks = list(dict.fromkeys(name.rpartition(".layers.")[2].partition(".")[0] for name in layers))
    fused = [tuple(kind for kind in group if kind in kinds) for group in FUSED]
    groups = [*filter(None, fused), *((kind,) for kind in kinds if not any(kind in group for group in fused))]
    rows: dict[str, list[str] | None] = {"none": [], "all": None}
    rows |= {", ".join(group): [f"*.{kind}" for kind in group] for group in groups}
    ends = {"first block": blocks[:1], "last block": blocks[-1:], "first and last": [blocks[0], blocks[-1]]}
    return rows | {name: [f"*.layers.{block}.*" for block in found] for name, found in ends.items()}


def measure(kept: list[str] | None, args: Any) -> dict[str, float]:
    """Return how far an engine that keeps these layers in 16 bit is from the policy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = load_prompts(PromptSource(path=args.prompts), load_tokenizer(args.policy), max_prompt_tokens=512)
    requests = [Request(id=i, prompt_ids=prompt.ids) for i, prompt in enumerate(prompts[: args.num_prompts])]
    quantization = None if kept is None else Quantization("fp8", kept)
    engine = VLLMEngine(
        dtype="bfloat16",
        max_num_seqs=64,
        gpu_memory_utilization=0.1,  # the cache has a size of its own; vLLM only asks whether so much is free
        kv_cache_gib=0.25 if device == "cpu" else KV_GIB,
        enforce_eager=True,
        sleep=False,
        quantization=quantization,
    )
    policy = load_policy(args.policy).to(device, torch.bfloat16)  # type: ignore[arg-type]
    engine.setup(args.policy, max_model_len=512 + args.max_tokens, seed=args.seed)
    engine.update_weights(PolicyWeights(policy), 0)
    responses = list(engine.generate(requests, Sampling(max_tokens=args.max_tokens), seed=args.seed))
    engine.close()
    prompts_of = [requests[response.request_id].prompt_ids for response in responses]
    written = [(list(response.token_ids), list(response.logps)) for response in responses]
    sampled, found, entropy = score(policy, prompts_of, written)
    apart, weights = agreement(sampled, found, entropy), (found - sampled).exp().clamp(max=2)
    return {
        "kl": apart["k3"],
        "difference": apart["mean_abs_difference"],
        "ratio_max": (found - sampled).max().exp().item(),
        "effective": (weights.sum() ** 2 / (len(weights) * weights.square().sum())).item(),
        "tokens": apart["tokens"],
    }


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown, the row with the smallest KL first."""
    header = ["in 16 bit", "KL, nats a token", "difference of log-probs", "largest ratio", "effective sample", "tokens"]
    rows = sorted(results["rows"].items(), key=lambda row: row[1]["kl"])
    lines = [*heading("Mismatch by layer, quantized to fp8", results["about"])]
    for name, error in results["failed"].items():
        lines += [f"Failed: {name}, `{error}`.", ""]
    if results["left_out"]:
        lines += [f"Left out, the budget spent: {'; '.join(results['left_out'])}.", ""]
    return lines + table(header, [[name, *found.values()] for name, found in rows])


def main(arguments: Sequence[str]) -> None:
    """Measure a row for each choice of layers while the budget lasts, and write `mismatch_<size>.json` and `.md`."""
    parser = sized_parser_of(__doc__)
    parser.add_argument("--num-prompts", type=int, help="64, or 16 with `--tiny`")
    parser.add_argument("--max-tokens", type=int, help="256, or 16 with `--tiny`")
    parser.add_argument("--at-once", type=int, default=1, help="rows side by side, on one device")
    args = parser.parse_args(arguments)
    take_size(args, trains=False)
    args.num_prompts = args.num_prompts or (16 if args.tiny else 64)
    args.max_tokens = args.max_tokens or (16 if args.tiny else 256)
    record = about(args.size, note_of(args.policy, args.note), args.seed, on_cpu=args.tiny)
    results: dict[str, Any] = {"about": record, "failed": {}, "left_out": [], "rows": {}}
    rows, began = choices(linear_layers(policy_shapes(args.policy))), time.perf_counter()

    def row(kept: list[str] | None) -> dict[str, float] | None:
        return run_apart(measure, kept, args) if time.perf_counter() - began < args.seconds else None

    with ThreadPoolExecutor(args.at_once) as pool:
        running = {name: pool.submit(row, kept) for name, kept in rows.items()}
        for name, run in running.items():
            if error := run.exception():  # the other rows must not be lost with it
                results["failed"][name] = f"{type(error).__name__}: {error}"
            elif (found := run.result()) is None:
                results["left_out"].append(name)
            else:
                results["rows"][name] = found
            save(args.out / f"mismatch_{args.size}", results, render(results))
    print("\n".join(render(results)))
