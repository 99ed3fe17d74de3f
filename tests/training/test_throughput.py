from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.architectures import save_architecture
from tests.test_policy import make_batch
from tlt_lightning import LoRA
from tlt_lightning.metrics import IterationLog
from tlt_lightning.policy import causal_lm, load_policy, response_logps
from tlt_lightning.training.throughput import log_work, peak_flops, train_flops, utilisation

LENGTH, NUM_PREDICTED = 30, 20


@pytest.mark.parametrize(("path", "lora"), [("policy_path", None), ("policy_path", LoRA(rank=4)), ("llama_path", None)])
def test_operations_are_those_that_torch_counts(path: str, lora: LoRA | None, request: pytest.FixtureRequest) -> None:
    """Also where the embedding is not the output head."""
    path = request.getfixturevalue(path)
    model = load_policy(path, lora=lora, attn_implementation="eager")  # whose attention torch counts whole
    batch = make_batch([LENGTH - NUM_PREDICTED], [NUM_PREDICTED])
    # An adapter's products add into their result, which torch does not count by itself.
    added = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=added) as counter:
        response_logps(model, batch)[0].sum().backward()
    network: Any = causal_lm(model)
    # Logits are computed again, but before a frozen head, whose gradient is made in the forward pass.
    recomputed = 2 * network.get_output_embeddings().weight.numel() * NUM_PREDICTED * (lora is None)
    layer = network.base_model.layers[0].self_attn
    first = 0  # gradients of inputs that nobody needs: those of the first layer, where the embedding does not learn
    if lora is not None:
        names = ("q_proj", "k_proj", "v_proj")
        first = sum(
            p.numel()
            for name in names
            for n, p in getattr(layer, name).named_parameters()
            if "lora_B" not in n and p.dim() > 1
        )
    expected = float(train_flops(model, torch.tensor([LENGTH]), torch.tensor(NUM_PREDICTED)))
    assert counter.get_total_flops() == pytest.approx(expected + recomputed - 2 * LENGTH * first, rel=1e-3)


def test_experts_count_where_tokens_are_routed_to_them(tmp_path: Path) -> None:
    model: Any = load_policy(save_architecture("olmoe", tmp_path))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts
    counts = []
    for number in (1, 2):
        model.config.num_experts_per_tok = number
        counts.append(float(train_flops(model, torch.tensor([5, 7]), torch.tensor(0))))
    assert counts[1] - counts[0] == pytest.approx(6 * experts / 4 * 12)


def test_layers_of_different_heads_count_as_the_first(tmp_path: Path) -> None:
    model: Any = load_policy(save_architecture("gemma4_text", tmp_path))
    once, twice = (float(train_flops(model, torch.tensor(lengths), torch.tensor(0))) for lengths in ([7, 7], [14]))
    assert twice - once == pytest.approx(12 * model.config.num_hidden_layers * 2 * 32 * (14**2 - 2 * 7**2))


def test_work_of_a_step_does_not_depend_on_its_micro_batches(policy_path: str) -> None:
    model, critic = load_policy(policy_path), load_policy(policy_path, lora=LoRA(rank=4))  # of which less is trained
    batch = make_batch([3, 2, 4], [6, 9, 2])
    logs = []
    for parts in ([[0, 1, 2]], [[1], [2, 0]]):
        log = IterationLog()
        log_work(log, [model, critic], [batch.select(rows) for rows in parts])
        logs.append({name: value for name, (_, value) in log.read().items()})
    assert [log.pop("train/passes") for log in logs] == [1, 2]
    assert logs[0] == pytest.approx(logs[1])
    assert logs[0]["train/tokens"] == 26
    flops = [
        float(train_flops(own, batch.lengths, torch.tensor(number))) for own, number in ((model, 17), (critic, 0))
    ]  # a critic predicts no tokens
    assert logs[0]["train/tflop"] == pytest.approx(sum(flops) / 1e12)


def test_utilisation_is_that_of_one_device() -> None:
    metrics = {"time/update": 2.0, "train/tokens": 1000.0, "train/tflop": 500.0}
    assert utilisation(metrics, 2, 1e15) == {"train/tokens_per_s": 250.0, "train/mfu": 0.125}
    assert utilisation(metrics, 1, None) == {"train/tokens_per_s": 500.0}
    assert utilisation({"time/update": 2.0}, 1, 1e15) == {}


def test_peaks_are_known_by_name_and_without_sparsity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu")) is None
    for number, (name, peak) in enumerate(
        {"NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA Unheard-Of": None}.items()
    ):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", number)) == peak
    peak_flops.cache_clear()
