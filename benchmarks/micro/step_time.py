"""Time engine steps by batch and draft length, and the capture of graphs.

On a GPU, a model of 7B shape with random weights and an EAGLE-3 head, both made from their configurations alone:

    python -m benchmarks step_time

`--tiny` runs the same on a CPU within a minute, to see that it works. Each part runs in a process of its own. With
random weights no draft is accepted, which changes no step's cost. Parts: the `plain` engine; one with a head and the
graphs that its selector can reach (`bucketed`); one with `full`, all that vLLM would capture. `--tensor-parallel 2`
makes each an engine over two GPUs, `--quantization fp8` measures each part in 8 bit as well, and `--shape 32b` takes a
policy of Qwen2.5-32B's shape; where NVLink multicast is off, set VLLM_ALLREDUCE_USE_SYMM_MEM=0 and
VLLM_ALLREDUCE_USE_FLASHINFER=0. Each part also times a sync of random weights, and with `--sleep-cycles 50` so many
cycles of sleep, wake, sync and a short rollout, to see that memory stays flat.

Several commands may start at once on one device, each with a `--kv-gib` of its own, and take turns: with `--gate PATH`
an engine that is ready makes `PATH.ready`, and measures once there is `PATH.go`.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from benchmarks.common.arguments import parser_of
from benchmarks.common.engine import WITHOUT_WEIGHTS, BenchEngine
from benchmarks.common.full_graph_pool import FullGraphPool
from benchmarks.common.processes import run_apart
from benchmarks.common.results import about, heading, save, table
from benchmarks.common.shapes import SHAPES
from tlt_lightning.engine import RolloutProgress
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import policy_shapes
from tlt_lightning.rollout import Request, Sampling
from tlt_lightning.speculation import BucketedGraphPool
from tlt_lightning.speculation.head_files import EAGLE3
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy, StrategySelector

KS = (0, 1, 3, 5, 7)
POOLS = {"bucketed": BucketedGraphPool, "full": FullGraphPool}
PARTS = ("plain", *POOLS)
SETTLE = 12

Script = Generator[None, RolloutProgress, None]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sets the sizes of the measurement.

    Args:
        shape: The policy's configuration.
        batches: Batch sizes measured.
        context: Prompt length.
        steps: Steps timed for each cell.
        rounds: Times each cell is measured; the fastest counts.
        engine: Arguments of the engine.
        sleep_cycles: Cycles of sleep and wake after the steps.
        gate: Stem of the files by which engines that share devices take turns.
    """

    shape: dict[str, Any]
    batches: tuple[int, ...]
    context: int
    steps: int
    rounds: int
    engine: dict[str, Any]
    sleep_cycles: int = 0
    gate: str = ""


LARGE_SCALE = Scale(
    shape=SHAPES["7b"],
    batches=(1, 8, 32, 64, 128),
    context=128,
    steps=64,
    rounds=2,
    engine={"dtype": "bfloat16", "max_num_seqs": 128, "gpu_memory_utilization": 0.6, "sleep": False},
)
TINY_SCALE = Scale(
    shape=SHAPES["tiny"],
    batches=(1, 4),
    context=64,
    steps=16,
    rounds=1,
    engine={"dtype": "float32", "max_num_seqs": 4, "kv_cache_gib": 0.5, "enforce_eager": True},
)


class SetLength(StrategySelector):
    """Drafts the set number of tokens, with the arms of a selector for these batch sizes, or with all of `KS`."""

    def __init__(self, *, has_all: bool) -> None:
        self.num_draft_tokens, self.has_all = 0, has_all

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        ks = (0, 3, 5, 7) if batch_size <= 8 else (0, 1, 3, 5) if batch_size <= 32 else (0, 1, 3)
        return tuple(Strategy(k) for k in (KS if self.has_all else ks))

    @override
    def select(self, state: SelectorState) -> Strategy:
        strategy = Strategy(self.num_draft_tokens)  # at first that of the batch size before
        return strategy if strategy in self.arms(state.batch_size) else OFF


