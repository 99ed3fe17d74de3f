"""Make and check the arms of several selectors."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_lightning.arguments import check_argument
from tlt_lightning.speculation.strategy import OFF, Drafter, Strategy


def make_arms(num_draft_tokens: Sequence[int], drafters: Sequence[Drafter]) -> tuple[Strategy, ...]:
    """Return `OFF`, then every draft length with every drafter, shorter drafts first.

    Raises:
        TypeError: A draft length is no whole number.
        ValueError: There is no draft length or no drafter, or a length is not positive.
    """
    check_argument("num_draft_tokens", num_draft_tokens, Sequence[int])
    check_argument("drafters", drafters, Sequence[str])
    if not num_draft_tokens or not drafters or min(num_draft_tokens) < 1:
        raise ValueError(
            f"`num_draft_tokens` lists draft lengths of at least 1, and `drafters` who drafts, got {num_draft_tokens} "
            f"and {drafters}; off is always an arm and is not listed."
        )
    return (
        OFF,
        *(Strategy(length, drafter) for length in sorted(set(num_draft_tokens)) for drafter in dict.fromkeys(drafters)),
    )
