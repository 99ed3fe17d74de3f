"""Freeze the policy that a KL penalty is measured from."""

from __future__ import annotations

from torch import Tensor, nn

from tlt_lightning.policy import load_policy, response_logps
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.sharding.units import Sharding


class Reference:
    """Freezes a model, or the policy with adapters off; no module, hidden from checkpoints.

    Args:
        path: Path or hub name of the model; None takes the policy without its adapters, at no cost in memory.
        attn_implementation: Attention of Hugging Face.
        sharding: How the model is sharded; None leaves it whole.
    """

    def __init__(self, path: str | None, attn_implementation: str, sharding: Sharding | None = None) -> None:
        self.model = None
        if path is not None:
            model = load_policy(path, "reference", attn_implementation=attn_implementation, sharding=sharding)
            self.model = model.eval().requires_grad_(False)

    def logps(self, policy: nn.Module, batch: RolloutBatch) -> Tensor:
        """Return the log-probs of the response tokens, (B, T), on the batch's device."""
        if self.model is not None:
            return response_logps(self.model.to(batch.input_ids.device), batch)[0]
        with policy.disable_adapter():  # type: ignore[operator]
            return response_logps(policy, batch)[0]
