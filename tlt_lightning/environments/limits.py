"""Limit conversations with an environment."""

from dataclasses import dataclass

from tlt_lightning.arguments import Count, Positive, checked


@checked("turns.")
@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """Limits a conversation with an environment; all of its tokens count in `sampling.max_tokens`.

    Args:
        most: Turns of the policy.
        tokens: Tokens that it may write in a turn; None is what is left of all.
        seconds: Time of one call of an environment.
        waits: The engine stands still while an environment answers: for environments that answer at once, whose runs
            are then the same to the bit. Without it a response's neighbours in a batch depend on the clock.
    """

    most: Count = 8
    tokens: Count | None = None
    seconds: Positive = 10.0
    waits: bool = False
