"""Compare the engine's log-probs with the trainer's, to find wrong weights or kernels."""

import logging
from math import sqrt

from torch import Tensor

from tlt_lightning.engine.architectures import WAY_OUT

log = logging.getLogger(__name__)

TOLERANCES = {"float32": 5e-3, "bfloat16": 0.1, "fp8": 0.4}
"""Bound the mean absolute difference of token log-probs, in nats, by the coarser type in use.

Right engines stay below a tenth of it in 16 bit and more: 2e-6 in float32, some 0.01 in bfloat16. Experts in a wrong
layout differ by 0.02 in a tiny random model, attention dropout by 0.1. In 8 bit a trained tiny model differs by 0.005,
one of large random weights by 0.3.
"""

LOUD_KL, LOUD_KL_8_BIT = 0.02, 0.1
"""Warn above this `mismatch/kl` of an iteration, in nats a token; bfloat16 alone makes up to 0.005."""

_CAUSES = f"vLLM may not run this architecture rightly, or a callback changed the policy unseen. {WAY_OUT}"
_CAUSES_OF_8_BIT = (
    "8 bits may be too few for this policy: `python -m benchmarks mismatch` finds layers to keep in 16 bit "
    "(`quantization.layers_in_16_bit`), and with `quantization: null` the run shows whether it is they. Otherwise "
)


def check_same_logps(engine: Tensor, trainer: Tensor, mask: Tensor, *, dtype: str, when: str) -> float:
    """Return the mean absolute difference of log-probs.

    Args:
        engine: Log-probs of tokens when they were sampled, (B, T).
        trainer: Those of the same tokens under the policy, (B, T).
        mask: 1 at tokens of a response, (B, T).
        dtype: The coarser of the types that engine and trainer compute in; bfloat16 stands for float16 too, and a type
            of 8 bit for an engine that quantizes.
        when: What has just happened, for the message.

    Raises:
        RuntimeError: The difference is above the tolerance.
    """
    differences = (trainer.float().cpu() - engine.cpu())[mask.cpu() > 0].abs()
    mean, limit = float(differences.mean()), TOLERANCES[dtype]
    if not mean <= limit:
        raise RuntimeError(
            f"{when} the engine does not compute with the policy's weights: log-probs of {len(differences)} tokens "
            f"differ by {mean:.2g} on average and {float(differences.max()):.2g} at most, where {limit} on average is "
            f"allowed in {dtype}. {_causes(dtype)}."
        )
    return mean


def warn_of_mismatch(kl: float, iteration: int, dtype: str = "bfloat16") -> None:
    """Warn if an iteration's `mismatch/kl` is larger than rounding to `dtype`, the engine's, explains."""
    limit = LOUD_KL_8_BIT if dtype == "fp8" else LOUD_KL
    if kl > limit:
        log.warning(
            "Iteration %d: `mismatch/kl` is %.3g nats a token, where rounding explains %.2g: the engine samples from "
            "another policy than the one that is trained. %s.",
            *(iteration, kl, limit, _causes(dtype)),
        )


def warn_of_surprise(metrics: dict[str, float], iteration: int) -> None:
    """Warn if an iteration's tokens were not drawn as their log-probs say; take the mean square out of `metrics`.

    Under p a token's surprise, -log p - H(p), is 0 in the mean whatever came before. So over n tokens the mean is 0
    within a standard error of s / sqrt(n), where s^2 is the mean square. Tokens drawn from a q beside p, that of older
    weights or of another precision, move it by at most s sqrt(chi^2(q | p)) (Cauchy-Schwarz), about s sqrt(2 KL). Five
    errors and that bound are left only by a sampler that draws from something else than it gives log-probs of. But s^2
    knows nothing of tokens too rare to be drawn: a probability of 12 / n stays undrawn once in 160,000 iterations, and
    has an entropy of some 20 nats times itself. A policy that is sure of nearly every token has little else.
    """
    square, tokens = metrics.pop("mismatch/surprise_square", 0.0), metrics.get("rollout/tokens", 0.0)
    kl = max(0.0, metrics.get("mismatch/kl", 0.0)) + max(0.0, metrics.get("train/approx_kl", 0.0))
    if not tokens:
        return
    bound = sqrt(square) * (5 / sqrt(tokens) + sqrt(2 * kl))
    if -bound - 12 * 20 / tokens <= metrics.get("mismatch/surprise", 0.0) <= bound:
        return
    log.warning(
        "Iteration %d: `mismatch/surprise` is %.3g nats a token, where tokens drawn from the policy leave about 0: the "
        "responses are not samples of it, and learning from them is biased. Leave `engine.speculation` out: if that "
        "ends it, the verification of drafts is at fault, else the engine's sampler is.",
        iteration,
        metrics["mismatch/surprise"],
    )


def _causes(dtype: str) -> str:
    """Return what may be wrong with an engine of this type, and the ways out."""
    return _CAUSES_OF_8_BIT + _CAUSES if dtype == "fp8" else _CAUSES
