"""Whether speculation changes what is written, on the device and in the precision it is used in.

    python -m benchmarks lossless --rung 25m
    python -m benchmarks lossless --tiny --head DIR       # on a CPU, to see that it works

Two checks. *Greedy*: in bfloat16 two runs part wherever rounding decides between two tokens, and rounding depends on
how many tokens are computed together. The floor of that noise is plain decoding against plain decoding at another
batch size; texts written with speculation must not part more often, and where they part the two tokens must be as
close. *Log-probs* at temperature 1: the k3 estimate of the KL divergence between the log-probs the engine returned and
those of the trainer's own pass over the finished texts, which must be the same with and without speculation; and
whether the tokens are as surprising as the policy's entropy says (see `lossless_checks.agreement`).

Writes `lossless_<rung>.json` and `.md` after every measurement.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results_file import about, heading, note_of, save, table
from benchmarks.lossless.checks import Written, agreement, divergence, excess, gaps, score
from benchmarks.rollout.arms import Arm, arms_of
from benchmarks.rollout.process import Engines
from benchmarks.rollout.setup import Setup, add_arguments, setup_of
from tlt_lightning.engine import Sampling

GREEDY_ARMS = ("K=3", "K=7", "adaptive", "adaptive, siblings too", "K=3, sampled drafts")
SAMPLED_ARMS = ("K=3", "adaptive", "adaptive, siblings too", "adaptive, sampled drafts")
CALL_SECONDS = 240.0


class Check:
    """Writes texts with every arm and compares them.

    Args:
        setup: Prompts and engines.
        out: Results without their suffix.
        seconds: Budget after which no new arm starts.
        chunk: Requests that run together where the noise floor is measured.
        results: Where everything goes.
    """

    def __init__(self, setup: Setup, out: Path, seconds: float, chunk: int, results: dict[str, Any]) -> None:
        self.setup, self.out, self.seconds, self.chunk, self.results = setup, out, seconds, chunk, results
        self.engines = Engines(setup)
        self.arms = arms_of(setup.heads)
        self.prompts = setup.prompt_ids()
        self.began = time.perf_counter()
        self.greedy = Sampling(max_tokens=setup.max_tokens, temperature=0)
        self.reference: Written = ()

    def run(self) -> None:
        """Both checks engine by engine, of which two live at a time: the next starts while one writes."""
        arms = [self.arms[name] for name in dict.fromkeys(["plain", *GREEDY_ARMS, *SAMPLED_ARMS]) if name in self.arms]
        kinds = list(dict.fromkeys(arm.engine for arm in arms))
        self.engines.need(kinds[:2], wait=False)
        self.model = load_trainer(self.setup)
        for place, kind in enumerate(kinds):
            self.engines.need(kinds[place : place + 2], wait=False)
            for arm in arms:
                if arm.engine == kind:
                    self.check(arm)

    def check(self, arm: Arm) -> None:
        """Both checks of one arm; the plain one comes first and is what greedy texts are compared with."""
        if arm.name == "plain":
            self.attempt("the plain texts", self.write_reference)
            self.attempt("greedy, plain again", lambda: self.compare_greedy(arm, "plain again"))
            name = f"plain, {self.chunk} at a time"
            self.attempt(f"greedy, {name}", lambda: self.compare_greedy(arm, name, self.chunk))
        elif arm.name in GREEDY_ARMS:
            self.attempt(f"greedy, {arm.name}", lambda: self.compare_greedy(arm, arm.name))
        if arm.name in ("plain", *SAMPLED_ARMS):
            self.attempt(f"log-probs, {arm.name}", lambda: self.compare_logps(arm))

    def attempt(self, what: str, measure: Callable[[], str]) -> None:
        """Measure and say what came of it; note it in the results if it fails or the budget is spent."""
        if time.perf_counter() - self.began > self.seconds:
            self.results["left_out"].append(what)
            return
        try:
            self.keep(f"{what}: {measure()}")
        except Exception:  # the other arms must not be lost with it
            error = traceback.format_exc(limit=-4)
            self.results["failures"].append({"arm": what, "error": error[-1500:]})
            self.keep(f"FAILED {what}\n{error}")

    def write_reference(self) -> str:
        """The plain engine's greedy texts."""
        self.reference = self.write(self.arms["plain"], self.greedy, 1)
        return f"{len(self.reference)} written"

    def compare_greedy(self, arm: Arm, name: str, at_once: int | None = None) -> str:
        """Where greedy texts part."""
        if not self.reference:
            raise RuntimeError("There are no plain texts to compare with.")
        written = self.write(arm, self.greedy, 1, at_once)
        found = divergence(self.reference, written)
        found["gaps"] = gaps(self.model, self.prompts, self.reference, written)
        self.results["greedy"].append({"arm": name, **found})
        return f"{found['parted']} of {found['texts']} part"

    def compare_logps(self, arm: Arm) -> str:
        """How log-probs agree at temperature 1."""
        group = self.setup.group_size
        prompts = [prompt for prompt in self.prompts for _ in range(group)]
        written = self.write(arm, self.setup.sampling, group)
        found = agreement(*score(self.model, prompts, written))
        self.results["logps"].append({"arm": arm.name, **found})
        return f"k3 {found['k3']:.3g} over {found['tokens']} tokens"

    def write(self, arm: Arm, sampling: Sampling, group_size: int, at_once: int | None = None) -> Written:
        """What an arm writes."""
        arguments = {"sampling": sampling, "seed": self.setup.seed, "group_size": group_size, "at_once": at_once}
        return self.engines.get(arm.engine).call("write", CALL_SECONDS, arm=arm.name, **arguments)

    def keep(self, what: str) -> None:
        """Say what was measured and write the files."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {what}", flush=True)
        save(self.out.with_suffix(".json"), self.results)
        self.out.with_suffix(".md").write_text(render(self.results))


def load_trainer(setup: Setup) -> torch.nn.Module:
    """The policy as the trainer runs it, in the engine's precision."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, setup.dtype)
    return AutoModelForCausalLM.from_pretrained(setup.policy, dtype=dtype, attn_implementation="sdpa").to(device).eval()


