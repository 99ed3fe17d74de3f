import json
from pathlib import Path

from benchmarks.micro import update


def test_both_ways_pass_all_tokens_in_no_more_than_they_may(tmp_path: Path) -> None:
    update.main(["--tiny", "--out", str(tmp_path)])
    ways = json.loads((tmp_path / "update.json").read_text())["ways"]
    passes = {(way, tokens): number for way, tokens, number, *_ in ways}
    assert set(passes) == {(way, tokens) for way in ("padded", "packed") for tokens in (96, 256)}
    assert all(passes["packed", tokens] <= passes["padded", tokens] for tokens in (96, 256))
    assert passes["packed", 256] < passes["packed", 96]
    assert all(seconds > 0 for *_, seconds, _ in ways)
    assert "| packed | 256 |" in (tmp_path / "update.md").read_text()
