"""Forecast what the recipes for several GPUs take of each GPU's memory, as a run does before it loads anything. No GPU.

    python -m benchmarks forecast

Policies are known by their shapes alone. GPUs are free: 79.6 GiB of one with 80 GB, 139.8 of one with 141 GB.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.arguments import ASSETS, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.common.shapes import SHAPES
from tlt_lightning.commands.cli import run_cli
from tlt_lightning.commands.starter import RECIPES, read_recipes
from tlt_lightning.training.memory.forecast import GIB
from tlt_lightning.training.memory.pass_size import choose_passes, pass_sizes, run_passes

GPU_GIB = {80: 79.6, 141: 139.8}


class Case(NamedTuple):
    """Names a recipe, the shape of its policy, and the GPUs that it is run on."""

    recipe: str
    shape: str
    num_gpus: int
    gpu_gb: int


CASES = (
    Case("grpo_qwen2.5-7b_fsdp2", "7b", 2, 141),
    Case("grpo_qwen2.5-7b_fsdp2", "7b", 4, 80),
    Case("grpo_qwen2.5-14b_fsdp2", "14b", 4, 141),
    Case("grpo_qwen2.5-14b_fsdp2", "14b", 8, 80),
    Case("grpo_qwen2.5-32b_lora_tp2", "32b", 4, 80),
)


def forecast_of(case: Case, folder: Path) -> dict[str, Any]:
    """Return what a recipe's run would take of each GPU, in GiB, and the tokens of a pass that it would choose."""
    files = [word for name in read_recipes()[case.recipe].files for word in ("-c", str(RECIPES / name))]
    prompts = [word for name in ("train", "val") for word in (f"--data.{name}.path", str(ASSETS / f"{name}.jsonl"))]
    cpu = ["--trainer.devices", str(case.num_gpus), "--trainer.accelerator", "cpu"]
    with warnings.catch_warnings(action="ignore"):  # of arguments beside those of this command
        cli: Any = run_cli([*files, *prompts, *cpu, "--trainer.default_root_dir", str(folder)], run=False)
    module, data, room = cli.model, cli.datamodule, GPU_GIB[case.gpu_gb] * GIB
    module.policy_path = str(folder)
    (folder / "config.json").write_text(json.dumps(SHAPES[case.shape]))
    longest = data.max_prompt_tokens + data.sampling.max_tokens
    sizes = pass_sizes(data.micro_batch_tokens, longest, on_gpu=True)
    candidates = run_passes(cli.trainer, module, sizes, longest=longest)
    engine = data.engine.planned_memory(str(folder), max_model_len=longest, device_bytes=room)
    sleeps = data.engine.sleeps
    passes, planned = choose_passes(module, candidates, room, free=room, engine=engine, engine_sleeps=sleeps)
    assert planned is not None
    parts = {**planned.held, **planned.activations, "optimizer step": planned.step, **planned.engine}
    return {
        **case._asdict(),
        "micro_batch_tokens": passes.micro_batch_tokens,
        "update": planned.update / GIB,
        "rollout": planned.rollout / GIB,
        "parts": {name: size / GIB for name, size in parts.items()},
    }


def report(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    rows = results["runs"]
    names = list(dict.fromkeys(name for row in rows for name in row["parts"]))
    header = ["recipe", "GPUs", "tokens of a pass", "update, at its worst", "rollout", *names]
    cells = []
    for row in rows:
        sizes = [row["update"], row["rollout"], *(row["parts"].get(name) for name in names)]
        shown = [None if size is None else f"{size:.1f}" for size in sizes]
        gpus = f"{row['num_gpus']} x {row['gpu_gb']} GB"
        cells.append([f"`{row['recipe']}`", gpus, f"{row['micro_batch_tokens']:,}", *shown])
    return [*heading("Memory that recipes take, forecast", results), "GiB of each GPU.\n", *table(header, cells)]


def main(arguments: Sequence[str]) -> None:
    """Forecast all recipes and write `forecast.json` and `.md`."""
    args = parser_of(__doc__).parse_args(arguments)
    results = about("recipes", args.note, args.seed, on_cpu=True)
    results["runs"] = []
    for case in CASES[:1] if args.tiny else CASES:
        with tempfile.TemporaryDirectory() as folder:
            results["runs"].append(forecast_of(case, Path(folder)))
    save(args.out / "forecast", results, report(results))
    print("\n".join(report(results)))
