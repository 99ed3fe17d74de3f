"""What an engine step costs, by batch and draft length; what graphs take; what switching speculation on costs.

On a GPU, a model of 7B shape with random weights and an EAGLE-3 head, both made from their configurations alone:

    python -m benchmarks step_time --out results

`--tiny` runs the same on a CPU within a minute, to see that it works. Each part runs in a process of its own. With
random weights no draft is accepted, which changes no step's cost; tokens per second are given for an assumed
acceptance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks.common.engines import Enough, UnsyncedEngine
from benchmarks.common.results_file import about, heading
from benchmarks.micro.step_time_scales import LARGE, TINY, Scale
from tlt_lightning.engine import Request, RolloutProgress, Sampling
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.speculation import BucketedGraphPool, FullGraphPool, GraphPlan
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy, StrategySelector

KS = (0, 1, 3, 5, 7)
PARTS = ("plain", "bucketed", "full", "unsplit")


class Dial(StrategySelector):
    """Drafts as many tokens as it is set to; its arms are those a selector for these batch sizes would have."""

    def __init__(self) -> None:
        self.num_draft_tokens = 0

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        ks = (3, 5, 7) if batch_size <= 8 else (1, 3, 5) if batch_size <= 32 else (1, 3)
        return (OFF, *map(Strategy, ks))

    @override
    def select(self, state: SelectorState) -> Strategy:
        return Strategy(self.num_draft_tokens) if self.num_draft_tokens else OFF

    @override
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        pass


class UnsplitPool(FullGraphPool):
    """The shapes of `BucketedGraphPool` with vLLM's own 32 splits of the context: tells what the splits take."""

    @override
    def plan(self, *args: Any, **kwargs: Any) -> GraphPlan:
        return BucketedGraphPool().plan(*args, **kwargs)


class DummyEngine(UnsyncedEngine):
    """An engine whose weights are random: only what its steps cost can be asked of it."""

    def _engine_args(self, policy: str, max_model_len: int, seed: int) -> Any:
        return replace(
            super()._engine_args(policy, max_model_len, seed), load_format="dummy", enable_prefix_caching=False
        )


