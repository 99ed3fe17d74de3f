"""Tests and benchmarks that no machine of the CI runs name what there is."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tlt_lightning

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
MODULES = {module.name for module in pkgutil.walk_packages(tlt_lightning.__path__, "tlt_lightning.")}


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each module of the package that a file imports from or reads attributes of, with the name in it."""
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tlt_lightning":
            for alias in node.names:
                if (whole := f"{node.module}.{alias.name}") in MODULES:
                    modules[alias.asname or alias.name] = whole
                else:
                    yield str(node.module), alias.name
    local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in modules and name not in local:
                yield modules[name], node.attr


@pytest.mark.slow
def test_what_tests_and_benchmarks_take_from_the_package_exists() -> None:
    named = {(f"{path.relative_to(ROOT)}: {module}", module, name) for path in FILES for module, name in names_of(path)}
    missing = [f"{place}.{name}" for place, module, name in sorted(named) if not has(module, name)]
    assert not missing


def has(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or f"{module}.{name}" in MODULES
