"""Every benchmark answers `--help`, records its command, and leaves complete files."""

import importlib
import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.common.arguments import ASSETS, sized_parser_of, take_size
from benchmarks.common.processes import run_apart
from benchmarks.common.results import about, heading, note_of, save, table


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(BENCHMARKS[name]).main(["--help"])
    shown = capsys.readouterr().out
    assert f"python -m benchmarks {name}" in shown
    assert {"--tiny", "--out", "--seed"} <= set(shown.split())


def test_an_unknown_benchmark_gets_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "fastest"])
    with pytest.raises(SystemExit, match="target,pad_to_7b,rollout"):
        main()


def test_results_say_command_hardware_versions_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "rollout", "--tiny"])
    record = about("tiny", "a note", 7, on_cpu=True)
    text = "\n".join(heading("Rollout", record))
    assert re.search(r"^20\d\d-\d\d-\d\d; ", text, re.MULTILINE)
    for part in ("# Rollout: tiny", "`python -m benchmarks rollout --tiny`", "CPU cores", "torch ", "seed 7", "a note"):
        assert part in text


def test_files_are_readable_after_every_measurement(tmp_path: Path) -> None:
    results = {"runs": [{"arm": "plain"}, {"arm": "K=3"}], "limit": {"seconds": 1.5}, "seed": 0, "none": []}
    save(tmp_path / "new" / "rollout_1.5b", results, ["# Title", "", *table(["a"], [[None], [0.12345]])])
    assert json.loads((tmp_path / "new/rollout_1.5b.json").read_text()) == results
    assert (tmp_path / "new/rollout_1.5b.md").read_text() == "# Title\n\n| a |\n| --- |\n| - |\n| 0.1235 |\n"
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_results_of_a_padded_policy_say_so(tmp_path: Path) -> None:
    assert note_of(tmp_path, "", "measured twice") == "measured twice"
    (tmp_path / "padded.json").write_text(json.dumps({"what": "policy of 7 weights"}))
    assert "Padded: policy of 7 weights that know" in note_of(tmp_path)


def test_tiny_takes_the_quickstarts_policy_and_a_missing_one_is_an_early_error() -> None:
    parser = sized_parser_of(None)
    args = parser.parse_args(["--tiny"])
    take_size(args, trains=True)
    assert (args.size, args.policy, args.head) == ("tiny", str(ASSETS / "policy"), [])
    assert args.prompts == str(ASSETS / "train.jsonl")
    with pytest.raises(SystemExit, match="`--policy` nowhere holds none"):
        take_size(parser.parse_args(["--policy", "nowhere"]), trains=True)


def test_a_part_that_fails_in_its_process_fails_here() -> None:
    assert run_apart(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        run_apart(divmod, 7, 0)