def render(results: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = heading("Lossless", results["about"])
    lines += greedy_section(results["greedy"]) if results["greedy"] else ["Greedy texts: not compared.", ""]
    lines += logps_section(results["logps"]) if results["logps"] else ["Log-probs: not compared.", ""]
    for failure in results["failures"]:
        lines.append(f"- {failure['arm']} failed: `{failure['error'].strip().splitlines()[-1]}`")
    if results["left_out"]:
        lines.append(f"Left out, the budget being spent: {', '.join(results['left_out'])}.")
    return "\n".join(lines) + "\n"


def greedy_section(found: Sequence[dict[str, Any]]) -> list[str]:
    """Where greedy texts part."""
    floor = next((row for row in found if "at a time" in row["arm"]), found[0])
    header = ["arm", "part from plain", "per 1,000 tokens", "first", "median place", "median gap", "largest gap"]
    rows = []
    for row in found:
        nats = row["gaps"]
        rows.append(
            [
                row["arm"],
                f"{row['parted']} of {row['texts']}",
                f"{row['per_1000_tokens']:.2f}",
                row["first"],
                row["median"],
                f"{statistics.median(nats):.3f}" if nats else None,
                f"{max(nats):.3f}" if nats else None,
                f"{excess(row, floor):+.1f}",
            ]
        )
    lines = ["## Greedy texts", "", f"Against one plain run; the floor of the noise is `{floor['arm']}`."]
    lines += ["Gaps are nats between the two tokens where texts part, by the trainer.", ""]
    return [*lines, *table([*header, "above the floor, deviations"], rows)]


def logps_section(found: Sequence[dict[str, Any]]) -> list[str]:
    """How log-probs agree."""
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
        for row in found
    ]
    return ["## Engine against trainer at temperature 1", "", *table(header, rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both checks and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--chunk", type=int, help="requests at once where the noise floor is measured: 8")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    args = parser.parse_args(arguments)
    setup = setup_of(args, sizes={"num_prompts": 64, "group_size": 4, "max_tokens": 1024})
    chunk = args.chunk if args.chunk is not None else 2 if args.rung == "tiny" else 8
    record = about(args.rung, note_of(setup.policy, args.note), args.seed)
    results: dict[str, Any] = {"about": record, "setup": vars(setup)}
    results |= {"greedy": [], "logps": [], "failures": [], "left_out": []}
    check = Check(setup, args.out / f"lossless_{args.rung}", args.seconds, chunk, results)
    try:
        check.run()
        check.keep("done")
    finally:
        check.engines.close()
    print(render(results))


if __name__ == "__main__":
    main()