def save_configs(shape: dict[str, Any], path: Path) -> tuple[str, str]:
    """Write configurations of a policy, with a one-word tokenizer, and head, whose weights are names; return paths."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    layers = shape["num_hidden_layers"]
    head = {
        **shape,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": shape["vocab_size"],
        "target_hidden_size": shape["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
    }
    for name, config in (("policy", shape), ("head", head)):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    save_file({f"{part}.weight": torch.zeros(1) for part in EAGLE3.parts(1)}, path / "head" / "model.safetensors")
    words = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "word": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(path / "policy")
    return str(path / "policy"), str(path / "head")


def run_part(part: str, scale: Scale) -> dict[str, Any]:
    """Measure one part in this process; its name may end in a type of 8 bit."""
    part, _, quantization = part.partition(" ")
    selector, speculation = SetLength(has_all=part == "full"), None
    max_model_len = scale.context + 8 * len(KS) * scale.rounds * (SETTLE + scale.steps + 1)  # were all drafts kept
    with tempfile.TemporaryDirectory() as folder:
        policy, head = save_configs(scale.shape, Path(folder))
        if part in POOLS:
            speculation = Speculation(selector=selector, head=head, steps_per_choice=1, graph_pool=POOLS[part]())
        settings = {**scale.engine, "speculation": speculation, "quantization": quantization or None}
        engine = BenchEngine(**settings, arguments=WITHOUT_WEIGHTS)
        began = time.perf_counter()
        engine.setup(policy, max_model_len=max_model_len, seed=0)
        result: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "step_ms": {}}
        shapes = policy_shapes(policy)
        result |= sync(engine, shapes)
    pass_gate(scale.gate)
    draw = random.Random(0)
    for batch in scale.batches:
        prompts = [[draw.randrange(2, 512) for _ in range(scale.context)] for _ in range(batch)]
        requests = [Request(id=i, prompt_ids=prompt) for i, prompt in enumerate(prompts)]
        ks = (0,) if part == "plain" else [arm.num_draft_tokens for arm in selector.arms(batch)]
        script = step_times(selector, scale, batch, ks, result["step_ms"])
        engine.follow(requests, max_model_len - scale.context, script)
    if (controller := engine.inspect().controller) is not None and engine.num_ranks > 1:
        began = time.perf_counter()
        for _ in range(1000):
            controller.engine_ranks.decide(lambda: OFF)
        result["agreement_ms"] = time.perf_counter() - began
    result |= engine.describe()
    if scale.sleep_cycles:
        result["sleep_cycles"] = sleep_and_wake(engine, shapes, scale.sleep_cycles)
    engine.close()
    return result


def pass_gate(gate: str) -> None:
    """Say that this engine is ready, and wait for its turn."""
    if gate:
        Path(f"{gate}.ready").touch()
        while not Path(f"{gate}.go").exists():
            time.sleep(0.2)


def sleep_and_wake(engine: BenchEngine, shapes: Mapping[str, tuple[int, ...]], count: int) -> list[list[float]]:
    """Return of each cycle the device's GiB in use asleep and awake, and seconds of sleep, wake and sync."""
    on_gpu, cycles = torch.cuda.is_available(), list[list[float]]()
    drawn = draw_weights(shapes)

    def used() -> float:
        if not on_gpu:
            return 0.0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    for number in range(count):
        times = [time.perf_counter()]
        engine.sleep()
        asleep = used()
        times.append(time.perf_counter())
        engine.wake()
        times.append(time.perf_counter())
        engine.update_weights([(name, drawn[shape]) for name, shape in shapes.items()], number + 1)
        times.append(time.perf_counter())
        prompt = [Request(id=0, prompt_ids=[2] * 16)]
        for _ in engine.generate(prompt, Sampling(max_tokens=8), seed=number):
            pass
        cycles.append([round(each, 4) for each in (asleep, used(), *(b - a for a, b in pairwise(times)))])
    return cycles


