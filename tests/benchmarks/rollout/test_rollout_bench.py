"""The measured engines on a tiny policy: every arm runs in its live engine, and all do the same work."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.common.arguments import sized_parser_of, take_size
from benchmarks.rollout.bench import WARM_UP_TOKENS, Bench, speculation_of, warm_up_lengths
from benchmarks.rollout.setup import Setup, add_arguments, setup_of
from benchmarks.rollout.steps import EDGES
from tests.conftest import save_policy
from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import save_trained_head
from tlt_lightning.speculation import FixedSelector

LENGTHS = [40, 31, 22, 13]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    path = tmp_path_factory.mktemp("rollout")
    policy = str(save_policy(path / "policy", num_hidden_layers=4))
    heads = (save_trained_head(policy, path / "trained"), save_head(make_head(policy, seed=5), path / "early"))
    prompts = path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("0 1 = 3 :", "2 1 = 5 :")))
    sizes = {"num_prompts": 2, "group_size": 2, "max_tokens": 48, "kv_cache_gib": 0.0625}
    return Setup(policy=policy, heads=heads, prompts=str(prompts), dtype="float32", enforce_eager=True, **sizes)


@contextmanager
def bench_of(setup: Setup, kind: str, table: tuple[tuple[int, int, int], ...] = ()) -> Iterator[Bench]:
    bench = Bench(setup, kind, table)
    try:
        bench.warm_up()
        yield bench
    finally:
        bench.close()


@pytest.mark.vllm
def test_every_arm_of_a_head_writes_what_it_is_told(setup: Setup) -> None:
    with bench_of(setup, "head") as bench:
        found = {arm: bench.rollout(arm, LENGTHS, seed=0) for arm in bench.selector.selectors}
        for result in found.values():
            assert result["lengths"] == LENGTHS
            assert result["tokens"] == sum(LENGTHS)
            assert result["preempted"] == 0
        assert found["off"]["off_share"] == 1
        assert found["K=3"]["k_mean"] > 2.5
        assert found["K=3"]["acceptance_rate_pos_1"] > 0  # at temperature 1 a tiny policy is all but random
        assert "acceptance_rate_pos_7" in found["K=7"]
        assert not bench.selector.selectors["adaptive"].wants_calibration
        texts = bench.write("K=5")
        assert [len(tokens) == len(logps) for tokens, logps in texts] == [True] * 4
        assert bench.describe()["KV tokens"] > 1000


def test_a_kind_of_engine_says_which_head_drafts_and_how(setup: Setup) -> None:
    first, further = setup.heads
    found = {kind: speculation_of(setup, kind, FixedSelector(3)) for kind in ("head", "sampled", "sampled early")}
    found |= {kind: speculation_of(setup, kind, FixedSelector(3)) for kind in ("siblings", "plain", "vLLM K=3")}
    drafting = {kind: each and (each.head, each.siblings, each.draft_sampling) for kind, each in found.items()}
    assert drafting == {
        "head": (first, False, "greedy"),
        "sampled": (first, False, "probabilistic"),
        "sampled early": (further, False, "probabilistic"),
        "siblings": (None, True, "greedy"),
        "plain": None,
        "vLLM K=3": None,
    }


@pytest.mark.vllm
def test_vllms_own_table_runs_beside_nobodys_selector(setup: Setup) -> None:
    with bench_of(setup, "table", ((1, 2, 3), (3, 4, 1))) as bench:
        result = bench.rollout("vLLM table", LENGTHS, seed=0)
        assert result["lengths"] == LENGTHS
        assert max(tokens for *_, tokens in result["by_batch"]) > 1  # a request and step: drafts were kept


def test_warming_up_spends_as_long_at_each_batch_size_down_to_one() -> None:
    lengths = warm_up_lengths(256, 4096)
    in_bins = [sorted(lengths)[-edge] - sorted(lengths)[-after] for edge, after in pairwise(EDGES)]
    assert in_bins == [WARM_UP_TOKENS] * (len(EDGES) - 1)  # from `after` requests left to `edge`
    assert min(lengths) == WARM_UP_TOKENS
    assert max(lengths) < 4096
    assert max(warm_up_lengths(16, 48)) <= 48


def test_too_few_prompts_are_an_error(setup: Setup, tmp_path: Path) -> None:
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "0 1 ="}\n')
    with pytest.raises(ValueError, match="has 1 prompts, but `num_prompts` is 2"):
        Setup(policy=setup.policy, prompts=str(prompts), num_prompts=2).prompt_ids()


def parsed(*arguments: str) -> argparse.Namespace:
    parser = sized_parser_of(None)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    take_size(args, trains=False)
    return args


def test_what_is_asked_for_is_not_made_tiny() -> None:
    tiny = setup_of(parsed("--tiny", "--num-prompts", "6", "--kv-gib", "0.5"))
    assert (tiny.num_prompts, tiny.group_size, tiny.max_tokens, tiny.kv_cache_gib) == (6, 4, 48, 0.5)
    assert (tiny.dtype, tiny.enforce_eager) == ("float32", True)
    given = ("--policy", tiny.policy, "--prompts", tiny.prompts, "--max-tokens", "100")
    large = setup_of(parsed(*given), num_prompts=64, group_size=4, max_tokens=1024)
    assert (large.num_prompts, large.max_tokens, large.dtype, large.enforce_eager) == (64, 100, "bfloat16", False)
