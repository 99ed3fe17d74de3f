"""The measured engines on a tiny policy: every arm runs in the live engine, and all do the same work."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.rollout.bench import WARM_UP_TOKENS, Bench, warm_up_lengths
from benchmarks.rollout.heads import head_tensors, redrawn
from benchmarks.rollout.setup import Setup, add_arguments, setup_of
from benchmarks.rollout.steps import EDGES
from tests.conftest import save_policy
from tests.support.eagle_head import make_head, save_head
from tests.support.speculation_engines import save_trained_head
from tlt_lightning.engine import Sampling

LENGTHS = [40, 31, 22, 13]
STREAM = [12, 13, 3, 15, 4, 7, 9, 20, 21] * 9


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    path = tmp_path_factory.mktemp("rollout")
    policy = str(save_policy(path / "policy", num_hidden_layers=4))
    heads = (save_trained_head(policy, path / "trained"), save_head(make_head(policy, seed=5), path / "early"))
    prompts = path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("0 1 = 3 :", "2 1 = 5 :")))
    return Setup(
        policy=policy,
        heads=heads,
        prompts=str(prompts),
        num_prompts=2,
        group_size=2,
        max_tokens=48,
        contexts=(20,),
        dtype="float32",
        kv_cache_gib=0.0625,
        max_num_batched_tokens=512,
        enforce_eager=True,
    )


@contextmanager
def bench_of(setup: Setup, kind: str, table: tuple[tuple[int, int, int], ...] = ()) -> Iterator[Bench]:
    bench = Bench(setup, kind, table)
    try:
        yield bench
    finally:
        bench.close()


@pytest.mark.vllm
def test_every_arm_of_the_steered_engine_writes_what_it_is_told(setup: Setup) -> None:
    with bench_of(setup, "steered") as bench:
        found = {arm: bench.rollout(arm, LENGTHS, seed=0) for arm in bench.arms}
        for result in found.values():
            assert result["lengths"] == LENGTHS
            assert result["tokens"] == sum(LENGTHS)
            assert result["preempted"] == 0
        assert found["off"]["off_share"] == 1
        assert found["K=3"]["k_mean"] > 2.5
        assert found["K=3"]["acceptance_rate_pos_1"] > 2 * found["K=3, random head"]["acceptance_rate_pos_1"]
        assert found["siblings"]["acceptance_length"] >= 1
        assert len(found["K=7"]["acceptance_by_phase"][0]) == 7
        assert len(found["adaptive"]["trace"]) > 3
        assert "trace" not in found["K=3"]
        greedy = Sampling(max_tokens=16, temperature=0)
        texts = [bench.write(arm, greedy, 0, 1, at_once) for arm in ("off", "K=5") for at_once in (None, 1)]
        assert [[tokens for tokens, _ in text] for text in texts[1:]] == [[tokens for tokens, _ in texts[0]]] * 3
        assert bench.cell("K=1", 3, 20, STREAM)["tokens_per_s"] > 0
        assert bench.describe()["kv_tokens"] > 1000


@pytest.mark.vllm
def test_vllms_own_table_is_obeyed_and_counted(setup: Setup) -> None:
    with bench_of(setup, "table", ((1, 2, 3), (3, 4, 1))) as bench:
        result = bench.rollout("vLLM table", LENGTHS, seed=0)
        assert result["lengths"] == LENGTHS
        assert 1 < result["k_mean"] < 3
        assert result["acceptance_length"] > 1
        assert {"acceptance_rate_pos_1", "acceptance_rate_pos_3"} <= result.keys()


def test_warming_up_spends_as_long_at_each_batch_size_down_to_one() -> None:
    lengths = warm_up_lengths(256, 4096)
    in_bins = [sorted(lengths)[-edge] - sorted(lengths)[-after] for edge, after in pairwise(EDGES)]
    assert in_bins == [WARM_UP_TOKENS] * (len(EDGES) - 1)  # from `after` requests left to `edge`
    assert min(lengths) == WARM_UP_TOKENS
    assert max(lengths) < 4096
    assert len(set(lengths)) > 100  # batches of all sizes in between
    assert max(warm_up_lengths(16, 48)) <= 48


def test_a_random_head_has_the_shapes_and_scales_of_the_trained_one(setup: Setup) -> None:
    trained = head_tensors(setup.heads[0])
    drawn = redrawn(trained, seed=0)
    assert {name: value.shape for name, value in drawn.items()} == {
        name: value.shape for name, value in trained.items()
    }
    assert drawn["norm.weight"].equal(trained["norm.weight"])
    weight = trained["fc.weight"]
    assert drawn["fc.weight"].std().item() == pytest.approx(weight.std().item(), rel=0.05)
    assert not drawn["fc.weight"].allclose(weight)


def test_too_few_prompts_are_an_error(setup: Setup, tmp_path: Path) -> None:
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "0 1 ="}\n')
    with pytest.raises(ValueError, match="has 1 prompts, but `num_prompts` is 2"):
        Setup(policy=setup.policy, prompts=str(prompts), num_prompts=2).prompt_ids()


def test_what_is_asked_for_is_not_made_tiny() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    tiny = setup_of(parser.parse_args(["--tiny", "--num-prompts", "6", "--kv-gib", "0.5"]))
    assert (tiny.num_prompts, tiny.group_size, tiny.max_tokens, tiny.kv_cache_gib) == (6, 4, 48, 0.5)
    assert (tiny.dtype, tiny.enforce_eager) == ("float32", True)
    given = ["--rung", "25m", "--policy", tiny.policy, "--max-tokens", "100"]
    large = setup_of(parser.parse_args(given), sizes={"num_prompts": 64, "group_size": 4, "max_tokens": 1024})
    assert (large.num_prompts, large.max_tokens, large.dtype, large.enforce_eager) == (64, 100, "bfloat16", False)