def draw_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
    """Return a random tensor in bfloat16 for each shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {shape: 0.02 * torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in set(shapes.values())}


def sync(engine: BenchEngine, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return seconds of a second update with random weights in bfloat16, its memory beside the weights, and theirs."""
    on_gpu = torch.cuda.is_available()
    drawn = draw_weights(shapes)
    for _ in range(2):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        held, began = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
        engine.update_weights([(name, drawn[shape]) for name, shape in shapes.items()], 0)
        seconds = time.perf_counter() - began
    weights = engine.inspect().model_runner.get_model().parameters()
    return {
        "sync_seconds": seconds,
        "sync_extra_gib": (torch.cuda.max_memory_allocated() - held) / 2**30 if on_gpu else None,
        "weights_gib": sum(each.numel() * each.element_size() for each in weights) / 2**30,
    }


def step_times(selector: SetLength, scale: Scale, batch: int, ks: Sequence[int], fastest: dict[str, float]) -> Script:
    """Enter milliseconds per step of each cell into `fastest` under "batch,K"."""
    for k in [*ks] * scale.rounds:
        selector.num_draft_tokens = k
        for _ in range(SETTLE):
            yield
        began = time.perf_counter()
        for _ in range(scale.steps):
            yield
        taken = 1e3 * (time.perf_counter() - began) / scale.steps
        fastest[f"{batch},{k}"] = min(taken, fastest.get(f"{batch},{k}", taken))


def render(results: dict[str, Any], scale: Scale) -> list[str]:
    """Return the report in Markdown."""
    lines = [*heading("Step times", results["about"])]
    lines += [f"Random weights, head with the full vocabulary; ms per step, fastest of {scale.rounds} x {scale.steps}."]
    for part, error in results["failed"].items():
        lines += [f"Failed: {part}, `{error}`."]
    if "earlier" in results:
        lines += [f"Goes on from `{results['earlier']['command']}`, run apart on {results['earlier']['hardware']}."]
    lines += [f"Tensor parallel: {scale.engine.get('tensor_parallel', 1)}."]
    for part in [part for part in results if part.partition(" ")[0] in POOLS]:
        found = results[part]
        lines += ["", f"## {part.capitalize()} graph pool", "", *step_table(results, part, scale)]
        if "agreement_ms" in found:
            share = found["agreement_ms"] / min(found["step_ms"].values())
            lines += ["", f"Agreement of the ranks, in every step above: {found['agreement_ms']:.3f} ms, "]
            lines[-1] += f"{share:.1%} of the shortest."
        if found.get("graphs"):
            lines += [f"Graphs, {found['start_seconds']:.0f} s from start to ready:", "", found["graphs"], ""]
    measured = [part for part in results if part.partition(" ")[0] in PARTS and "sync_seconds" in results[part]]
    header = ["part", "weights, GiB", "sync of weights, s", "memory beside them, GiB", "KV tokens", "peak, GiB"]
    names = ("weights_gib", "sync_seconds", "sync_extra_gib", "KV tokens", "peak GiB")
    rows = [[part, *(results[part].get(name) for name in names)] for part in measured]
    lines += ["", "## Weights and memory", "", *table(header, rows)]
    return [*lines, *sleep_table(results), *speedups(results)]


