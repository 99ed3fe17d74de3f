"""An engine over two ranks writes what an engine of one writes, whatever their clocks say."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.processes import run_apart
from tests.conftest import save_policy
from tests.engine.vllm.lossless.test_distribution import HORIZON, VOCAB, chi_square_p, probabilities_of, text_logps
from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.ranks.engines.tensor_parallel import write_between_sleeps
from tests.support.ranks.rank_processes import run_ranks
from tests.support.speculation_engines import (
    PROMPTS,
    greedy_gap,
    greedy_texts,
    save_endless_policy,
    save_trained_head,
    siblings,
)
from tlt_lightning import VLLMEngine
from tlt_lightning.rollout import Sampling

pytestmark = pytest.mark.vllm

TOLERANCE = 0.3  # logits, as in test_gpu.py


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    policy, other = (save_endless_policy(out / name, seed=seed) for name, seed in (("policy", 0), ("other", 7)))
    head = save_head(make_head(policy, seed=3), out / "head")
    better = save_trained_head(policy, out / "better")
    ended = run_ranks("tests.support.ranks.engines.tensor_parallel", out, policy, other, head, better, str(out))
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    found[0]["sockets"] = [path.name for path in out.iterdir() if path.is_socket()]
    texts = {name: greedy_texts(path, 32) for name, path in (("greedy", policy), ("other", other))}
    found[0]["expected"] = {
        name: [whole[i % 4][len(PROMPTS[0]) :][: (64 - 5 * i) // 2] for i in range(12)] for name, whole in texts.items()
    }
    return found


def test_greedy_text_is_that_of_the_policy_under_any_drafts(ranks: list[dict[str, Any]]) -> None:
    expected = ranks[0]["expected"]
    for rank in ranks:
        assert rank["greedy"] == rank["with a better head"] == expected["greedy"]
    assert expected["other"] != expected["greedy"]
    assert ranks[0]["sampled"] != ranks[1]["sampled"]


def test_each_rank_has_the_answers_to_its_own_requests(ranks: list[dict[str, Any]]) -> None:
    expected = ranks[0]["expected"]
    assert [rank["other"] for rank in ranks] == [expected["other"], expected["other"][:5]]
    assert [rank["none"] for rank in ranks] == [[], expected["greedy"]]
    whole = [[i, "length", expected["greedy"][i][: 8 if i == 3 else 32]] for i in range(4)]
    assert ranks[0]["stopped"] == whole
    stopped, *others, added = ranks[1]["stopped"]
    assert others == whole[1:]
    assert stopped[1] == "unfinished"
    assert stopped[2] == whole[0][2][: len(stopped[2])]
    assert added == [9, *whole[0][1:]]


def test_one_rank_chooses_and_all_learn(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["chosen"] > 20
    assert ranks[1]["chosen"] == 0
    assert min(rank["learned"] for rank in ranks) > 0
    assert ranks[0]["measured"] == ranks[1]["measured"] != []


def test_a_new_head_arrives_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["stats"]["speculation/drafter_version"] == 1
        assert rank["stats"]["speculation/acceptance_length"] > 1.3


def test_ranks_that_part_are_an_error(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert f"Rank {number} has scheduled or written other tokens" in rank["written apart"]
    assert "decided apart" not in ranks[0]  # which does not hear of the others
    assert "Rank 1 has scheduled or written other tokens" in ranks[1]["decided apart"]


def test_closed_engines_leave_no_sockets_behind(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["open sockets"] == 2, "where vLLM makes them"
    assert ranks[0]["sockets"] == []


def test_every_text_is_as_likely_as_it_should_be(tmp_path: Path) -> None:
    """As in test_distribution.py, of responses that two ranks write together."""
    policy = str(save_policy(tmp_path / "policy", vocab_size=VOCAB, num_hidden_layers=4, initializer_range=0.1))
    head = save_head(make_head(policy, seed=3), tmp_path / "head")
    ended = run_ranks("tests.support.ranks.engines.tensor_parallel_texts", tmp_path, policy, head, str(tmp_path))
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    found = [json.loads((tmp_path / f"texts{rank}.json").read_text()) for rank in (0, 1)]
    logps = text_logps(policy, Sampling(max_tokens=HORIZON))
    for drafter in ("learned", "mixed", "any"):
        responses = [(tuple(text), own) for rank in found for text, own in rank[drafter]["texts"]]
        assert chi_square_p(Counter(text for text, _ in responses), probabilities_of(logps)) > 1e-4, drafter
        assert all(own == pytest.approx(logps[text], abs=2e-4) for text, own in responses)
        assert found[0][drafter]["acceptance"] > 1


@pytest.mark.gpu
@pytest.mark.timeout(600)  # nothing is compiled yet
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_write_what_the_policy_finds_likeliest(tmp_path: Path) -> None:
    """In bfloat16, whose rounding depends on the split: each token is the likeliest one within what it tells apart."""
    policy = save_endless_policy(tmp_path / "policy")
    head = save_trained_head(policy, tmp_path / "head")
    found = run_apart(write_between_sleeps, policy, head, num_ranks=2)
    prompts = [list(request.prompt_ids) for request in siblings()]
    assert all(greedy_gap(policy, prompts, texts) < TOLERANCE for texts in found["texts"])
    assert found["stats"]["speculation/acceptance_length"] > 1.3


def test_an_engine_of_more_ranks_than_there_are_waits_for_none(policy_path: str) -> None:
    with pytest.raises(ValueError, match="`tensor_parallel` 2 must divide the ranks of the run, 1"):
        VLLMEngine(tensor_parallel=2).setup(policy_path, max_model_len=32, seed=0)
