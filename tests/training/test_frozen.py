"""Weights that are never trained: in no checkpoint, and there again in a run that is resumed from one."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import CriticConfig, LoRA
from tlt_lightning.objectives import PPO

LORA = LoRA(rank=2)


@pytest.mark.slow
@pytest.mark.parametrize("averages", [True, False], ids=["adapters, averaged", "adapters of the critic"])
def test_only_what_is_trained_is_saved_and_the_run_goes_on_from_it(
    averages: bool, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    critic = CriticConfig(path=policy_path, lora=LORA, lr=1e-2)
    settings: dict[str, Any] = {"lora": LORA} if averages else {"objective": PPO(), "critic": critic}

    def run(folder: Path, ckpt_path: Path | None = None) -> tuple[dict[str, Tensor], set[str]]:
        L.seed_everything(5)
        module = make_module(policy_path, **settings)
        callbacks = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)]
        callbacks += [EMAWeightAveraging(decay=0.5)] if averages else []
        trainer = make_trainer(tmp_path, *callbacks, enable_checkpointing=True)
        trainer.fit(module, make_data(prompts_path), ckpt_path=ckpt_path)
        parameters = module.named_parameters(remove_duplicate=False)
        return module.state_dict(), {name for name, parameter in parameters if not parameter.requires_grad}

    whole, frozen = run(tmp_path / "whole")
    path = tmp_path / "whole" / "epoch=0.ckpt"
    saved = torch.load(path, weights_only=True)
    states = [saved[name] for name in ("state_dict", "current_model_state") if name in saved]
    assert len(states) == 1 + averages
    assert frozen
    for state in states:
        assert state.keys() == {name for name in whole if name not in frozen}
    resumed, _ = run(tmp_path / "resumed", path)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_weights_that_somebody_froze_on_the_way_are_saved(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    class Freeze(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            next(pl_module.policy.parameters()).requires_grad_(trainer.current_epoch == 0)

    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    module = make_module(policy_path)
    make_trainer(tmp_path, Freeze(), checkpoints, enable_checkpointing=True).fit(module, make_data(prompts_path))
    assert torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"].keys() == module.state_dict().keys()


def test_a_checkpoint_that_lacks_trained_weights_is_refused(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    make_trainer(tmp_path, ModelCheckpoint(tmp_path, "end"), max_epochs=1, enable_checkpointing=True).fit(
        make_module(policy_path, lora=LORA), make_data(prompts_path)
    )
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    lost, _ = saved["state_dict"].popitem()
    torch.save(saved, tmp_path / "end.ckpt")
    with pytest.raises(ValueError, match=rf"holds other networks than .*, among them '{lost}'"):
        make_trainer(tmp_path).fit(
            make_module(policy_path, lora=LORA), make_data(prompts_path), ckpt_path=tmp_path / "end.ckpt"
        )
