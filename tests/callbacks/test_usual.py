"""A run that names no callbacks has those that everybody wants, and may do without each."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tlt_lightning import CompletionsWriter, RolloutProgressBar, RunReport
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.callbacks.usual import usual_callbacks
from tlt_lightning.gallery.why_nothing_is_learned import WhyNothingIsLearned


def usual(root: Path | None, **settings: Any) -> list[L.Callback]:
    return usual_callbacks(L.Trainer(accelerator="cpu", default_root_dir=root, **settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [RolloutProgressBar, RunReport, IterationCheckpoint]),
        ({"enable_progress_bar": False}, [RunReport, IterationCheckpoint]),
        ({"logger": False}, [RolloutProgressBar, IterationCheckpoint]),
        ({"enable_checkpointing": False}, [RolloutProgressBar, RunReport]),
        ({"callbacks": [RolloutProgressBar(show_completions=4), ModelCheckpoint(every_n_epochs=5)]}, [RunReport]),
    ],
)
def test_what_a_trainer_was_not_given_is_brought_unless_it_is_switched_off(
    settings: dict[str, Any], expected: list[type], tmp_path: Path
) -> None:
    assert [type(callback) for callback in usual(tmp_path, **settings)] == [WhyNothingIsLearned, *expected]


def test_a_prediction_is_written_down_beside_what_a_checkpoint_of_a_fit_asks_for(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path)
    trainer.state.fn = "predict"  # type: ignore[assignment]
    assert [type(callback) for callback in usual_callbacks(trainer)][2:4] == [RunReport, CompletionsWriter]


def test_they_write_to_the_trainers_folder_or_to_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root, folder in ((tmp_path / "run", tmp_path / "run"), (None, tmp_path / "outputs")):
        *_, report, checkpoint = usual(root)
        assert (report.dirpath, checkpoint.dirpath) == (folder, str(folder / "checkpoints"))  # type: ignore[attr-defined]


def test_lightning_has_no_callback_to_override_and_to_say_so(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path)
    brought = usual_callbacks(trainer)
    assert [old for old in trainer.callbacks for new in brought if isinstance(new, type(old))] == []  # type: ignore[attr-defined]
