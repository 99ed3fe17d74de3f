"""Six lines of Python train: whatever they leave out has a default that suits the machine and the data."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from datasets import Dataset

from tests.support.rl_runs import NeverLoaded
from tlt_lightning import LoRA, RLModule, RolloutDataModule, Sampling, TransformersEngine
from tlt_lightning.checks import context_of
from tlt_lightning.engine import usual
from tlt_lightning.objectives import GRPO
from tlt_lightning.training.described import describe

ROWS = [{"prompt": f"{number} + {number} = " + "1 " * number, "answer": str(2 * number)} for number in range(1, 9)]
QUIET: dict[str, Any] = {"enable_model_summary": False, "accelerator": "cpu"}


def right(prompt: str, response: str, row: dict[str, Any]) -> float:
    return float(row["answer"] in response)


@pytest.mark.parametrize("dataset", [ROWS, Dataset.from_list(ROWS)], ids=["rows", "dataset"])
def test_six_lines_train_show_report_and_save(
    dataset: Any, policy_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(usual.importlib.util, "find_spec", lambda name: None)  # vLLM is tried in another test
    data = RolloutDataModule(train=dataset, rewards=[right], sampling=Sampling(max_tokens=4), prompts_per_iteration=2)
    module = RLModule(policy_path)
    L.Trainer(max_epochs=1, **QUIET).fit(module, data)
    assert isinstance(data.engine, TransformersEngine)
    assert isinstance(module.objective, GRPO)
    assert "iteration 1/1  reward " in capsys.readouterr().out
    assert json.loads((tmp_path / "outputs/summary.json").read_text())["iterations"] == 1
    assert (tmp_path / "outputs/checkpoints/last.ckpt").is_file()


def test_responses_of_a_short_context_take_half_of_it(policy_path: str, tmp_path: Path) -> None:
    data = RolloutDataModule(train=ROWS, rewards=[right], engine=TransformersEngine(), prompts_per_iteration=2)
    data.engine.generate = interrupt  # type: ignore[method-assign]  # half a context of text takes minutes
    trainer = L.Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, **QUIET)
    with pytest.raises(InterruptedError):
        trainer.fit(RLModule(policy_path), data)
    assert data.sampling == Sampling(max_tokens=context_of(policy_path) // 2)
    assert data.hparams["sampling"] == describe(data.sampling)  # to which a run that resumes with `data` is compared


def interrupt(*_: Any, **__: Any) -> Any:
    raise InterruptedError


@pytest.mark.parametrize(("lora", "lr"), [(None, 1e-6), (LoRA(rank=2), 1e-5)])
def test_the_optimizer_that_is_not_named_has_the_fields_usual_rate(
    lora: LoRA | None, lr: float, policy_path: str
) -> None:
    module = RLModule(policy_path, lora=lora)
    module.configure_model()
    optimizer = module.configure_optimizers()
    assert {name: optimizer.defaults[name] for name in ("lr", "weight_decay")} == {"lr": lr, "weight_decay": 0.0}


@pytest.mark.parametrize(("room", "most"), [(None, 32), (14, 14)])
def test_room_for_prompts_is_read_from_the_data_up_to_the_policys_context(
    room: int | None, most: int, policy_path: str, tmp_path: Path
) -> None:
    class Engine(TransformersEngine):
        def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
            super().setup(policy, max_model_len=max_model_len, seed=seed)
            self.length = max_model_len

    engine = Engine()
    data = RolloutDataModule([right], ROWS, engine=engine, sampling=Sampling(max_tokens=4), max_prompt_tokens=room)
    data.prompts_per_iteration = 1
    L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET).fit(
        RLModule(policy_path), data
    )
    longest = max(len(prompt.ids) for prompt in data.train_prompts)
    assert longest <= most
    assert engine.length == (longest if room is None else room) + 4


def test_a_response_that_leaves_no_room_in_the_context_is_refused_before_the_data_is_read(
    policy_path: str, tmp_path: Path
) -> None:
    data = RolloutDataModule([right], ROWS, engine=NeverLoaded(), sampling=Sampling(max_tokens=100_000))
    with pytest.raises(ValueError, match=r"context of \d+ tokens"):
        L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET).fit(
            RLModule(policy_path), data
        )
