import json
from pathlib import Path

import pytest

from benchmarks.micro import update
from tlt_lightning import policy


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param([], id="lora"), pytest.param(["--full"], id="full")])
def test_all_ways_pass_all_tokens_in_no_more_than_they_may(options: list[str], tmp_path: Path) -> None:
    before = policy.chosen_logps, policy.is_frozen_linear
    update.main(["--tiny", *options, "--out", str(tmp_path)])
    name = "update_7b_full" if options else "update"
    results = json.loads((tmp_path / f"{name}.json").read_text())
    passes = {(way, tokens): number for way, tokens, number, *_ in results["ways"]}
    assert set(passes) == {(way, tokens) for way in update.WAYS for tokens in (96, 256)}
    padded, *packed = update.WAYS
    assert all(passes[way, tokens] <= passes[padded, tokens] for way in packed for tokens in (96, 256))
    assert all(passes[way, 256] < passes[way, 96] for way in packed)
    assert all(seconds > 0 for *_, seconds, _, _, _ in results["ways"])
    assert results["forecast"] > 0
    assert "| packed, nothing fused | 256 |" in (tmp_path / f"{name}.md").read_text()
    assert before == (policy.chosen_logps, policy.is_frozen_linear)


@pytest.mark.slow
def test_sharded_updates_are_timed_by_kind_of_pass_with_the_forecast_of_each(
    tmp_path: Path, by_forkserver: None
) -> None:
    update.main(["--tiny", "--full", "--devices", "2", "--tokens", "256", "--checkpoint", "96", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "update_7b_full_fsdp2_2.json").read_text())["rows"]
    assert [(row["tokens a pass"], row["computed again"]) for row in rows] == [(256, False), (96, True)]
    assert rows[0]["passes"] < rows[1]["passes"]
    assert all(row["median, s"] > 0 and row["matrix products, ms"] > 0 for row in rows)
    assert rows[0]["forecast GiB"] > rows[1]["forecast GiB"] > 0


def test_kernels_of_collectives_are_told_apart() -> None:
    kernels = [("ncclDevKernel_AllGather_RING_LL", 1, 1.0), ("ncclDevKernel_ReduceScatter_Sum_f32", 1, 2.0)]
    found = update.by_group([*kernels, ("nvjet_tst_128x256", 1, 4.0), ("vectorized_elementwise_kernel", 1, 8.0)])
    assert [found[f"{name}, ms"] for name in ("gathers", "reductions over ranks", "matrix products", "other")] == [
        *(1.0, 2.0, 4.0, 8.0)
    ]


def test_a_model_that_is_taken_apart_is_pefts_and_transformers_own_and_each_way_adds_a_piece() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_hidden_layers=2, **shape))
    model = update.with_adapters(model, update.LoRA(rank=2))
    update.fuse_layers(model)

    def fused() -> set[str]:
        names = {type(layer).__name__ for layer in model.modules() if "forward" in vars(layer)}
        for function in (update.chosen_logps, update.is_frozen_linear):
            if getattr(policy, function.__name__) is function:
                names.add(function.__name__)
        return names

    found = []
    for prepare in update.WAYS.values():
        prepare(model)
        found.append(fused())
    adapters, layers = {"Linear"}, {"Qwen2RMSNorm", "Qwen2MLP"}
    pieces, whole = [adapters, layers, {"chosen_logps"}, {"is_frozen_linear"}], set()
    steps = [whole := whole | piece for piece in pieces]
    assert found == [whole, set(), *steps]
