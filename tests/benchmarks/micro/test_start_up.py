"""A start is timed in a process of its own, from the command to the first token."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.common.shapes import SHAPES
from benchmarks.micro import start_up
from benchmarks.micro.start_up import main, prepare
from tests.support.ranks.rank_processes import with_root
from tlt_lightning.speculation.head_files import check_head, read_head


def test_a_model_is_a_size_or_folders() -> None:
    assert prepare("7b", "unused") == ("wide/policy", "wide/head")
    assert prepare("mine=a/policy,a/head", "unused") == ("a/policy", "a/head")
    assert prepare("mine=a/policy", "unused") == ("a/policy", None)


@pytest.mark.slow
def test_a_shape_has_random_weights_and_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "mini", SHAPES["tiny"])
    policy, head = prepare("mini", str(tmp_path))
    assert head is not None
    check_head(read_head(head), policy)


@pytest.mark.vllm
@pytest.mark.slow
def test_parts_of_a_start_add_up_to_the_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "CACHES", ())  # a cold start would import vLLM twice
    monkeypatch.setenv("PYTHONPATH", with_root(os.environ)["PYTHONPATH"])
    main(["--tiny", "--warm", "0", "--out", str(tmp_path)])
    (run,) = json.loads((tmp_path / "start_up.json").read_text())["runs"]
    parts = list(run["seconds"])
    assert parts[0] == "imports"
    assert "vLLM: reading weights" in parts
    assert parts[-1] == "first token"
    assert min(run["seconds"].values()) >= 0
    assert "**in all**" in (tmp_path / "start_up.md").read_text()
