"""The benchmark of the drafter's training compares like with like, and reports what it measured."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("speculators")

from benchmarks.micro import drafter_costs as benchmark


def test_padded_and_packed_batches_are_the_same_work(tmp_path):
    cpu = torch.device("cpu")
    benchmark.save_target(benchmark.TINY_SCALE.shape, tmp_path, cpu)
    drafter = benchmark.build_drafter(tmp_path, cpu, draft_vocab_size=256)
    sequences = benchmark.make_sequences(replace(benchmark.TINY_SCALE, num_sequences=5, max_length=82), cpu)
    (pack,) = benchmark.packs_of(sequences, 512)
    (padded,) = benchmark.pad(sequences, 5)
    losses, gradients = [], []
    for batch in (pack, padded):
        value = drafter.loss(batch)[0]
        value.backward()
        losses.append(value.item())
        gradients.append({name: item.grad.clone() for name, item in drafter.named_parameters() if item.requires_grad})
        drafter.zero_grad()
    assert padded.lengths == (80,) * 5
    assert any(len(sequence) == 82 for sequence in sequences[:-1])  # a row without padding meets the next
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "head.fc.weight" in gradients[0]
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() < 1e-3 * gradient.norm(), name


def test_costs_are_measured_printed_and_written(monkeypatch, tmp_path, capsys):
    scale = replace(
        benchmark.TINY_SCALE, num_sequences=6, max_length=90, pack_lengths=(128,), batch_sizes=(1, 3), repeats=1
    )
    monkeypatch.setattr(benchmark, "TINY_SCALE", scale)
    benchmark.main(["--tiny", "--out", str(tmp_path), "--folder", str(tmp_path)])
    written = json.loads((tmp_path / "drafter_costs.json").read_text())
    ways = written["snapshots"]["ways"]
    assert ways["full, asynchronous"]["mib"] > 2 * ways["selective, asynchronous"]["mib"] > 0
    assert all(0 < way["blocked_ms"] <= way["added_ms"] for way in ways.values())
    packing = written["packing"]
    assert packing["filled"]["padded"]["3"] < packing["filled"]["padded, sorted by length"]["3"] < 1
    speeds, found = packing["samples_per_s"], written["ratios"]
    assert found["packed_over_padded"] == pytest.approx(speeds["packed"]["128"] / speeds["padded"]["3"])
    full = min(row["blocked_ms"] for name, row in ways.items() if name.startswith("full, synchronous"))
    assert found["snapshot_blocked"] == pytest.approx(full / ways["selective, asynchronous"]["blocked_ms"])
    report = (tmp_path / "drafter_costs.md").read_text()
    assert report in capsys.readouterr().out
    assert "| packed | 128 entries a pack |" in report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter_costs.json", "drafter_costs.md"]


def test_each_side_of_a_ratio_is_at_its_best():
    ways = {"full, synchronous (torch.save)": 90.0, "full, synchronous (safetensors)": 60.0, "full, asynchronous": 9.0}
    rows = {name: {"blocked_ms": cost, "added_ms": 2 * cost} for name, cost in ways.items()}
    rows["selective, asynchronous"] = {"blocked_ms": 10.0, "added_ms": 30.0}
    speeds = {
        "padded": {1: 5.0, 2: 4.0, 8: None},
        "padded, sorted by length": {2: 8.0, 8: 10.0},
        "packed": {512: 20.0, 1024: 16.0},
    }
    found = benchmark.ratios({"snapshots": {"ways": rows}, "packing": {"samples_per_s": speeds}})
    expected = {"packed_over_padded": 5.0, "packed_over_sorted": 2.0, "packed_over_alone": 4.0}
    assert found == {"snapshot_blocked": 6.0, "snapshot_added": 4.0, **expected}
