"""The house: who imports whom, how large a folder gets, and that docs/architecture.md says so."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tlt_lightning"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if "gallery" not in path.parts  # a link to the researchers' callbacks/, which import public names alone
}
# From the ground up; a room is a folder or a file of the package's root. Arrows go down or stay on their floor.
FLOORS = [
    {"arguments", "seeds", "replacing", "ranks", "host_copy"},
    {"speculation"},
    {"rollout"},
    {"fused"},
    {
        "policy",
        "adapters",
        "model_files",
        "packed_pass",
        "sharding",
        "hidden_states",
        "objectives",
        "rewards",
        "environments",
    },
    {"engine"},
    {"hooks", "metrics", "checks", "training", "schedules"},
    {"guard", "callbacks"},
    {"module"},
    {"data", "tasks"},
    {"drafter"},
    {"long_tail"},
    {"gallery", "testing"},
    {"commands", "__main__"},
]
MAX_FILES = 14


def imports_of(path: Path, *, lazy: bool, for_types: bool = False) -> set[str]:
    """Modules that a file imports at its top level, with `lazy` anywhere, with `for_types` also for type checkers."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not for_types:
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module is not None:
                names = (f"{child.module}.{alias.name}" for alias in child.names)
                found.update(name if name in MODULES else child.module for name in names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def floor(module: str) -> int:
    room = module.split(".")[1]
    levels = [level for level, rooms in enumerate(FLOORS) if room in rooms]
    assert len(levels) == 1, f"give {room} a floor in FLOORS and in docs/architecture.md"
    return levels[0]


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: imports_of(path, lazy=False) & MODULES.keys() - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_room_imports_itself_in_a_circle_not_even_for_type_checkers() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        targets = imports_of(path, lazy=True, for_types=True) & MODULES.keys() - {"tlt_lightning"}
        room = name.removeprefix("tlt_lightning").partition(".")[2].partition(".")[0]
        graph.setdefault(room, set()).update({target.split(".")[1] for target in targets} - {room})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of rooms: {' <- '.join(error.args[1])}")


def test_imports_run_down() -> None:
    up = set()
    for name, path in MODULES.items():
        for target in imports_of(path, lazy=True) & MODULES.keys():
            if "tlt_lightning" not in {name, target} and floor(target) > floor(name):
                up.add((name, target))
    assert sorted(up) == []


def test_every_room_has_a_clause_in_the_docs() -> None:
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    rooms = {path.stem if path.is_file() else f"{path.name}/" for path in PACKAGE.iterdir()}
    missing = {room for room in rooms if not room.startswith("__") and room not in tree.replace(".py", "").split()}
    assert missing - {"py"} == set()


def test_only_the_engine_room_of_vllm_imports_vllm() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES.values()
        if any(name.split(".")[0] == "vllm" for name in imports_of(path, lazy=True))
    }
    assert found
    assert {path for path in found if not path.startswith("engine/vllm/")} == set()


def test_speculation_loads_neither_vllm_nor_torch() -> None:
    modules = sorted(name for name in MODULES if name.startswith("tlt_lightning.speculation"))
    code = f"import sys, {', '.join(modules)}; print([name for name in ('torch', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("top", ["tlt_lightning", "benchmarks", "tests"])
def test_no_folder_has_more_files_than_one_remembers(top: str) -> None:
    folders = {path.parent for path in (ROOT / top).rglob("*.py")}
    files = {folder: [path for path in folder.glob("*.py") if path.stem != "__init__"] for folder in folders}
    crowded = {str(folder.relative_to(ROOT)): len(names) for folder, names in files.items() if len(names) > MAX_FILES}
    assert crowded == {}
