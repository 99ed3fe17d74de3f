"""`python -m benchmarks block_drafts`: heads that write all drafts in one pass."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.block_drafts import head as blocks
from benchmarks.block_drafts import run
from benchmarks.block_drafts.report import foretold
from benchmarks.block_drafts.serve import SETTLE, watch
from benchmarks.common.arguments import ASSETS
from tests.conftest import save_policy
from tlt_lightning.drafter.quality import AcceptanceRule
from tlt_lightning.engine import RolloutProgress
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.policy import load_tokenizer

CPU = torch.device("cpu")
BLOCK = 4


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    policy = save_policy(tmp_path_factory.mktemp("policy"), num_hidden_layers=4, initializer_range=0.3)
    return blocks.make_head(request.param, str(policy), num_layers=2, block_size=BLOCK, seed=0).eval()


def text_of(seed: int, length: int, width: int) -> PolicyText:
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(length, 4 * width, generator=draw)
    ids = torch.randint(3, 30, (length,), generator=draw)
    return PolicyText(ids, states[:, : 3 * width], states[:, 3 * width :], prompt_length=3)


def logits_at(head: Any, batch: dict[str, torch.Tensor], *anchors: int) -> torch.Tensor:
    mask = torch.zeros_like(batch["loss_mask"])
    mask[0, list(anchors)] = True
    with torch.no_grad():
        return blocks.logits_of(head, batch | {"loss_mask": mask}, len(anchors))[0]


@pytest.mark.slow
def test_a_block_sees_its_text_before_its_anchor_and_nothing_else(head: Any) -> None:
    first, second = (text_of(seed, 12, head.hidden_size) for seed in (1, 2))
    alone = logits_at(head, blocks.pack_of([second], BLOCK, CPU), 6)
    pack = blocks.pack_of([first, second], BLOCK, CPU)
    place = len(first) + BLOCK + 6
    together = logits_at(head, pack, 5, 11, place, place + 2)
    torch.testing.assert_close(together[2], alone[0])
    second.states[6:] += 1  # of the anchor, which the policy has not read yet, and of what follows
    torch.testing.assert_close(logits_at(head, blocks.pack_of([second], BLOCK, CPU), 6), alone)
    second.states[5] += 1
    assert (logits_at(head, blocks.pack_of([second], BLOCK, CPU), 6) - alone).abs().max() > 1e-3


def test_only_what_is_drafted_of_the_response_counts_in_the_loss(head: Any) -> None:
    text = text_of(1, 12, head.hidden_size)
    batch = blocks.pack_of([text], BLOCK, CPU)
    torch.manual_seed(0)
    expected = blocks.loss_of(head, batch, 9)
    assert expected.requires_grad
    batch["verifier_last_hidden_states"][0, len(text) - 1 :] += 1  # predicts what is behind the text
    torch.manual_seed(0)
    torch.testing.assert_close(blocks.loss_of(head, batch, 9), expected)


@pytest.mark.vllm
def test_vllm_lets_the_rows_of_a_block_see_each_other_as_in_training(head: Any, tmp_path: Path) -> None:
    from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    head.config.save_pretrained(tmp_path)
    assert dflash_has_any_non_causal(SpeculatorsConfig.from_pretrained(str(tmp_path)))


def test_drafts_are_judged_as_those_of_other_heads_however_many_at_once(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text_of(seed, 12, head.hidden_size) for seed in (1, 2)]
    rules = [AcceptanceRule(), AcceptanceRule(samples_drafts=True)]
    found = blocks.measure(head, texts, rules, CPU)
    assert found.shape == (2, BLOCK - 1)
    assert ((found[:, :-1] >= found[:, 1:]) & (found[:, 1:] >= 0)).all()
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", BLOCK)
    torch.testing.assert_close(blocks.measure(head, texts, rules, CPU), found)


def test_drafts_that_say_what_the_policy_is_sure_of_are_all_accepted(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sure(head: Any, batch: dict[str, torch.Tensor], num_anchors: int) -> tuple[torch.Tensor, ...]:
        places = torch.nonzero(batch["loss_mask"][0]) + torch.arange(BLOCK)
        logits = 100.0 * torch.nn.functional.one_hot(batch["input_ids"][0, places], 40)
        return logits, logits, places

    monkeypatch.setattr(blocks, "logits_of", sure)
    text = text_of(1, 12, head.hidden_size)
    torch.testing.assert_close(blocks.measure(head, [text], [AcceptanceRule()], CPU), torch.ones(1, 3).double())


def test_steps_are_timed_once_settled_and_their_tokens_counted() -> None:
    cells: dict[str, list[float]] = {}
    script = watch(4, 5, 2, cells)
    next(script)
    none = RolloutProgress(waiting=0, running=4, finished=0, tokens=0, longest=0, elapsed=0.0)
    list(map(script.send, (replace(none, tokens=12 * step) for step in range(SETTLE + 99))))  # until the script ends
    assert cells["4"][1] == 3.0


def test_tokens_per_second_follow_from_acceptance_and_steps() -> None:
    def accepting(*shares: float) -> dict[str, Any]:
        return {"accepted": {"greedy": shares, "sampled": shares}}

    heads = {"eagle3": accepting(0.8, 0.6, 0.4), "dflash-2-4": accepting(0.7, 0.5, 0.3)}
    times = {"plain=0": 4.0, "eagle3=1": 6.0, "eagle3=3": 8.0, "dflash-2-4=3": 5.0}
    steps = {arm: {"cells": {"10": [ms, 1.0]}} for arm, ms in times.items()}
    report = "\n".join(foretold(heads, steps, {}))
    assert "| eagle3=3 | 3,500 (1.00) |" in report
    assert "| eagle3=1 | 3,000 (0.86) |" in report
    assert "| dflash-2-4=3 | 5,000 (1.43) |" in report
    served = {arm: {"natural": {"tokens per step": n}} for arm, n in (("eagle3=3", 3.2), ("dflash-2-4=3", 2.2))}
    report = "\n".join(foretold(heads, steps, served))
    assert "| eagle3=3 | 4,000 (1.00) |" in report
    assert "| dflash-2-4=3 | 4,400 (1.10) |" in report
    assert "eagle3=1" not in report


@pytest.mark.slow
def test_heads_are_trained_side_by_side_and_one_that_fails_takes_no_other_along(
    tmp_path: Path, by_forkserver: None
) -> None:
    tokenizer, rng = load_tokenizer(str(ASSETS / "policy")), random.Random(0)
    prompts = [json.loads(line)["prompt"] for line in (ASSETS / "train.jsonl").read_text().splitlines()[:80]]
    rows = [
        {"prompt_ids": tokenizer(prompt).input_ids, "response_ids": [rng.randrange(4, 60) for _ in range(120)]}
        for prompt in prompts
    ]
    (tmp_path / "completions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--tiny", "--parts", "heads", "--models", str(tmp_path), "--out", str(tmp_path)]
    run.main([*given, "--heads", "dflash-1-4", "unknown-1-4-4"])
    results = json.loads((tmp_path / "block_drafts.json").read_text())["heads"]
    assert [round(tokens / 4000) for tokens, _ in results["dflash-1-4"]["curve"]] == [0, 1, 2]
    assert len(results["dflash-1-4"]["accepted"]["greedy"]) == 3
    assert "ValueError" in results["unknown-1-4-4"]["failed"]
    assert "Failed: heads unknown-1-4-4" in (tmp_path / "block_drafts.md").read_text()
    assert json.loads((tmp_path / "dflash-1-4/config.json").read_text())["speculators_model_type"] == "dflash"
