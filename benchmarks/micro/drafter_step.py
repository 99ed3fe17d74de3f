"""Time what a head costs beside a policy: training steps and decisions, and where the device's time goes.

On a GPU, a head of random weights for a policy of 7B shape, of which only the output head and the embedding exist:

    python -m benchmarks drafter_step

Trainer, packs, judging and publishing are those of `LongTailIdleCallback`, and texts have recorded lengths. Steps are
those of a new head: "young" of packs of a quarter and drafts of 3 tokens, "whole" of half packs and whole drafts. A
decision judges the trained and the published weights by the noise of verification. Per token of a pack, operations are

    training: 4 fc + K (6 layer + 4 output) + 2 output,    judging: 2 fc + K (2 layer + 2 output) + 2 output

of the weights of the head's first projection, its layer and its output head at K drafts; the last term is the target's
own distribution. Attention counts nothing. The optimizer's part of a young step is timed by itself, too: five
Newton-Schulz iterations of each matrix of m x n weights, m <= n, 5 (4 m n + 2 m m) m operations. `--tiny` runs a small
head on a CPU.
"""

from __future__ import annotations

import gc
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.arguments import RESULTS, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.common.shapes import SHAPES
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import AcceptanceRule
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.publishing import DrafterPublisher, held_out_sample
from tlt_lightning.long_tail.trainer import DrafterTrainer
from tlt_lightning.training.memory.forecast import GIB
from tlt_lightning.training.throughput import peak_flops

NUM_DRAFTS = 7  # the longest of `CostModelSelector`
NUM_PROMPTS, GROUP_SIZE, PROMPT_LENGTH = 16, 8, 20
STEPS = {"young": 8, "optimizer": 8, "whole": 3}
MOST_KERNELS = 25
GROUPS = {  # the first that a kernel's name matches, on a CPU an operation's
    "copies from and to the host": r"htod|dtoh",
    "optimizer, norm of gradients": r"multi_tensor|adam|foreach",
    "attention": r"flash|attention",
    "losses over the vocabulary": r"loss_(for|back)ward_kernel|softmax",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitk|::mm$|::addmm$|::bmm$",
    "copies and casts": r"memcpy|memset|copy|cat|fill",
    "reductions": r"reduce|argmax|::sum$|norm|::max$",
    "other": "",
}


def recorded_lengths() -> list[int]:
    """Return the lengths of the last rollout that the benchmark `end_to_end` recorded."""
    runs = json.loads((RESULTS / "end_to_end_25m.json").read_text())["runs"]
    lengths: list[int] = [row["lengths"] for run in runs for row in run["iterations"] if "lengths" in row][-1]
    return lengths[: NUM_PROMPTS * GROUP_SIZE]


def save_target(shape: dict[str, Any], path: Path, device: torch.device) -> None:
    """Write what a drafter reads of its target: the configuration and three tensors, random."""
    rows, dtype = (shape["vocab_size"], shape["hidden_size"]), getattr(torch, shape["torch_dtype"])
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: 0.02 * torch.randn(rows, dtype=dtype, device=device) for name in names}
    (path / "config.json").write_text(json.dumps(shape))
    save_file(tensors | {"model.norm.weight": torch.ones(rows[1], dtype=dtype)}, path / "model.safetensors")


