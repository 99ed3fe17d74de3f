"""Make and check the arms of several selectors."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from tlt_lightning.arguments import check_distinct, check_list
from tlt_lightning.speculation.strategy import OFF, Drafter, Strategy


def make_arms(num_draft_tokens: Sequence[int], drafters: Sequence[Drafter]) -> tuple[Strategy, ...]:
    """Return `OFF`, then every draft length with every drafter, shorter drafts first.

    Raises:
        TypeError: A draft length is no whole number.
        ValueError: There is no draft length or no drafter, one is named twice, or a length is not positive.
    """
    check_distinct("num_draft_tokens", num_draft_tokens)
    check_list("num_draft_tokens", list(num_draft_tokens), Integral, "whole numbers")
    check_distinct("drafters", drafters)
    if min(num_draft_tokens) < 1:
        raise ValueError(
            f"`num_draft_tokens` lists draft lengths of at least 1, got {list(num_draft_tokens)}; off is always an arm "
            "and is not listed."
        )
    return (OFF, *(Strategy(length, drafter) for length in sorted(num_draft_tokens) for drafter in drafters))
