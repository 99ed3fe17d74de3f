"""Compose an objective from four pieces and optional penalties."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.arguments import NotNegative, check_argument
from tlt_lightning.objectives.advantages import AdvantageEstimator, BestOfGroup, GroupNormalized
from tlt_lightning.objectives.aggregation import Aggregation, TokenMean, token_mean
from tlt_lightning.objectives.base import Advantages, ObjectiveOutput, PolicyObjective, Reduce, fill, require, upcast
from tlt_lightning.objectives.correction import Level, MismatchCorrection, TruncatedImportance, importance_weights
from tlt_lightning.objectives.kl import KLPenalty, k3
from tlt_lightning.objectives.proximal import BehaviourPolicy, OldPolicy, ProximalPolicy
from tlt_lightning.objectives.surrogates import ClippedRatio, Surrogate
from tlt_lightning.rollout import RolloutBatch


@dataclass(kw_only=True)
class ComposedObjective(PolicyObjective):
    """Composes an objective from four pieces, by default GRPO's; a named objective says in what it differs.

    Args:
        advantage: Turns rewards into advantages.
        surrogate: The policy loss of each token.
        aggregation: Turns the losses of tokens into one.
        correction: Weighs tokens for the mismatch between engine and trainer; null is off. On in every named
            objective, because the mismatch is there in every run and silently harms some.
        proximal: The policy that the ratio is taken to, and so clipped against; null is `OldPolicy`, and under an
            asynchronous schedule `BehaviourPolicy`.
        loss_kl: KL penalty added to the loss of each token; null is off, as in most recipes for reasoning. Which of the
            two KLs it descends is the estimator's: K2 the reverse one, K3 the forward one, K1 none.
        reward_kl: KL penalty taken from the rewards, as in PPO for preferences; null is off.
        entropy_coef: Weight of the entropy bonus, the mean entropy per token whatever the aggregation; 0 is off.
        imitation: Imitates the best responses of each group besides, by a small `coef`; null is off.
    """

    advantage: AdvantageEstimator = field(default_factory=GroupNormalized)
    surrogate: Surrogate = field(default_factory=ClippedRatio)
    aggregation: Aggregation = field(default_factory=TokenMean)
    correction: MismatchCorrection | None = field(default_factory=TruncatedImportance)
    proximal: ProximalPolicy | None = None
    loss_kl: KLPenalty | None = None
    reward_kl: KLPenalty | None = None
    entropy_coef: NotNegative = 0.0
    imitation: BestOfGroup | None = None

    def __post_init__(self) -> None:
        for each in fields(self):  # a subclass's too, whose constructor is its own
            check_argument(each.name, getattr(self, each.name), each.type)
        if self.advantage.needs_critic != self.needs_critic:
            has, trains = ("a", "none") if self.advantage.needs_critic else ("no", "one")
            raise ValueError(
                f"`advantage` {type(self.advantage).__name__} needs {has} critic, and {type(self).__name__} trains "
                f"{trains}: `GAE` is for `PPO`, and others, as `GroupNormalized`, for other objectives. A recipe's "
                "`advantage` stays when only `class_path` is changed."
            )

    @property
    def needs_reference(self) -> bool:
        return self.loss_kl is not None or self.reward_kl is not None

    @property
    def needs_old_logps(self) -> bool:
        """True if a KL in the reward compares them with the reference."""
        return self.reward_kl is not None

    @property
    def min_group_size(self) -> int:
        return self.advantage.min_group_size

    @property
    def needs_entropy_grad(self) -> bool:
        return self.entropy_coef != 0

    @property
    def learns_off_policy(self) -> bool:
        """True if a correction weighs tokens by their age."""
        return self.correction is not None

    @override
    def clips_behaviour(self, *, asynchronous: bool) -> bool:
        return self.surrogate.has_ratio and isinstance(self._proximal(asynchronous), BehaviourPolicy)

    def _proximal(self, asynchronous: bool) -> ProximalPolicy:
        return self.proximal or (BehaviourPolicy() if asynchronous else OldPolicy())

    @property
    def length_limits(self) -> dict[str, int]:
        limit = self.aggregation.max_tokens
        return {} if limit is None else {"aggregation.max_tokens": limit}

    def shape_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards that become advantages, (B,)."""
        return batch.rewards

    def advantages(self, batch: RolloutBatch, reduce: Reduce) -> Advantages:
        """Return the advantages of the shaped rewards, less the KL penalty in them."""
        mask = batch.response_mask.bool()
        token_rewards = torch.zeros_like(upcast(batch.rollout_logps))
        if self.reward_kl is not None:
            old_logps = require(batch.old_logps, "old_logps", "a KL in the reward compares it with the reference")
            ref_logps = require(batch.ref_logps, "ref_logps", "`reward_kl` is set")
            token_rewards = -self.reward_kl(fill(old_logps, mask), fill(ref_logps, mask))
        rewards = self.shape_rewards(batch)
        advantages, returns = self.advantage(batch, rewards, token_rewards, reduce)
        if self.imitation is not None:
            advantages = advantages + self.imitation(batch, rewards, token_rewards, reduce)[0]
        return advantages, returns

    def loss(self, batch: RolloutBatch, logps: Tensor, entropy: Tensor, values: Tensor | None) -> ObjectiveOutput:
        """Return the loss of one micro-batch, with metrics of the policy and of the mismatch."""
        mask = batch.response_mask.bool()
        logps, entropy, rollout_logps = fill(logps, mask), fill(entropy, mask), fill(batch.rollout_logps, mask)
        old_logps = fill(require(batch.old_logps, "old_logps", "the ratio is taken against it"), mask)
        advantages = fill(require(batch.advantages, "advantages", "the loss weighs tokens by them"), mask)
        proximal_logps, correction = old_logps, self.correction
        if self.surrogate.has_ratio:
            proximal_logps = self._proximal(batch.asynchronous)(old_logps, rollout_logps)
        if correction is not None and self.clips_behaviour(asynchronous=batch.asynchronous):
            correction = TruncatedImportance()  # of 1: the ratio makes up for the age, token by token

        losses, clipped = self.surrogate(logps, proximal_logps, advantages, mask)
        if losses.shape != mask.shape:
            raise ValueError(
                f"`{type(self.surrogate).__name__}` returned a loss of shape {tuple(losses.shape)}, which would be "
                f"spread over the tokens: return one for each token, {tuple(mask.shape)}."
            )
        if correction is not None:
            losses = losses * correction(proximal_logps, rollout_logps, mask)
        if self.loss_kl is not None:
            ref_logps = require(batch.ref_logps, "ref_logps", "`loss_kl` is set")
            losses = losses + self.loss_kl(logps, fill(ref_logps, mask))
        loss = self.aggregation(losses, batch)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * token_mean(entropy, batch)

        start = old_logps if self.needs_critic else proximal_logps  # `target_kl` stops no iteration for its text's age
        with torch.no_grad():
            metrics = {
                "train/entropy": token_mean(entropy, batch),
                "train/clip_fraction": token_mean(clipped.to(logps.dtype), batch),
                "train/approx_kl": token_mean(k3(start, logps), batch),
                **_mismatch(batch, logps, entropy, old_logps, rollout_logps, correction),
            }
            if batch.ref_logps is not None:
                metrics["train/kl"] = token_mean(k3(logps, fill(batch.ref_logps, mask)), batch)
        return ObjectiveOutput(loss, metrics)


