"""What a decision about trained weights says."""

from math import inf

import pytest

from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail.publication import Publication

BEFORE, AFTER = (DraftQuality((length - 1,), (0.5,), (0.75,), (2.0,), 9) for length in (1.5, 1.75))


@pytest.mark.parametrize(("is_published", "in_force"), [(True, 1.75), (False, 1.5)])
def test_the_quality_is_that_of_the_weights_in_force(is_published: bool, in_force: float) -> None:
    metrics = Publication(BEFORE, AFTER, 0.25, 0.1, is_published, has_diverged=False).metrics()
    assert metrics["drafter/acceptance_length"] == in_force
    assert (metrics["drafter/acceptance_before"], metrics["drafter/acceptance_after"]) == (1.5, 1.75)
    assert (metrics["drafter/acceptance_gain"], metrics["drafter/acceptance_gain_bound"]) == (0.25, 0.1)
    assert (metrics["drafter/published"], metrics["drafter/started_over"]) == (is_published, 0.0)


def test_a_bound_that_a_single_text_does_not_give_is_not_logged() -> None:
    metrics = Publication(BEFORE, AFTER, 0.25, -inf, is_published=False, has_diverged=True).metrics()
    assert "drafter/acceptance_gain_bound" not in metrics
    assert metrics["drafter/started_over"] == 1.0