def make_texts(lengths: Sequence[int], shape: dict[str, Any], device: torch.device) -> list[PolicyText]:
    """Return random texts with random states on the host, `GROUP_SIZE` of each prompt."""
    prompts = torch.randint(shape["vocab_size"], (NUM_PROMPTS, PROMPT_LENGTH))
    texts = []
    for number, length in enumerate(lengths):
        ids = torch.cat([prompts[number // GROUP_SIZE], torch.randint(shape["vocab_size"], (length,))])
        size = (len(ids), shape["hidden_size"])
        states, last = (torch.randn(size[0], n * size[1], dtype=torch.bfloat16, device=device).cpu() for n in (3, 1))
        texts.append(PolicyText(ids, states, last, PROMPT_LENGTH))
    return texts


def build(
    target: Path, draft_vocab_size: int, buffer: DrafterBuffer, pack_tokens: int, device: torch.device
) -> DrafterTrainer:
    """Return the trainer of a new head, as the callback makes it; a reduced one drafts the lowest token ids."""
    drafter = DrafterModule(str(target), draft_vocab_size=draft_vocab_size, num_draft_tokens=NUM_DRAFTS)
    drafter.acceptance = AcceptanceRule(samples_drafts=True, shares_noise=True)
    drafter.configure_model()
    return DrafterTrainer(drafter, buffer, pack_tokens=pack_tokens, device=device)


def flops_per_token(drafter: DrafterModule, num_drafts: int, *, trains: bool) -> float:
    """Count operations of a token by the equations above."""
    head: Any = drafter.head
    layer = sum(each.weight.numel() for each in head.layers[0].modules() if isinstance(each, nn.Linear))
    fc, output = head.fc.weight.numel(), head.lm_head.weight.numel()
    once, each_draft = (4 * fc, 6 * layer + 4 * output) if trains else (2 * fc, 2 * (layer + output))
    return float(once + num_drafts * each_draft + 2 * output)


def flops_of_orthogonalization(optimizer: torch.optim.Optimizer) -> float:
    """Count operations of a step of Muon by the equation above."""
    sizes = [sorted(p.shape) for group in optimizer.param_groups for p in group["params"] if p.ndim == 2]
    return float(sum(5 * (4 * short * long + 2 * short**2) * short for short, long in sizes))


def kernels_of(run: Callable[[], object], *, on_cpu: bool) -> list[tuple[str, int, float]]:
    """Return name, calls and milliseconds of what the device does in `run`; of operations on a CPU."""
    with profile(activities=[ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA]) as profiler:
        run()
        if not on_cpu:
            torch.cuda.synchronize()
    found = []
    for event in profiler.key_averages():
        if on_cpu or (event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)):
            spent = event.self_cpu_time_total if on_cpu else event.self_device_time_total
            found.append((event.key, event.count, spent / 1e3))
    return sorted(found, key=lambda kernel: -kernel[2])


def by_group(kernels: Sequence[tuple[str, int, float]]) -> dict[str, float]:
    """Return the milliseconds of each group."""
    spent = dict.fromkeys(GROUPS, 0.0)
    for name, _, milliseconds in kernels:
        spent[next(group for group, pattern in GROUPS.items() if re.search(pattern, name.lower()))] += milliseconds
    return spent


def measure(trainer: DrafterTrainer, vocabulary: int, device: torch.device) -> list[dict[str, Any]]:
    """Time young steps, the optimizer alone, a decision and whole steps, each after a first one."""
    publisher, buffer, results = DrafterPublisher(trainer), trainer.buffer, []
    drafter, on_cpu = trainer.drafter, device.type == "cpu"

    def train(num_steps: int) -> None:
        left = iter(range(num_steps))
        trainer.begin(seed=0)
        trainer.train(lambda: next(left, None) is not None)

    def decide() -> None:
        trainer.num_pending = max(1, trainer.num_pending)
        publisher.publish_if_better()

    def step() -> None:
        for _ in range(STEPS["optimizer"]):
            trainer.optimizer.step()  # by the gradients of the last young step
        if not on_cpu:
            torch.cuda.synchronize()

    for stage in ("young", "optimizer", "decision", "whole"):
        if stage == "whole":
            trainer.note_quality(float(NUM_DRAFTS))
        trains = stage in ("young", "whole")
        run = {"optimizer": step, "decision": decide}.get(stage) or partial(train, STEPS[stage])
        judged = 2 * sum(map(len, held_out_sample(buffer.held_out)))
        tokens = STEPS[stage] * trainer.step_tokens if stage in STEPS else judged
        num_drafts = NUM_DRAFTS if stage in ("decision", "whole") else 3
        began = time.perf_counter()
        train(2) if trains else run()
        first = time.perf_counter() - began
        if not on_cpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        peak = None if on_cpu else torch.cuda.max_memory_allocated() / GIB
        kernels = kernels_of(run, on_cpu=on_cpu)
        flops = flops_of_orthogonalization(trainer.optimizer) * STEPS.get(stage, 0)
        if stage != "optimizer":
            flops += tokens * flops_per_token(drafter, num_drafts, trains=trains)
        most = peak_flops(device)
        results.append(
            {
                "vocabulary": vocabulary,
                "stage": stage,
                "drafts": num_drafts,
                "tokens": tokens,
                "first_s": first,
                "seconds": seconds,
                "us_a_token": 1e6 * seconds / tokens,
                "tflops": flops / seconds / 1e12,
                "of_peak": None if most is None else flops / seconds / most,
                "peak_gib": peak,
                "busy": sum(spent for _, _, spent in kernels) / 1e3 / seconds,
                "num_kernels": sum(count for _, count, _ in kernels),
                "groups": by_group(kernels),
                "kernels": [(name[:200], *rest) for name, *rest in kernels[:MOST_KERNELS]],
            }
        )
    return results


def report(results: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    columns = ["vocabulary", "stage", "drafts", "tokens", "first_s", "seconds", "us_a_token", "tflops", "of_peak"]
    columns += ["peak_gib", "busy", "num_kernels"]
    lines = heading("A head beside its policy", results["about"])
    lines += ["Operations a token as in `python -m benchmarks drafter_step --help`; the first run compiles.", ""]
    lines += table([name.replace("_", " ") for name in columns], [[row[n] for n in columns] for row in results["rows"]])
    lines += ["Microseconds of the device a token, by group of kernels; the rest of a token's time it waits.", ""]
    header = ["group", *(f"{row['vocabulary']}, {row['stage']}" for row in results["rows"])]
    spent = [[group, *(1e3 * row["groups"][group] / row["tokens"] for row in results["rows"])] for group in GROUPS]
    return lines + table(header, spent)


def main(arguments: Sequence[str]) -> None:
    """Measure each draft vocabulary, and write `drafter_step.json` and `.md`."""
    parser = parser_of(__doc__)
    parser.add_argument("--draft-vocab-sizes", nargs="+", type=int, help="32,000 and all of the policy's by default")
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    name = "tiny" if args.tiny else "7b"
    device, shape = torch.device("cpu" if args.tiny else "cuda"), SHAPES[name]
    lengths = [min(length // 16 + 3, 200) if args.tiny else length for length in recorded_lengths()]
    buffer = DrafterBuffer(max_bytes=4 * GIB)
    buffer.add(make_texts(lengths, shape, device))
    results: dict[str, Any] = {"about": about(f"{name} shape", args.note, args.seed, on_cpu=args.tiny), "rows": []}
    with tempfile.TemporaryDirectory() as path:
        save_target(shape, Path(path), device)
        for vocabulary in args.draft_vocab_sizes or ([128, 512] if args.tiny else [32000, shape["vocab_size"]]):
            trainer = build(Path(path), vocabulary, buffer, 512 if args.tiny else 4096, device)
            results["rows"] += measure(trainer, vocabulary, device)
            save(args.out / "drafter_step", results, report(results))
            del trainer
            gc.collect()  # or the next peak would have its weights
    print("\n".join(report(results)))
