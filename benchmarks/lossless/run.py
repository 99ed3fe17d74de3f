"""Check that speculation leaves the texts' distribution alone, on this device and precision.

    python -m benchmarks lossless --size 25m
    python -m benchmarks lossless --tiny --head DIR       # on a CPU, to see that it works

Texts are written with every arm at temperature 1 and scored by the trainer's own pass: the k3 estimate of the KL
divergence between the log-probs the engine returned and the trainer's must be the same with and without speculation,
and the tokens must be as surprising as the policy's entropy says (see `lossless/checks.py`). Writes
`lossless_<size>.json` and `.md` after every arm. (Every text that a policy of six tokens can write is counted by
`tests/engine/vllm/lossless/test_distribution.py`, on a GPU too.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.arguments import sized_parser_of, take_size
from benchmarks.common.results import about, heading, note_of, save, table
from benchmarks.lossless.checks import agreement, score
from benchmarks.rollout.arms import ENGINES, arms_of
from benchmarks.rollout.process import EngineError, Engines
from benchmarks.rollout.setup import Setup, add_arguments, setup_of

ARMS = ("plain", "K=3", "K=7", "adaptive", "adaptive, siblings too", "adaptive, sampled drafts", "K=3, sampled drafts")


def run(setup: Setup, out: Path, seconds: float, results: dict[str, Any]) -> None:
    """Check the arms, one live engine at a time; a failure ends no other arm."""
    end, model = time.perf_counter() + seconds, load_trainer(setup)
    prompts = [request.prompt_ids for request in setup.requests()]
    known, engines = arms_of(setup.heads), Engines(setup)
    arms = sorted((known[name] for name in ARMS if name in known), key=lambda arm: list(ENGINES).index(arm.engine))
    try:
        for arm in arms:
            if time.perf_counter() > end:
                results["left_out"].append(arm.name)
                continue
            engines.need([arm.engine])
            try:
                written = engines.get(arm.engine).call("write", arm=arm.name)
                results["arms"].append({"arm": arm.name, **agreement(*score(model, prompts, written))})
            except (EngineError, RuntimeError) as error:
                results["failures"].append({"arm": arm.name, "error": str(error)[-1500:]})
            save(out, results, render(results))
    finally:
        engines.close()
    save(out, results, render(results))


def load_trainer(setup: Setup) -> torch.nn.Module:
    """Load the policy as the trainer runs it, in the engine's precision."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, setup.dtype)
    policy = AutoModelForCausalLM.from_pretrained(setup.policy, dtype=dtype, attn_implementation="sdpa")
    return policy.to(device).eval()  # type: ignore[arg-type]


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    header = ["arm", "tokens", "k3 (nats a token)", "mean difference", "largest", "importance", "surprise - entropy"]
    rows = [
        [
            row["arm"],
            row["tokens"],
            f"{row['k3']:.2e} ± {row['k3_error']:.0e}",
            f"{row['mean_abs_difference']:.1e}",
            f"{row['max_abs_difference']:.2f}",
            f"{row['importance']:.4f}",
            f"{row['surprise'] - row['entropy']:+.4f} ({row['surprise_z']:+.1f} deviations)",
        ]
        for row in results["arms"]
    ]
    lines = [*heading("Lossless", results), "Engine against trainer at temperature 1:", "", *table(header, rows)]
    for failure in results["failures"]:
        lines.append(f"- {failure['arm']} failed: `{failure['error'].strip().splitlines()[-1]}`")
    if results["left_out"]:
        lines.append(f"Left out, the budget being spent: {', '.join(results['left_out'])}.")
    return lines


def main(arguments: Sequence[str]) -> None:
    """Check all arms and write the report."""
    parser = sized_parser_of(__doc__)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    take_size(args, trains=False)
    setup = setup_of(args, num_prompts=64, group_size=4, max_tokens=1024)
    record = about(args.size, note_of(setup.policy, args.note), args.seed)
    results: dict[str, Any] = {**record, "setup": asdict(setup), "arms": [], "failures": [], "left_out": []}
    run(setup, args.out / f"lossless_{args.size}", args.seconds, results)
    print("\n".join(render(results)))
