"""Measure how far the policy's next token is from a teacher's, over the vocabulary and not the sampled token alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_lightning.arguments import Count, Probability, checked
from tlt_lightning.fused.divergence import generalized_jsd


@checked("divergence.")
@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Computes the generalized Jensen-Shannon divergence of policy and teacher at each token (arXiv 2306.13649).

    Args:
        beta: 1 is the reverse KL(policy || teacher), which seeks one of the teacher's ways; 0 the forward KL, which
            covers all of them. Between the two it vanishes at both ends: 0.5 is the one to take, 0.1 is not nearly 0.
        top_k: Tell apart the teacher's likeliest tokens alone; all others together count as one more. It is at most the
            whole divergence, and never negative. None tells all tokens apart.
    """

    beta: Probability = 1.0
    top_k: Count | None = None

    def __call__(self, logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
        """Return the divergence of each row, (N,) in float32; ids that only the wider head has, its padding, are cut.

        Args:
            logits: The policy's. (N, V), with gradient
            teacher_logits: The teacher's for the same tokens. (N, V')
            temperature: Divides the logits of both.
        """
        width = min(logits.shape[-1], teacher_logits.shape[-1])
        pair = logits[:, :width], teacher_logits[:, :width]
        if self.top_k is not None and self.top_k < width:
            kept = pair[1].topk(self.top_k).indices
            pair = _grouped(pair[0], kept, temperature), _grouped(pair[1], kept, temperature)
        return generalized_jsd(*pair, temperature, self.beta)


def _grouped(logits: Tensor, kept: Tensor, temperature: float) -> Tensor:
    """Return logits of the kept tokens and of all others as one, (N, k + 1): their probabilities add up."""
    upcast = logits if logits.dtype == torch.float64 else logits.float()
    others = (upcast / temperature).scatter(-1, kept, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([upcast.gather(-1, kept), temperature * others], -1)
