"""The wheel in an environment of its own: what it holds suffices to start a run from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment, which sees the other packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves folders behind, and takes up those of an earlier build
    for name in ("tlt_lightning", "recipes", "callbacks"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip would find this checkout
    subprocess.run([*pip, *build], check=True, env=clean)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    install = ["install", "--no-deps", "--no-index", *map(str, folder.glob("*.whl"))]
    subprocess.run([*pip, "--python", str(python), *install], check=True, env=clean)
    (site_packages,) = (folder / "venv/lib").glob("python*/site-packages")
    # Lines of a .pth are not followed further, so this checkout, where it is installed editably, stays unseen.
    (site_packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "venv"


def run(environment: Path, folder: Path, *command: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support/start")}  # which has nothing of the package
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    return subprocess.run(command, cwd=folder, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.vllm
@pytest.mark.slow
def test_a_folder_made_by_init_trains_where_nothing_else_is(environment: Path, tmp_path: Path) -> None:
    assert "\nquickstart " in run(environment, tmp_path, "tlt-lightning", "recipes")
    out = run(environment, tmp_path, "tlt-lightning", "init", "my-run", "--recipe", "quickstart")
    change, command = (line.strip() for line in out.split("\n\n")[1].splitlines())
    assert change == "cd my-run"
    tiny = {
        "trainer.max_epochs": 1,
        "trainer.num_sanity_val_steps": 0,
        "data.prompts_per_iteration": 2,
        "data.group_size": 2,
        "data.sampling.max_tokens": 8,
        "data.engine.init_args.kv_cache_gib": 0.1,
        "trainer.callbacks+": '{"class_path": "tlt_lightning.gallery.answer_variety.AnswerVariety"}',
    }
    run(environment, tmp_path / "my-run", *command.split(), *(f"--{name}={value}" for name, value in tiny.items()))
    find = "from importlib.util import find_spec; print(find_spec('tlt_lightning').origin)"
    assert Path(run(environment, tmp_path, "python", "-c", find)).is_relative_to(environment)
    rows = (tmp_path / "my-run/outputs/quickstart/csv/version_0/metrics.csv").read_text()
    assert {"reward/brevity", "reward/countdown", "rollout/variety"} <= set(rows.splitlines()[0].split(","))
