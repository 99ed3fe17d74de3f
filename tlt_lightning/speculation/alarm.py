"""Keep a dead drafter from looking like a healthy, slow run."""

import logging
from collections import deque

log = logging.getLogger(__name__)

FLOOR = 0.01
"""Share of verifications that must have accepted their first draft."""


class AcceptanceAlarm:
    """Rings when next to nothing a learned drafter proposes is accepted.

    Weights that never arrived, hidden states of the wrong layers or a broken cache all show as an acceptance of zero,
    and as nothing else: the output stays right and only slow. Once it rings the drafter stays off until `reset`.

    Args:
        window: Verifications (of one request in one step) that are looked at together.
    """

    def __init__(self, window: int = 512) -> None:
        self.window = window
        self.is_ringing = False
        self.num_rung = 0
        self._steps: deque[tuple[int, int]] = deque()
        self._verified, self._accepted = 0, 0

    def observe(self, verified: int, accepted: int) -> None:
        """Count `verified` requests with learned drafts in a step; `accepted` kept their first."""
        if self.is_ringing:
            return  # drafts that were under way when it rang
        self._steps.append((verified, accepted))
        self._verified += verified
        self._accepted += accepted
        while self._verified - self._steps[0][0] >= self.window:
            verified, accepted = self._steps.popleft()
            self._verified -= verified
            self._accepted -= accepted
        if self._verified >= self.window and self._accepted < FLOOR * self._verified:
            self.is_ringing = True
            self.num_rung += 1
            log.warning(
                "The draft head is switched off: %d of its last %d drafts were accepted. Responses still follow the "
                "policy exactly, only slower. A head that has hardly been trained does that; otherwise it belongs to "
                "another policy, or it overflows. The next weights are tried again.",
                *(self._accepted, self._verified),
            )

    def reset(self) -> None:
        """Stop ringing and forget, because the weights of drafter or policy have changed."""
        self.is_ringing = False
        self._steps.clear()
        self._verified = self._accepted = 0