def sleep_table(results: dict[str, Any]) -> list[str]:
    """Return memory and seconds of the cycles of sleep and wake, of the first ones and the last."""
    lines = ["", "## Sleep and wake", ""]
    header = ["part", "cycle", "GiB in use, asleep", "awake", "sleep, s", "wake, s", "sync, s"]
    rows = []
    for part in [part for part in results if part.partition(" ")[0] in PARTS]:
        cycles = results[part].get("sleep_cycles", [])
        numbers = sorted({1, 2, 3, len(cycles) // 2, len(cycles)} & set(range(1, len(cycles) + 1)))
        rows += [[part, number, *cycles[number - 1]] for number in numbers]
    return [*lines, *table(header, rows)] if rows else []


def speedups(results: dict[str, Any]) -> list[str]:
    """Return a table of 16-bit over 8-bit step times for each part that was measured in both."""
    rows = []
    for part in [part for part in results if " " in part]:
        wide, narrow = results.get(part.partition(" ")[0], {}).get("step_ms", {}), results[part]["step_ms"]
        for cell in [cell for cell in narrow if cell in wide]:
            rows.append([part, *cell.split(","), wide[cell], narrow[cell], wide[cell] / narrow[cell]])
    header = ["part", "batch", "K", "16 bit, ms", "8 bit, ms", "16 / 8"]
    return ["", "## 8 bit beside 16 bit", "", *table(header, rows)] if rows else []


def step_table(results: dict[str, Any], part: str, scale: Scale) -> list[str]:
    """Return rows of one pool's step times."""
    alone = " ".join(["plain", *part.split(" ")[1:]])
    plain, cells = results.get(alone, {}).get("step_ms", {}), results[part]["step_ms"]
    header = ["batch", "plain", "off", "off / plain", *(f"K={k}" for k in KS[1:])]
    rows: list[list[Any]] = []
    for batch in scale.batches:
        bare, off = plain.get(f"{batch},0"), cells[f"{batch},0"]
        times = [bare, off, bare and off / bare, *(cells.get(f"{batch},{k}") for k in KS[1:])]
        rows.append([batch, *times])
    return table(header, rows)


def main(arguments: Sequence[str]) -> None:
    """Measure all parts, each in a process of its own, and write `step_time.json` and `.md`."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--shape", choices=("1.5b", "3b", "7b", "14b", "32b"), default="7b", help="of the policy")
    parser.add_argument("--batches", nargs="+", type=int, help="requests of a step")
    parser.add_argument("--steps", type=int, help="timed of each cell")
    parser.add_argument("--kv-gib", type=float, help="of cache on each device, where engines share them")
    parser.add_argument("--sleep-cycles", type=int, default=0, help="of sleep and wake, after the steps")
    parser.add_argument("--gate", default="", help="stem of the files by which engines on one device take turns")
    parser.add_argument("--name", help="of the result files")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of an engine")
    parser.add_argument("--quantization", choices=("fp8",), help="measure each part in this type as well")
    parser.add_argument("--previous", type=Path, help="results of an earlier command, whose parts are kept")
    args = parser.parse_args(arguments)
    num_ranks, name = args.tensor_parallel, "tiny" if args.tiny else f"{args.shape} shape"
    scale = TINY_SCALE if args.tiny else replace(LARGE_SCALE, shape=SHAPES[args.shape])
    dtype = "bfloat16" if args.quantization else scale.engine["dtype"]
    engine = {**scale.engine, "dtype": dtype, "tensor_parallel": num_ranks, "sleep": bool(args.sleep_cycles)}
    if args.kv_gib:  # vLLM then asks only whether its share of the device is free
        engine |= {"kv_cache_gib": args.kv_gib, "gpu_memory_utilization": 0.05}
    sizes = {"batches": args.batches and tuple(args.batches), "steps": args.steps}
    scale = replace(scale, **{name: size for name, size in sizes.items() if size})
    scale = replace(scale, engine=engine, sleep_cycles=args.sleep_cycles, gate=args.gate)
    results: dict[str, Any] = {"about": about(name, args.note, args.seed), "tensor_parallel": num_ranks, "failed": {}}
    file = args.out / (args.name or ("step_time" if num_ranks == 1 else f"step_time_tp{num_ranks}"))
    parts = [*args.parts, *(f"{part} {args.quantization}" for part in args.parts if args.quantization)]
    if args.previous:
        earlier = json.loads(args.previous.read_text())
        results |= {"earlier": earlier["about"]} | {part: earlier[part] for part in parts if part in earlier}
    for part in [part for part in parts if part not in results]:
        try:
            results[part] = run_apart(run_part, part, scale, num_ranks=num_ranks)
        except Exception as error:  # the other parts must not be lost with it
            results["failed"][part] = f"{type(error).__name__}: {error}"
        save(file, results, render(results, scale))
    print("\n".join(render(results, scale)))
