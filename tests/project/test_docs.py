"""Documents keep their word: links lead somewhere, code runs, names exist."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields
from importlib import import_module
from inspect import isabstract
from io import StringIO
from pathlib import Path
from typing import Any

import nbformat
import pytest
from datasets import Dataset
from nbclient import NotebookClient

import tlt_lightning
from tests.support.ranks.rank_processes import with_root
from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import RewardTerm, Sampling, objectives, testing
from tlt_lightning.__main__ import main
from tlt_lightning.commands.cli import run_cli
from tlt_lightning.engine import usual
from tlt_lightning.speculation import SelectorState

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GALLERY = ROOT / "callbacks"
FOLDERS = ("docs", "tlt_lightning", "recipes", "benchmarks")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
SOURCE = "\n".join(path.read_text() for path in (ROOT / "tlt_lightning").rglob("*.py"))


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*/README.md"), GALLERY / "README.md"]
BLOCK = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?m)^ *((?:python -m tlt_lightning|tlt-lightning|pip install|make) .*)")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_the_first_pages_stay_short() -> None:
    assert len(README.splitlines()) <= 100
    assert len((ROOT / "docs/results.md").read_text().split()) <= 1800


def test_a_number_of_the_readme_is_in_the_table_of_results_with_all_that_it_hangs_on() -> None:
    table = (ROOT / "docs/results.md").read_text().split("\n\n")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert [row for row in rows if len(row) != 7 or not all(row)] == []
    told = re.findall(r"(\d\.\d+)x", README.split("## Install")[0])
    measured = [float(number) for number in re.findall(r"(\d\.\d+)x", " ".join(row[1] for row in rows))]
    assert len(told) >= 4
    assert [number for number in told if not any(f"{each:.{len(number) - 2}f}" == number for each in measured)] == []


@pytest.mark.slow
@pytest.mark.parametrize("has_vllm", [False, pytest.param(True, marks=pytest.mark.vllm)])
def test_the_six_lines_of_the_readme_train_and_show_the_reward(
    has_vllm: bool, policy_path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if not has_vllm:
        monkeypatch.setattr(usual.importlib.util, "find_spec", lambda name: None)
    code = python_blocks(README)[0].replace("Qwen/Qwen2.5-0.5B-Instruct", policy_path)
    code = code.replace("L.Trainer(max_epochs=10)", "L.Trainer(max_epochs=1, accelerator='cpu')")
    code = code.replace("rewards=[right]", "rewards=[right], sampling=Sampling(max_tokens=8)")
    names: dict[str, Any] = {"Sampling": Sampling}
    exec(code, names)
    texts = ("It is 4.", "4", "3 4 5", "14", "")
    assert [names["right"]("", text, {"answer": "4"}) for text in texts] == [1, 1, 0, 0, 0]
    assert "iteration 1/1  reward " in capfd.readouterr().out
    assert (tmp_path / "outputs/report.html").is_file()


def test_your_own_callback_reward_and_selector_run(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {}
    exec(python_blocks(README)[1], own)
    assert own["Tail"](5).select(SelectorState(batch_size=17)).is_off
    assert own["Tail"](5).select(SelectorState(batch_size=16)).num_draft_tokens == 5
    (reward,) = (code for _, title, code in BLOCK.findall(README) if title == "my_reward.py")
    exec(reward, own)
    row = {"answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
    texts = (r"It is $\boxed{42}$.", r"\boxed{142}", "42", r"\boxed{41} \boxed{42} \boxed{43}")
    assert [own["right"]("", text, row) for text in texts] == [1, 0, 0, 0]

    data = make_data(prompts_path, rewards=[RewardTerm(function=own["right"])])
    trainer = make_trainer(tmp_path, own["Longest"](), max_epochs=1)
    trainer.fit(make_module(policy_path), data)
    assert trainer.callback_metrics.keys() >= {"rollout/longest", "reward/right"}


def test_the_plugins_of_the_docs_keep_their_duties(
    policy_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own: dict[str, Any] = {}
    for page in ("your_plugins.md", "your_reward.md"):
        for _, title, code in BLOCK.findall((ROOT / "docs" / page).read_text()):
            if title.endswith(".py"):
                (tmp_path / title).write_text(code)
                monkeypatch.setitem(sys.modules, title.removesuffix(".py"), None)  # so that it is forgotten later
                del sys.modules[title.removesuffix(".py")]
                own |= vars(import_module(title.removesuffix(".py")))
    for name in ("test_my_selector", "test_my_rewards"):
        own[name]()
    for callback in (own["Patience"](), own["Cooling"](), own["Digits"]()):
        testing.check_callback(callback, policy_path)
    testing.check_selector(own["LongContexts"]())
    testing.check_objective(own["WeightedGRPO"]())
    testing.check_objective(own["Reinforce"]())
    testing.check_objective(objectives.GRPO(advantage=own["AboveMean"]()))
    testing.check_schedule(own["OneWaits"]())
    assert [own["EarlyOnly"](2).decide(iteration, None) for iteration in (0, 1, 2)] == [0.2, 0.2, None]


def test_the_loss_of_the_docs_does_not_hang_on_micro_batches(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    page, names = (ROOT / "docs/your_plugins.md").read_text(), {"__name__": "my_loss"}
    exec(next(code for _, title, code in BLOCK.findall(page) if title == "my_loss.py"), names)
    losses = []
    for tokens in (24, 512):
        data = make_data(prompts_path, micro_batch_tokens=tokens, num_minibatches=1)
        trainer = make_trainer(tmp_path, max_epochs=1)
        trainer.fit(make_module(policy_path, objective=names["Reinforce"](bonus=0.1)), data)  # type: ignore[operator]
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] < 0  # the bonus


@pytest.mark.parametrize("document", ["docs/architecture.md", "docs/vllm.md"])
def test_files_and_names_that_the_docs_show_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    files = re.findall(r"(?<![\w/])([a-z0-9_]+(?:/[a-z0-9_]+)*\.py)", text)
    roots = (ROOT, ROOT / "tlt_lightning", ROOT / "tlt_lightning/engine/vllm")
    assert [file for file in files if not any((root / file).exists() for root in roots)] == []
    shown = " ".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    names = set(re.findall(r"\b(?:[A-Z][a-z]+(?:[A-Z]\w*)|[a-z]+(?:_[a-z0-9]+)+|[A-Z]{4,})\b", shown))
    unknown = {name for name in names if not re.search(rf"\b{name}\b", SOURCE)}
    assert unknown - {path.stem for top in ("tlt_lightning", "tests") for path in (ROOT / top).rglob("*.py")} == set()


def test_every_repair_of_vllm_has_a_row_in_the_docs() -> None:
    text = (ROOT / "docs/vllm.md").read_text()
    files = [
        path for path in (ROOT / "tlt_lightning/engine/vllm/patches").glob("*.py") if "PATCH = " in path.read_text()
    ]
    assert len(files) > 5
    assert [path.name for path in files if f"| `patches/{path.name}` |" not in text] == []


def test_every_metric_that_the_package_logs_is_in_the_docs() -> None:
    code = re.sub(r"(?m)^ *(?:>>>|\.\.\.) .*", "", SOURCE)  # examples log names of their own, as the gallery does
    rooms = "rollout|reward|speculation|schedule|idle|train|mismatch|drafter"
    logged = {re.sub(r"\{.*?\}", "<>", name) for name in re.findall(rf'"((?:{rooms})/[a-z{{][\w{{}} +]*)"', code)}
    assert len(logged) > 60
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("metrics.md", "schedules.md"))
    shown = {re.sub(r"<.*?>", "<>", name) for name in re.findall(r"`([\w/<>]+)`", pages)}
    shown |= {f"drafter/{name}" for name in shown}
    made_of_parts = {"speculation/<>_<>", "rollout/length_p<>", "drafter/<>"}  # whose results are shown one by one
    elsewhere = {
        "mismatch/is_weight_square",
        "mismatch/surprise_square",
        "rollout/variety",
    }  # taken out before logging; the gallery's
    assert logged - shown - made_of_parts - elsewhere == set()


def test_the_page_on_objectives_names_all_of_them_and_what_exists() -> None:
    page = (ROOT / "docs/objectives.md").read_text()
    rows = [re.findall(r"`(.*?)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| ")]
    named = {name for name, each in vars(objectives).items() if isinstance(each, type) and not isabstract(each)}
    whole = {name for name in named if issubclass(vars(objectives)[name], objectives.PolicyObjective)}
    assert {row[0] for row in rows if row and row[0] in named} == whole - {"ComposedObjective"}

    metrics = (ROOT / "docs/metrics.md").read_text()
    shown = re.findall(r"`((?:rollout|reward|train|mismatch)/\w+)`", page)
    assert [name for name in shown if f"`{name}`" not in metrics] == []

    trl, ours = ["".join(cells) for cells in zip(*_columns(page, "TRL 1.16"), strict=True)]
    config = pytest.importorskip("trl").GRPOConfig
    known = {item.name for item in fields(config)} | {"dr_grpo", "sequence_mask"}
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", trl)) - known == set()
    words = re.findall(r"\w+", " ".join(re.findall(r"`(.*?)`", ours)))
    assert [word for word in words if not re.search(rf"\b{word}\b", SOURCE)] == []


def _columns(page: str, title: str) -> list[tuple[str, str]]:
    """Return the first and the last cell of each row of the table whose first column has the title."""
    table = page[page.index(f"| {title}") :].split("\n\n")[0]
    return [(cells[1], cells[-2]) for cells in (line.split("|") for line in table.splitlines()[2:])]


def test_a_file_and_a_reward_of_verl_are_taken_as_the_docs_say(tmp_path: Path) -> None:
    page = (ROOT / "docs/your_reward.md").read_text()
    names: dict[str, Any] = {}
    exec(next(code for _, title, code in BLOCK.findall(page) if title == "verl_rewards.py"), names)
    written = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0},
    }
    Dataset.from_list([written]).to_parquet(tmp_path / "train.parquet")
    source = names["source"](str(tmp_path / "train.parquet"))
    (row,) = source.read()
    assert source.messages(row) == written["prompt"]
    terms = [RewardTerm(function=names[name]) for name in ("verl", "right")]
    assert [term.function("What is 2 + 3?", "It is $5$", row) for term in terms] == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Python, instantiate YAML on top of the quickstart, parse commands; each sees what stood before it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "mine.yaml").write_text("seed_everything: 1\n")
    (tmp_path / "games" / "bin").mkdir(parents=True)  # the Python of `verifiers`
    python = tmp_path / "games" / "bin" / "python"
    program = f'{sys.executable} {ROOT / "tests/support/verifiers_script.py"} "$3" "$4"'
    python.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {program}\n")
    python.chmod(0o755)
    names: dict[str, Any] = {}
    text = page.read_text()
    for language, title, code in BLOCK.findall(text):
        if language == "python" and (title or page.parent != ROOT):  # the README's others have tests of their own
            (tmp_path / (title or "snippet.py")).write_text(code)
            monkeypatch.setitem(sys.modules, (title or "").removesuffix(".py"), None)  # so that it is forgotten later
            del sys.modules[(title or "").removesuffix(".py")]
            exec(compile(code, str(page), "exec"), names)
        if language == "yaml":
            (tmp_path / "snippet.yaml").write_text(code)
            files = ("recipes/quickstart.yaml", "snippet.yaml")
            run_cli([*(word for file in files for word in ("-c", file)), "--trainer.accelerator=cpu"], run=False)
    for line in COMMAND.findall(text):
        for command in line.split("  #")[0].split(" && "):
            check_command(shlex.split(command), monkeypatch)


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command of this package, or run it where it is cheap; look up what `make` and `pip` are asked for."""
    match words:
        case ["make", target]:
            assert f"\n{target}: " in (ROOT / "Makefile").read_text()
        case ["pip", "install", *rest]:
            extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
            assert extras
            assert set(",".join(extras).split(",")) <= EXTRAS.keys()
        case ["tlt-lightning", *arguments] | ["python", "-m", "tlt_lightning", *arguments]:
            status: int | None = None
            if arguments[0] in ("fit", "validate", "predict", "drafter"):
                arguments, status = [*arguments, "--print_config"], 0  # parses, prints and exits
            elif arguments[0] == "export":
                status = 2  # parses, and then finds no checkpoint
            monkeypatch.setattr(sys, "argv", ["tlt_lightning", *arguments])
            with (
                nullcontext() if status is None else pytest.raises(SystemExit) as raised,
                redirect_stderr(StringIO()) as said,
            ):
                main()
            assert status is None or (raised.value.code or 0) == status  # type: ignore[union-attr]
            assert status != 2 or "does not exist" in said.getvalue()


