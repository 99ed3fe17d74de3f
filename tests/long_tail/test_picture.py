import pytest
from matplotlib.figure import Figure

from tlt_lightning.long_tail.picture import draw_drafter

HISTORY = [
    {"speculation/acceptance_length": 1.2, "train/kl": 0.0},
    {"speculation/acceptance_length": 1.3, "train/kl": 0.1, "drafter/acceptance_before": 1.25,
     "drafter/acceptance_after": 1.75, "drafter/published": 1.0, "drafter/version": 4.0,
     "drafter/top1_pos_1": 0.5, "drafter/top1_pos_2": 0.3},
    {"speculation/acceptance_length": 1.8, "train/kl": 0.2, "drafter/acceptance_before": 1.7,
     "drafter/acceptance_after": 1.6, "drafter/published": 0.0, "drafter/version": 4.0,
     "drafter/top1_pos_1": 0.6, "drafter/top1_pos_2": 0.4},
    {"speculation/acceptance_length": 1.9},
]  # fmt: skip


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (drawn.append(figure), save(figure, *args, **kw))
    )
    return drawn


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_acceptance_before_and_after_each_training_is_drawn_with_the_versions(tmp_path, figures):
    draw_drafter(HISTORY, tmp_path / "made" / "drafter.png")
    assert (tmp_path / "made" / "drafter.png").read_bytes()[:4] == b"\x89PNG"
    drawn = lines(figures[0].axes[0])
    assert drawn["held out, before"] == [(2, 1.25), (3, 1.7)]
    assert drawn["published"] == [(2, 1.75)]
    assert drawn["not published"] == [(3, 1.6)]
    assert drawn["measured by the engine"] == [(1, 1.2), (2, 1.3), (3, 1.8), (4, 1.9)]
    assert [(text.get_text(), text.get_position()[0]) for text in figures[0].axes[0].texts] == [("v4", 2)]


def test_agreement_and_drift_stand_below(tmp_path, figures):
    draw_drafter(HISTORY, tmp_path / "drafter.png")
    _, agreement, drift = figures[0].axes
    assert [list(points) for points in lines(agreement).values()][:2] == [[(2, 0.5), (3, 0.6)], [(2, 0.3), (3, 0.4)]]
    assert [(1, 0.0), (2, 0.1), (3, 0.2)] in lines(drift).values()
    assert "reference" in drift.get_ylabel()


def test_without_a_reference_the_measured_drift_is_drawn_and_without_either_nothing(tmp_path, figures):
    draw_drafter([{"speculation/acceptance_length": 2.0, "drafter/policy_drift": 0.3}], tmp_path / "one.png")
    draw_drafter([{"speculation/acceptance_length": 2.0}], tmp_path / "two.png")
    assert "from the first policy" in figures[0].axes[-1].get_ylabel()
    assert (len(figures[0].axes), len(figures[1].axes)) == (2, 1)


def test_many_versions_are_not_all_named(tmp_path, figures):
    row = {"drafter/acceptance_before": 1.0, "drafter/acceptance_after": 2.0, "drafter/published": 1.0}
    draw_drafter([row] * 100, tmp_path / "drafter.png")
    names = [text.get_text() for text in figures[0].axes[0].texts]
    assert names[0] == "v1"
    assert 10 <= len(names) <= 20


def test_a_history_without_acceptance_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`history` has no acceptance to draw"):
        draw_drafter([{"train/kl": 0.1}], tmp_path / "drafter.png")