def save_configs(scale: Scale, path: Path) -> tuple[str, str]:
    """Write the configurations of a policy and of a head for it; their paths."""
    head = {
        **scale.shape,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": scale.shape["vocab_size"],
        "target_hidden_size": scale.shape["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": [
            1,
            scale.shape["num_hidden_layers"] // 2,
            scale.shape["num_hidden_layers"] - 1,
        ],
    }
    for name, config in (("policy", scale.shape), ("head", head)):
        (path / name).mkdir(parents=True, exist_ok=True)
        (path / name / "config.json").write_text(json.dumps(config))
    save_tokenizer(path / "policy")
    return str(path / "policy"), str(path / "head")


def save_tokenizer(path: Path) -> None:
    """A tokenizer of nothing but an end: the engine wants to know which token ends a response."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(path)


@contextmanager
def started(scale: Scale, speculation: Callable[[str], Speculation] | None) -> Iterator[tuple[DummyEngine, float]]:
    """A live engine and the seconds it took to start."""
    with tempfile.TemporaryDirectory() as directory:
        policy, head = save_configs(scale, Path(directory))
        engine = DummyEngine(**scale.engine, speculation=None if speculation is None else speculation(head))
        began = time.perf_counter()
        engine.setup(policy, max_model_len=2 * scale.context, seed=0)
        if (controller := engine.inspect().controller) is not None:
            controller.alarm.window = 10**12  # a random head is meant to fail
        try:
            yield engine, time.perf_counter() - began
        finally:
            engine.close()


def decode(engine: DummyEngine, scale: Scale, batch: int, length: int, script: Iterator[None]) -> None:
    """Decode `batch` requests after prompts of `length` tokens; after each step `script` moves on, until it ends."""
    draw = random.Random(0)
    prompts = [[draw.randrange(2, scale.shape["vocab_size"]) for _ in range(length)] for _ in range(batch)]
    requests = [Request(id=i, prompt_ids=prompt) for i, prompt in enumerate(prompts)]

    def on_progress(progress: RolloutProgress) -> None:
        is_decoding = progress.running == batch and progress.tokens >= batch
        if is_decoding and next(script, "end") == "end":
            raise Enough

    sampling = Sampling(max_tokens=2 * scale.context - length)
    try:
        for _ in engine.generate(requests, sampling, seed=0, on_progress=on_progress):
            pass
        raise RuntimeError(
            f"The rollout ended before it was measured; {batch} requests of {length} tokens are too short."
        )
    except Enough:
        pass


def step_times(
    engine: DummyEngine, scale: Scale, dial: Dial | None, cells: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """Milliseconds per step of each cell (batch, K)."""
    fastest: dict[str, float] = {}

    def script(batch: int, ks: list[int]) -> Iterator[None]:
        for _ in range(scale.rounds):
            for k in ks:
                if dial is not None:
                    dial.num_draft_tokens = k
                for _ in range(12):
                    yield
                began = time.perf_counter()
                for _ in range(scale.steps):
                    yield
                taken = 1e3 * (time.perf_counter() - began) / scale.steps
                fastest[f"{batch},{k}"] = min(taken, fastest.get(f"{batch},{k}", taken))

    for batch in scale.batches:
        ks = [k for size, k in cells if size == batch]
        decode(engine, scale, batch, min(128, scale.context), script(batch, ks))
    return fastest


def switch_costs(engine: DummyEngine, scale: Scale, dial: Dial, k: int = 3, settle: int = 6) -> dict[str, float]:
    """Milliseconds that switching on costs beyond steps that were on before, by running requests."""
    costs: dict[str, float] = {}

    def script(batch: int) -> Iterator[None]:
        excess = []
        for _ in range(4 * scale.rounds):
            dial.num_draft_tokens = 0
            for _ in range(30):  # leaves a nearly full backlog
                yield
            dial.num_draft_tokens = k
            began = time.perf_counter()
            for _ in range(settle):
                yield
            switching = time.perf_counter() - began
            began = time.perf_counter()
            for _ in range(2 * settle):
                yield
            excess.append(1e3 * (switching - (time.perf_counter() - began) / 2))
        costs[str(batch)] = statistics.median(excess)

    for batch in scale.switch_batches:
        decode(engine, scale, batch, scale.context, script(batch))
    return costs


def measure_plain(scale: Scale) -> dict[str, Any]:
    """The engine without speculation."""
    with started(scale, None) as (engine, seconds):
        cells = [(batch, 0) for batch in scale.batches]
        return {"start_seconds": seconds, "step_ms": step_times(engine, scale, None, cells)}


def measure_speculative(scale: Scale, pool: Any, *, all_cells: bool) -> dict[str, Any]:
    """The engine with a head; with `all_cells` every K at every batch size, else those the selector can reach."""
    dial = Dial()

    def speculation(head: str) -> Speculation:
        return Speculation(selector=dial, head=head, max_draft_tokens=max(KS), steps_per_choice=1, graph_pool=pool)

    with started(scale, speculation) as (engine, seconds):
        reachable = {batch: {arm.num_draft_tokens for arm in dial.arms(batch)} for batch in scale.batches}
        cells = [(batch, k) for batch in scale.batches for k in KS if all_cells or k in reachable[batch]]
        result: dict[str, Any] = {"start_seconds": seconds, "step_ms": step_times(engine, scale, dial, cells)}
        graphs = engine.inspect().graphs
        if graphs is not None:
            report = graphs.report()
            result |= {"graph_mib": report.mib, "graph_seconds": report.seconds, "table": graphs.plan.table(report)}
            result["hits"] = dict(graphs.hits)
        if not all_cells:
            result["switch_ms"] = {"deferred": switch_costs(engine, scale, dial)}
            drafter: Any = engine.inspect().speculative_runner.drafter  # type: ignore[union-attr]
            backlog, drafter.backlog = drafter.backlog, None
            drafter._defers = False
            result["switch_ms"]["reprefill"] = switch_costs(engine, scale, dial)
            drafter.backlog, drafter._defers = backlog, True
            owner = getattr(drafter, "speculator", None) or drafter.drafter
            owner.propose = drafter._propose  # vLLM as it is: the head runs in every step
            off = [(batch, 0) for batch in scale.batches]
            result["every_step_ms"] = step_times(engine, scale, dial, off)
            result["switch_ms"]["every step"] = switch_costs(engine, scale, dial)
        return result


def run_part(part: str, scale: Scale) -> dict[str, Any]:
    """Measure one part in this process."""
    if part == "plain":
        return measure_plain(scale)
    if part == "full":
        return measure_speculative(scale, FullGraphPool(), all_cells=True)
    return measure_speculative(scale, BucketedGraphPool() if part == "bucketed" else UnsplitPool(), all_cells=False)


def render(results: dict[str, Any], scale: Scale) -> str:
    """The report in Markdown."""
    lines = [*heading("Step times", results["about"])]
    lines += [f"Random weights, head with the full vocabulary; ms per step, fastest of {scale.rounds} x {scale.steps}."]
    lines += ["Rates are bounds, not measured: as if every step kept 4 tokens a request, with K=3 all drafts."]
    if failed := results.get("failed"):
        lines += [f"Failed: {', '.join(failed)}."]
    parts = [part for part in PARTS[1:] if part in results]
    for part in parts:
        lines += [f"\n## {part.capitalize()} graph pool\n", *step_table(results, part, scale)]
        if table := results[part].get("table"):
            lines += [f"\nGraphs, {results[part]['start_seconds']:.0f} s from start to ready:\n", table]
    mib = {part: sum(results[part].get("graph_mib", {}).values()) for part in parts}
    if any(mib.values()):
        lines += ["\nGraph memory: " + ", ".join(f"{part} {value:.0f} MiB" for part, value in mib.items()) + "."]
    if switches := results.get("bucketed", {}).get("switch_ms"):
        lines += [f"\n## Switching on, {scale.context} tokens of context: ms beyond steps that were on before\n"]
        lines += [
            "Steps under way when it is switched are still off, on a GPU two: a switch that costs nothing reads as"
        ]
        lines += ["minus twice what a step with K=3 costs beyond one that is off.\n"]
        lines += ["| running | " + " | ".join(switches) + " |", "|" + "---|" * (1 + len(switches))]
        for batch in scale.switch_batches:
            lines += [f"| {batch} | " + " | ".join(f"{costs[str(batch)]:.2f}" for costs in switches.values()) + " |"]
    return "\n".join(lines) + "\n"


def step_table(results: dict[str, Any], part: str, scale: Scale, accepted: int = 4) -> list[str]:
    """Rows of one pool's step times; `accepted` tokens a step are assumed for the rates, of K=3 all there can be."""
    plain = results.get("plain", {}).get("step_ms", {})
    every = results[part].get("every_step_ms", {})  # in the same process, or it would be no comparison
    cells = results[part]["step_ms"]
    header = ["batch", "plain", "off", "off / plain", "off, head in every step", *(f"K={k}" for k in KS[1:])]
    header += [f"at best tok/s, {accepted} a step", "over plain"]
    rows = [header, ["---"] * len(header)]
    for batch in scale.batches:
        alone, off = plain.get(f"{batch},0"), cells[f"{batch},0"]
        times = [
            alone,
            off,
            alone and off / alone,
            every.get(f"{batch},0"),
            *(cells.get(f"{batch},{k}") for k in KS[1:]),
        ]
        rates = {k: 1e3 * batch * min(k + 1, accepted) / cells[f"{batch},{k}"] for k in KS if f"{batch},{k}" in cells}
        best = max(rates, key=lambda k: rates[k])
        row = ["-" if value is None else f"{value:.4g}" for value in times]
        gain = f"{rates[best] * alone / 1e3 / batch:.2f}" if alone else "-"
        rows.append([str(batch), *row, f"{rates[best]:,.0f} (K={best})", gain])
    return ["| " + " | ".join(row) + " |" for row in rows]


def main() -> None:
    """Measure all parts, each in a process of its own, and write `step_time.json` and `step_time.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"), help="directory of the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:3]), help="what to measure")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale, out = TINY if arguments.tiny else LARGE, Path(arguments.out)
    if arguments.part:
        print("RESULT " + json.dumps(run_part(arguments.part, scale)))
        return
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"about": about("tiny" if arguments.tiny else "7b shape", "", 0), "failed": []}
    for part in arguments.parts:
        command = [sys.executable, "-m", __spec__.name, "--part", part, *(["--tiny"] if arguments.tiny else [])]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        found = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
        if not found:
            print(
                f"Part {part!r} failed (exit status {finished.returncode}).\n{finished.stdout[-2000:]}", file=sys.stderr
            )
            results["failed"].append(part)
            continue
        results[part] = json.loads(found[-1].removeprefix("RESULT "))
        (out / "step_time.json").write_text(json.dumps(results, indent=1))
        (out / "step_time.md").write_text(render(results, scale))
    print(render(results, scale))


if __name__ == "__main__":
    main()
