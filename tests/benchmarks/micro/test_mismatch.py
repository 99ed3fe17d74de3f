"""The rows of `micro/mismatch.py` name layers that an engine can keep apart, and measure the engine that keeps them."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.common.arguments import FILES
from benchmarks.micro.mismatch import choices, main, measure, render


def test_fused_layers_stay_together_and_every_kind_has_a_row() -> None:
    kinds = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    kinds += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    rows = choices([f"model.layers.{block}.{kind}" for block in range(3) for kind in kinds])
    assert rows["none"] == []
    assert rows["all"] is None
    assert rows["q_proj, k_proj, v_proj"] == ["*.q_proj", "*.k_proj", "*.v_proj"]
    assert rows["first and last"] == ["*.layers.0.*", "*.layers.2.*"]
    patterns = [pattern for kept in rows.values() for pattern in kept or [] if "layers" not in pattern]
    assert sorted(patterns) == sorted(f"*.{kind.partition('.')[2]}" for kind in kinds)
    alone = choices(["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"])
    assert alone["qkv_proj"] == ["*.qkv_proj"]


def test_rows_beyond_the_budget_and_failed_ones_are_named(tmp_path: Path) -> None:
    main(["--tiny", "--seconds", "0", "--out", str(tmp_path)])
    report = (tmp_path / "mismatch_tiny.md").read_text()
    assert (
        "Left out, the budget spent: none; all; q_proj, k_proj, v_proj; gate_proj, up_proj; o_proj; down_proj; "
        in report
    )
    record = {"size": "tiny", "command": "c", "hardware": "h", "versions": {}, "seed": 0, "note": ""}
    results = {"about": record, "failed": {"none": "out of luck"}, "left_out": [], "rows": {}}
    assert "Failed: none, `out of luck`." in render(results)


@pytest.mark.vllm
def test_an_engine_that_keeps_all_layers_is_nearer_to_the_policy_than_one_that_keeps_none() -> None:
    policy, prompts = FILES["tiny"].policy, FILES["tiny"].val
    args = Namespace(policy=policy, prompts=prompts, num_prompts=8, max_tokens=8, seed=0)
    all_kept, none_kept = measure(["*_proj"], args), measure([], args)
    assert all_kept["difference"] < 0.5 * none_kept["difference"] < 0.1
    assert 0 <= all_kept["kl"] < 0.5 * none_kept["kl"]
    assert none_kept["ratio_max"] > 1 > none_kept["effective"] > 0.9
    assert none_kept["tokens"] == 64
