"""Choose what a head of random weights learns from while it learns to draft.

It begins with short drafts and small packs: at first a head learns by steps, hardly by tokens. What was measured is
tokens per engine step on held-out text, of random heads for the quickstart's 0.8M policy.
"""

import math

from tlt_lightning.drafter.packing import PACK_MULTIPLE

FIRST_DRAFTS = 3
"""Draft length at first.

Of 7 drafts 80 steps on 3 gave 2.06, on 7 1.96, 160 on single ones 1.74: from these a head learns features that cannot
be fed back.
"""

DRAFTS_PER_TOKEN = 1.5
"""Draft length later, for each token per engine step that the head makes; engines ask for hardly more.

Drafts that grow gave 2.84, 3 throughout 2.76, and 7 from 2.5 tokens on 2.86 in 10% more time.
"""

FIRST_PARTS = 4
"""Packs are so many times smaller at first.

After 40 steps packs of 128, 512 and 2,048 tokens gave 1.63, 1.77 and 1.82, and in the 7B shape a step takes the time of
its tokens.
"""

LATER_PARTS = 2
"""The same once drafts are longer than the first ones.

Halves then need 5% more tokens than quarters, whole packs twice as many; half of a step of 1,024 tokens in the 7B shape
is Muon's own work.
"""

RISING_STEPS = 10
"""Training steps over which the learning rate rises: a random head has nothing to lose.

10 gave 1.47 after 40 steps, 50 gave 1.29.
"""


def next_drafts(before: int, acceptance_length: float) -> int:
    """Return the draft length for a head that makes `acceptance_length` tokens per step; it never falls."""
    return max(before, math.ceil(DRAFTS_PER_TOKEN * acceptance_length))


def step_tokens(draft_length: int, pack_tokens: int) -> int:
    """Return the tokens of a training step on drafts of this length, at least `PACK_MULTIPLE`."""
    parts = FIRST_PARTS if draft_length == FIRST_DRAFTS else LATER_PARTS
    return max(PACK_MULTIPLE, pack_tokens // parts // PACK_MULTIPLE * PACK_MULTIPLE)
