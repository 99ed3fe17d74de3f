from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.gallery.length_histogram import LengthHistogram, draw


def make_rollouts(iteration: int) -> list[Any]:
    return [make_rollout(0.0, length=length) for length in (1, 5, 40, 300)] + [make_rollout(0.0, 512, cut=True)]


def test_draws_in_its_turn(tmp_path: Path) -> None:
    callback = LengthHistogram(str(tmp_path / "lengths"), every_n_iterations=2)
    make_trainer(tmp_path, [callback]).fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts))
    assert [file.name for file in (tmp_path / "lengths").iterdir()] == ["lengths_00002.png"]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[7], [7, 7, 7], [1, 2, 3], [3, 30_000]])
def test_any_lengths_can_be_drawn(tmp_path: Path, lengths: list[int]) -> None:
    draw([make_rollout(0.0, length) for length in lengths], tmp_path / "lengths.png", "title")
    pixels = matplotlib.image.imread(tmp_path / "lengths.png")[..., :3]
    assert (abs(pixels - [0.0, 0.447, 0.698]).max(-1) < 0.02).any()  # bars of finished responses, in blue


def test_truncated_responses_have_their_own_colour(tmp_path: Path) -> None:
    for name, cut in (("cut", True), ("finished", False)):
        draw([make_rollout(0.0, 8), make_rollout(0.0, 64, cut=cut)], tmp_path / f"{name}.png", "title")
    pixels = {name: matplotlib.image.imread(tmp_path / f"{name}.png")[..., :3] for name in ("cut", "finished")}
    orange = {name: (abs(values - [0.835, 0.369, 0.0]).max(-1) < 0.02).any() for name, values in pixels.items()}
    assert orange == {"cut": True, "finished": False}


def test_validation_is_not_drawn(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [LengthHistogram(str(tmp_path / "lengths"), every_n_iterations=1)])
    trainer.validate(LoggingModule(), datamodule=RolloutLoop(make_rollouts), verbose=False)
    assert not (tmp_path / "lengths").exists()


def test_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="`every_n_iterations` must be at least 1, got 0"):
        LengthHistogram("unused", every_n_iterations=0)
