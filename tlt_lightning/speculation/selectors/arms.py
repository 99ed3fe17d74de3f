"""Building and checking the arms that several selectors share."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_lightning.speculation.strategy import OFF, Drafter, Strategy


def make_arms(num_draft_tokens: Sequence[int], drafters: Sequence[Drafter]) -> tuple[Strategy, ...]:
    """`OFF`, then every draft length with every drafter, shorter drafts first.

    Raises:
        ValueError: If there is no draft length or no drafter, one is named twice, or a length is not positive.
    """
    check_distinct("num_draft_tokens", num_draft_tokens)
    check_distinct("drafters", drafters)
    if min(num_draft_tokens) < 1:
        raise ValueError(
            f"`num_draft_tokens` lists draft lengths of at least 1, got {list(num_draft_tokens)}; off is always an arm "
            "and is not listed."
        )
    return (OFF, *(Strategy(length, drafter) for length in sorted(num_draft_tokens) for drafter in drafters))


def check_distinct(name: str, values: Sequence[object]) -> None:
    """Raise ValueError that names argument `name` if `values` is empty or repeats itself."""
    if not values:
        raise ValueError(f"`{name}` is empty; list at least one value.")
    if len(set(values)) < len(values):
        raise ValueError(f"`{name}` must not repeat a value, got {list(values)}.")


def check_share(name: str, value: float) -> None:
    """Raise ValueError that names argument `name` unless `value` is in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` is a share in [0, 1), got {value}.")


def check_at_least(name: str, value: float, minimum: float) -> None:
    """Raise ValueError that names argument `name` if `value` is below `minimum`."""
    if not value >= minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")