def _mismatch(
    batch: RolloutBatch,
    logps: Tensor,
    entropy: Tensor,
    old_logps: Tensor,
    rollout_logps: Tensor,
    correction: MismatchCorrection | None,
) -> dict[str, Tensor]:
    """Return how far the engine's log-probs are from the policy's, and how the correction weighs tokens for it."""
    mask = batch.response_mask.bool()
    level: Level = "token" if correction is None else correction.level
    ratio = importance_weights(old_logps, rollout_logps, mask, level)
    surprise = -logps - entropy  # 0 in the mean for tokens drawn from this very policy
    metrics = {
        "mismatch/kl": token_mean(k3(rollout_logps, old_logps), batch),
        "mismatch/logp_abs_diff": token_mean((old_logps - rollout_logps).abs(), batch),
        "mismatch/ratio_max": ratio.max(),
        "mismatch/surprise": token_mean(surprise, batch),
        "mismatch/surprise_square": token_mean(surprise.square(), batch),
    }
    if correction is not None:
        weights = correction(old_logps, rollout_logps, mask)  # how old the text is, whoever makes up for it
        metrics["mismatch/is_weight_mean"] = token_mean(weights, batch)
        metrics["mismatch/is_weight_square"] = token_mean(weights.square(), batch)
        metrics["mismatch/truncated"] = token_mean((weights != ratio).to(logps.dtype), batch)
    return metrics
