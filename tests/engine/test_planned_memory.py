"""Memory that an engine will hold, from shapes; tests/engine/vllm/test_engine_life.py compares it with a live one."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafters.eagle_head import make_head, save_head
from tlt_lightning import CostModelSelector, Quantization, Speculation, VLLMEngine
from tlt_lightning.engine.planned_memory import GIB
from tlt_lightning.policy import load_policy
from tlt_lightning.speculation.head_files import read_head

TOKEN = 2 * 2 * 32 * 2
"""Bytes of a token's keys and values: two layers with a head of 32 numbers of 2 bytes."""


def plan(policy: str, engine: VLLMEngine, device_gib: float = 80.0) -> Mapping[str, float]:
    return engine.planned_memory(policy, max_model_len=90, device_bytes=device_gib * GIB)


def test_the_cache_is_what_all_requests_fill_or_what_is_left(policy_path: str) -> None:
    engine = VLLMEngine(max_num_seqs=8, enforce_eager=True)
    assert plan(policy_path, engine)["engine, cache"] == 8 * 112 * TOKEN
    assert plan(policy_path, VLLMEngine(max_num_seqs=8, kv_cache_gib=0.5))["engine, cache"] == 0.5 * GIB
    many = plan(policy_path, VLLMEngine(max_num_seqs=2**20, gpu_memory_utilization=0.25))
    assert sum(many.values()) == 20 * GIB
    assert plan(policy_path, engine, 0.001)["engine, cache"] == 0.0


def test_types_count_by_their_width(policy_path: str) -> None:
    numbers = sum(parameter.numel() for parameter in load_policy(policy_path).parameters())
    linear = sum(
        p.numel() for name, p in load_policy(policy_path).named_parameters() if p.dim() == 2 and "layers" in name
    )
    plain = plan(policy_path, VLLMEngine())
    wide = plan(policy_path, VLLMEngine(dtype="float32"))
    narrow = plan(policy_path, VLLMEngine(dtype="bfloat16", quantization="fp8"))
    assert plain["engine, weights"] == 2 * numbers
    assert wide["engine, weights"] == 4 * numbers
    assert narrow["engine, weights"] == 2 * numbers - linear
    kept = plan(policy_path, VLLMEngine(dtype="bfloat16", quantization=Quantization("fp8", ["model.layers.0.*"])))
    assert kept["engine, weights"] == 2 * numbers - linear // 2
    assert wide["engine, cache"] == 2 * plain["engine, cache"]


def test_ranks_of_an_engine_share_a_head_but_for_what_each_needs_whole(policy_path: str, tmp_path: Path) -> None:
    path = save_head(make_head(policy_path), tmp_path / "head")
    speculation = Speculation(selector=CostModelSelector(drafters=["learned"]), head=path)
    alone, shared = (
        plan(policy_path, VLLMEngine(dtype="bfloat16", speculation=speculation, tensor_parallel=ranks))
        for ranks in (1, 2)
    )
    shapes = read_head(path).tensors
    whole = sum(2 * prod(shape) for name, shape in shapes.items() if "fc" in name or len(shape) == 1)
    assert whole > 0
    assert shared["engine, drafter"] == pytest.approx(whole + (alone["engine, drafter"] - whole) / 2)
    assert shared["engine, weights"] == alone["engine, weights"] / 2


@pytest.mark.parametrize(
    ("draft_sampling", "siblings", "width"),
    [("probabilistic", False, 2), ("probabilistic", True, 0), ("greedy", False, 0)],
)
def test_sampled_drafts_without_lookups_keep_their_distributions(
    draft_sampling: Any, siblings: bool, width: int, policy_path: str, tmp_path: Path
) -> None:
    head = save_head(make_head(policy_path), tmp_path / "head")
    selector = CostModelSelector(drafters=["learned", "sibling"] if siblings else ["learned"])
    speculation = Speculation(
        selector=selector, head=head, siblings=siblings, draft_sampling=draft_sampling, max_draft_tokens=5
    )
    planned = plan(policy_path, VLLMEngine(max_num_seqs=16, speculation=speculation))
    assert planned["engine, sampled drafts"] == 16 * 5 * load_policy(policy_path).config.vocab_size * width


def test_graphs_are_those_that_will_be_captured(policy_path: str) -> None:
    speculation = Speculation(selector=CostModelSelector(drafters=["sibling"]), siblings=True)
    eager, plain, drafting = (
        plan(policy_path, VLLMEngine(enforce_eager=is_eager, speculation=given))["engine, graphs"]
        for is_eager, given in ((True, None), (False, None), (False, speculation))
    )
    assert eager == 0.0
    assert 0.0 < plain < 0.2 * GIB
    assert plain != drafting > 0.0
