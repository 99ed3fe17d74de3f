"""One sequence that a drafter can be trained on: its tokens, and the target's hidden states that it reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class DraftSequence:
    """A prompt with its response, as the target saw it. All tensors lie on one device.

    Args:
        input_ids: Prompt, then response. (n,), int64
        states: Hidden states of the target at the drafter's layers, side by side; layer id `i` is the input of decoder
            layer `i`. (n, 3 * H), bfloat16
        last_states: Input of the target's final norm; what the target predicts follows from it. (n, H), bfloat16
        prompt_length: Tokens of the prompt.
        policy_version: Version of the weights that the states come from.
    """

    input_ids: Tensor
    states: Tensor
    last_states: Tensor
    prompt_length: int
    policy_version: int = 0

    def __post_init__(self) -> None:
        lengths = {len(self.input_ids), len(self.states), len(self.last_states)}
        if len(lengths) > 1:
            raise ValueError(
                f"`input_ids`, `states` and `last_states` must cover the same tokens, got {len(self.input_ids)}, "
                f"{len(self.states)} and {len(self.last_states)}."
            )
        if not 0 < self.prompt_length <= len(self.input_ids):
            raise ValueError(
                f"`prompt_length` must be in [1, {len(self.input_ids)}], the tokens there are, got "
                f"{self.prompt_length}."
            )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def nbytes(self) -> int:
        """Memory of the three tensors."""
        return self.input_ids.nbytes + self.states.nbytes + self.last_states.nbytes