def test_every_language_of_a_snippet_is_checked() -> None:
    languages = {language for page in PAGES for language, _, _ in BLOCK.findall(page.read_text())}
    assert languages == {"python", "yaml", "bash"}


def test_every_public_name_has_an_entry_in_the_api() -> None:
    named = set(re.findall(r"(?m)^::: \S+\.(\w+)$", (ROOT / "docs/api.md").read_text()))
    assert named >= set(tlt_lightning.__all__) - {"__version__"}


@pytest.mark.slow
def test_the_notebook_runs_and_shows_rewards_and_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", with_root(os.environ)["PYTHONPATH"])
    notebook = nbformat.read(ROOT / "docs/start.ipynb", as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert "reward/brevity " in outputs["metrics"][0]["text"]
    assert len(ast.literal_eval(outputs["curve"][0]["data"]["text/plain"])) == 3
    assert "".join(each["text"] for each in outputs["completions"]).count("make ") == 6  # a slow kernel prints in parts


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    api = (tmp_path / "api/index.html").read_text()
    assert "Trains a policy by reinforcement" in api
    assert '<span class="gp">&gt;&gt;&gt; </span><span class="n">module</span> <span class="o">=' in api  # its example
    assert (tmp_path / "benchmarks/results/rollout_7b.png").is_file()
