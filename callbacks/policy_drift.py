"""See how far the policy has moved since the run began."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from tlt_lightning import RolloutBatch, RolloutCallback


class PolicyDrift(RolloutCallback):
    """Logs `rollout/policy_drift`: the KL of the policy from what it was in the first iteration, in nats a token.

    It is estimated (k3) on the shortest answers of that iteration, which are scored anew in each: in one pass, with the
    logits of `max_tokens` tokens. Nothing else in a run without a reference says how far a draft head has to follow.

    Args:
        max_tokens: Most tokens that are scored, prompts included; at least one answer is.

    Example:
        callbacks+:
          - class_path: tlt_lightning.gallery.policy_drift.PolicyDrift
    """

    def __init__(self, max_tokens: int = 1024) -> None:
        self.max_tokens = max_tokens
        self._answers: dict[str, Tensor] = {}
        self._first: Tensor | None = None  # log-probs of the answers' tokens in the first iteration

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget the run before; a checkpoint's state comes later."""
        if stage == "fit" and not trainer.global_step:
            self._first = None

    @torch.no_grad()
    def on_rollout_scored(self, trainer: L.Trainer, pl_module: Any, batch: RolloutBatch) -> None:
        """Score the answers by the policy of now."""
        if self._first is None:
            self._answers = shortest(batch, self.max_tokens)
            self._first = self._score(trainer, pl_module, batch.temperature)
        difference = self._first - self._score(trainer, pl_module, batch.temperature)
        pl_module.iteration_log.mean("rollout/policy_drift", (difference.neg().expm1() + difference).mean())

    def _score(self, trainer: L.Trainer, pl_module: Any, temperature: float) -> Tensor:
        """Return the log-probs of the answers' tokens, (N,) on the CPU."""
        ids, prompt_lengths, mask = (self._answers[name] for name in ("ids", "prompt_lengths", "mask"))
        with trainer.precision_plugin.forward_context():
            logits = pl_module.policy(input_ids=ids.to(pl_module.device), use_cache=False).logits
        rows, columns = mask.nonzero(as_tuple=True)
        places = prompt_lengths[rows] + columns
        logps = (logits[rows, places - 1].float() / temperature).log_softmax(-1).cpu()
        return logps.gather(-1, ids[rows, places][:, None]).squeeze(-1)

    def state_dict(self) -> dict[str, Any]:
        """Return the answers and their first log-probs."""
        return {"answers": self._answers, "first": self._first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on measuring from where the saved run began."""
        self._answers, self._first = state_dict["answers"], state_dict["first"]


def shortest(batch: RolloutBatch, max_tokens: int) -> dict[str, Tensor]:
    """Return as many of the shortest sequences as have `max_tokens` tokens together, padding included."""
    order = batch.lengths.argsort(stable=True)
    padded = batch.lengths[order] * torch.arange(1, len(order) + 1)
    part = batch.select(order[: max(1, int((padded <= max_tokens).sum()))].tolist())
    mask = part.response_mask.bool()
    return {"ids": part.input_ids, "prompt_lengths": part.prompt_lengths, "mask": mask}
