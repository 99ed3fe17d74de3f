"""`python -m benchmarks cold_head`: heads of random weights on a policy's own text."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.common.arguments import ASSETS
from benchmarks.micro import cold_head
from tlt_lightning.data.formats import Text
from tlt_lightning.policy import load_tokenizer


def test_portions_hold_as_many_tokens_as_asked_and_leave_a_small_rest_out() -> None:
    texts = [Text([1, 2, 2, 2, 2], 1)] * 7
    assert [len(part) for part in cold_head.portions(texts, 10, 9)] == [2, 2, 2]
    assert [len(part) for part in cold_head.portions(texts, 10, 2)] == [2, 2]


@pytest.mark.slow
def test_each_optimizer_is_followed_from_random_weights_on_the_same_text(tmp_path: Path) -> None:
    tokenizer, rng = load_tokenizer(str(ASSETS / "policy")), random.Random(0)
    prompts = [json.loads(line)["prompt"] for line in (ASSETS / "train.jsonl").read_text().splitlines()[:80]]
    rows = [
        {"prompt_ids": tokenizer(prompt).input_ids, "response_ids": [rng.randrange(4, 60) for _ in range(30)]}
        for prompt in prompts
    ]
    completions = tmp_path / "completions.jsonl"
    completions.write_text("\n".join(map(json.dumps, rows)))
    cold_head.main(["--tiny", "--completions", str(completions), "--out", str(tmp_path)])
    muon, adamw = json.loads((tmp_path / "cold_head_quickstart.json").read_text())["runs"]
    assert [muon["optimizer"], adamw["optimizer"]] == ["muon=0.03", "adamw=0.003"]
    tokens = [tokens for tokens, _ in muon["curve"]]
    assert tokens[0] == 0
    assert all(abs(each - 1024 * number) < 256 for number, each in enumerate(tokens))
    assert muon["curve"][0] == adamw["curve"][0]
    assert muon["curve"][1:] != adamw["curve"][1:]
    assert "| muon=0.03 | 0 |" in (tmp_path / "cold_head_quickstart.md").read_text()
    assert next(iter(muon["ways"].values())) == muon["curve"][-1][1]
    assert len(set(muon["ways"].values())) == 3
    assert (tmp_path / "cold_head_quickstart.png").stat().st_size > 0
