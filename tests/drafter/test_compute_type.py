"""On a CPU a head beside a bfloat16 checkpoint computes what it does beside the same weights in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import save_policy
from tests.drafter.test_data import make_module, make_trainer, weights, write_completions
from tests.support.drafters.draft_texts import make_drafter, random_sequence
from tlt_lightning.drafter.data import DrafterDataModule
from tlt_lightning.drafter.packing import packs_of
from tlt_lightning.drafter.target import frozen_dtype
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.trainer import DrafterTrainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same weights, in float32 and in bfloat16, by the name of the type."""
    folder = tmp_path_factory.mktemp("policies")
    save_policy(folder / "bfloat16")
    for name in ("bfloat16", "float32"):
        model = AutoModelForCausalLM.from_pretrained(folder / "bfloat16", dtype=torch.bfloat16)
        save_policy(folder / name)  # its tokenizer
        model.to(getattr(torch, name)).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("bfloat16", "float32")}


def test_beside_a_policy_gradients_and_quality_are_those_of_float32(policies: dict[str, str], tmp_path: Path) -> None:
    gradients, qualities = [], []
    for policy in policies.values():
        drafter = make_drafter(policy)
        trainer = DrafterTrainer(drafter, DrafterBuffer(1 << 20), pack_tokens=128, device=CPU)
        pack = next(packs_of([random_sequence(60)], 128, CPU))
        with trainer.autocast():
            loss, _ = drafter.loss(pack)
            qualities.append(drafter.measure(pack))
        loss.backward()
        gradients.append([parameter.grad for parameter in drafter.parameters() if parameter.requires_grad])
    assert all(torch.equal(half, full) for half, full in zip(*gradients, strict=True))
    assert torch.equal(*qualities)


@pytest.mark.slow
def test_trained_alone_a_head_learns_as_beside_float32(policies: dict[str, str], tmp_path: Path) -> None:
    completions, trained = write_completions(policies["float32"], tmp_path / "completions.jsonl"), []
    for policy in policies.values():
        module = make_module(policy)
        make_trainer(tmp_path, max_epochs=1).fit(module, DrafterDataModule(completions, num_tokens=128))
        trained.append(weights(module))
    half, full = trained
    assert all(torch.equal(half[name], full[name]) for name in full)


def test_a_head_is_exported_in_the_type_of_its_targets_files(policies: dict[str, str], tmp_path: Path) -> None:
    for name, policy in policies.items():
        drafter = make_drafter(policy)
        drafter.compute_on(CPU, is_mixed=False)
        saved = load_file(drafter.export(tmp_path / name) / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, name)}


def test_where_products_run_in_bfloat16_weights_stay_as_they_are() -> None:
    assert frozen_dtype(CPU, is_mixed=True) is None
    assert frozen_dtype(torch.device("cuda"), is_mixed=False) is None
