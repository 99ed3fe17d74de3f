"""What the documents say: links lead somewhere, code runs, names exist."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import RewardTerm
from tlt_lightning.speculation import SelectorState

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FOLDERS = ("docs", "tlt_lightning", "recipes", "benchmarks")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
SOURCE = "\n".join(path.read_text() for path in (ROOT / "tlt_lightning").rglob("*.py"))


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 110


def test_the_twelve_lines_of_the_readme_build_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(python_blocks(README)[0].replace("trainer.fit(module, data)", ""), names)
    assert names["data"].engine.speculation.drafters == ("sibling",)
    assert names["data"].num_minibatches == 1


@pytest.mark.vllm
@pytest.mark.slow
def test_the_twelve_lines_of_the_readme_train_and_show_the_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    code = python_blocks(README)[0].replace("max_tokens=720", "max_tokens=48").replace("max_epochs=10", "max_epochs=1")
    exec(code, {})
    assert "reward" in capfd.readouterr().out


def test_your_own_callback_reward_selector_and_objective_run(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    own: dict[str, Any] = {}
    exec(python_blocks(README)[1], own)
    assert own["FewLeft"](5).select(SelectorState(batch_size=17)).is_off
    assert own["FewLeft"](5).select(SelectorState(batch_size=16)).num_draft_tokens == 5
    assert asyncio.run(own["brevity"]("", "four", {})) == 0.2

    data = make_data(prompts_path, rewards=[RewardTerm(function=own["brevity"])])
    trainer = make_trainer(tmp_path, own["Longest"](), max_epochs=1)
    trainer.fit(make_module(policy_path, objective=own["Cautious"]()), data)
    assert trainer.callback_metrics.keys() >= {"rollout/longest", "reward/brevity"}


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
