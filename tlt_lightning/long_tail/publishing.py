"""Publish trained weights of a drafter if they draft better than those that are served.

Training goes on from the trained weights, published or not. A decision compares both on the same held-out text: tokens
per engine step, expected under the engine's own rule. Texts of one prompt say much the same, so the error of the gain
is taken over prompts, and evidence is pooled over decisions until it suffices.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import fill_pack, plan_packs
from tlt_lightning.drafter.quality import DraftQuality, quality_of
from tlt_lightning.guard.files import set_aside
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.host_copy import HostCopy
from tlt_lightning.long_tail.buffer import prompt_key, text_key
from tlt_lightning.long_tail.trainer import DrafterTrainer

log = logging.getLogger(__name__)

NUM_CLUSTERS = 128
"""Divisor of the prompts' hashes: ranks sum so many numbers, however many prompts there are."""
ENOUGH = 8_192
"""Tokens of held-out text that a rank judges by; more if one text of each prompt, or `_FEWEST`, have more."""
_FEWEST = 4  # texts of a single prompt: the margin of two is more than twice as wide
_POOLED = 4  # decisions whose evidence counts; what was measured earlier is of another drafter
_Z = 1.2816  # one-sided 90%
_LOST = 0.5  # share of the published gain over no drafts; trained weights without it have diverged
_PATIENCE = 3  # decisions in a row


@dataclass(frozen=True, slots=True)
class PublishDecision:
    """Holds the gain of training since the last decision about publishing, and this decision.

    Args:
        before: Quality of the published weights on held-out text of now.
        after: Quality of the trained weights on the same text.
        gain: Tokens per engine step that the trained weights gain, on all pooled text.
        bound: Lower bound of that gain, 90% certain; minus infinity with a single text.
        is_published: True if the trained weights are in force from now on.
        has_diverged: True if training starts over from the published weights.
    """

    before: DraftQuality
    after: DraftQuality
    gain: float
    bound: float
    is_published: bool
    has_diverged: bool

    @property
    def quality(self) -> DraftQuality:
        """Quality of the weights in force."""
        return self.after if self.is_published else self.before

    def metrics(self) -> dict[str, float]:
        """Return the numbers under the loggers' names."""
        metrics = {
            **self.quality.metrics(),
            "drafter/acceptance_before": self.before.acceptance_length,
            "drafter/acceptance_after": self.after.acceptance_length,
            "drafter/acceptance_gain": self.gain,
            "drafter/published": float(self.is_published),
            "drafter/started_over": float(self.has_diverged),
        }
        return metrics if self.bound == -inf else {**metrics, "drafter/acceptance_gain_bound": self.bound}


class DrafterPublisher:
    """Keeps the published weights of the drafter that `trainer` trains, and decides on new ones.

    Args:
        trainer: Trains the drafter.
        expected_speedup: Tells how many times as fast as plainly a head makes decoding at best, None if that is not
            known: one that cannot pay is not published.
    """

    def __init__(
        self, trainer: DrafterTrainer, expected_speedup: Callable[[DraftQuality], float | None] = lambda quality: None
    ) -> None:
        self.trainer = trainer
        self.expected_speedup = expected_speedup
        self.version = 0
        """Number of publications; 0 is the head that the run began with."""
        self.data_version = -1
        """Newest policy version whose hidden states the published weights learned from; -1 for none."""
        self.quality: DraftQuality | None = None
        """Quality of the published weights at the last decision; None before the first."""
        self._num_lost = 0  # decisions in a row in which the trained weights were far worse
        self._evidence: list[Tensor] = []  # of each decision since the last publication: (2, NUM_CLUSTERS, 2, K)
        self._published, self._candidate = HostCopy(), HostCopy()
        self._published.fill(trainer.weights().items())

    def publish_if_better(self) -> PublishDecision | None:
        """Publish the trained weights if they draft better; a collective.

        None if nothing was trained since the last decision, or if there is no held-out text to decide by.
        """
        if not self.trainer.num_pending:
            return None
        held_out = held_out_sample(self.trainer.buffer.held_out)
        clusters = prompt_clusters(held_out, self.trainer.sum_over_ranks)
        after = self._measure(held_out, clusters)
        if after[:, 1].sum():
            with self.loaded():
                before = self._measure(held_out, clusters)
            return self._decide(before, after)
        log.warning("There is no held-out text to judge the drafter by: its weights wait for the next iteration.")
        return None

    def _decide(self, before: Tensor, after: Tensor) -> PublishDecision:
        """Judge the trained weights; publish them, or start over from the published ones where they are lost."""
        trainer, decision = self.trainer, self._judge(before, after)
        if decision.is_published:
            self._published, self._candidate = self._candidate, self._published
            self.version += 1
            self.data_version = trainer.seen_version
        elif decision.has_diverged:
            log.warning(
                "The drafter that is trained gains less than half of what the published one does: it has diverged and "
                "starts over from the published weights. Lower its learning rate."
            )
            trainer.load_weights(self._published.tensors)
            trainer.renew_optimizer()
        if decision.is_published or decision.has_diverged:
            self._evidence, self._num_lost = [], 0
        trainer.num_pending = 0
        self.quality = decision.quality
        return decision

    def _judge(self, before: Tensor, after: Tensor) -> PublishDecision:
        """Compare what was measured of the published and the trained weights, with what was measured earlier."""
        trainer = self.trainer
        pair = torch.stack([before, after])[:, :, :2]  # drafts accepted, and engine steps
        if trainer.learns_first_drafts:  # what was measured earlier is of a far worse one
            self._evidence = []
        self._evidence = [*self._evidence, pair][-_POOLED:]
        gain, error = gain_and_margin(torch.stack(self._evidence).sum(0))
        old, new = (quality_of(sums.sum(0)) for sums in (before, after))
        trainer.note_quality(new.acceptance_length)
        is_better = gain > error and new.acceptance_length > old.acceptance_length
        speedup = self.expected_speedup(new)
        # The engines of other ranks are timed by other clocks: where one head may pay for one of them, it is for all.
        num_paid = int(trainer.sum_over_ranks(torch.tensor(speedup is None or speedup > 1, dtype=torch.int64)))
        is_published = is_better and num_paid > 0
        is_lost = new.acceptance_length - 1 < (1 - _LOST) * (old.acceptance_length - 1)
        self._num_lost = self._num_lost + 1 if is_lost else 0
        slow = "" if num_paid or speedup is None else f" The engine would be {speedup:.2f} times as fast with it."
        rank_zero_info(
            "The draft head %s: %.3f tokens per step on held-out text (the one in use: %.3f).%s",
            "is now used" if is_published else "is trained on before it is used",
            new.acceptance_length,
            old.acceptance_length,
            slow,
        )
        return PublishDecision(old, new, gain, gain - error, is_published, self._num_lost == _PATIENCE)

    def _measure(self, held_out: Sequence[PolicyText], clusters: Sequence[int]) -> Tensor:
        """Measure the weights of now on held-out text, by cluster: (NUM_CLUSTERS, 6, K)."""
        trainer, num_tokens = self.trainer, self.trainer.pack_tokens
        sums = torch.zeros(NUM_CLUSTERS, 6, trainer.drafter.num_draft_tokens, dtype=torch.float64)
        with trainer.autocast():
            for plan in plan_packs([len(text) for text in held_out], num_tokens):
                pieces = [(held_out[piece.sequence], piece) for piece in plan]
                index = torch.tensor([clusters[piece.sequence] for piece in plan])
                sums.index_add_(0, index, trainer.drafter.measure(fill_pack(pieces, num_tokens, trainer.device)))
        return trainer.sum_over_ranks(sums)

    def forget_policy(self) -> None:
        """Forget texts and versions of the policy of an earlier run; the weights stay."""
        self.trainer.buffer.clear()
        self.trainer.seen_version = self.data_version = -1
        self.trainer.num_pending = 0

    # What travels

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the published weights for the engine, and the policy's rows if the drafter has some."""
        for name, tensor in self.trainer.drafter.trainable_tensors():
            yield name, self._published.tensors.get(name, tensor)

    @contextmanager
    def loaded(self) -> Iterator[DrafterModule]:
        """Lend the drafter with the published weights; put the trained ones back afterwards."""
        self._candidate.fill(self.trainer.weights().items())
        self.trainer.load_weights(self._published.tensors)
        try:
            yield self.trainer.drafter
        finally:
            self.trainer.load_weights(self._candidate.tensors)

    def export(self, folder: Path) -> None:
        """Write the published head to `folder`/final, or warn that there is none; an earlier one is set aside."""
        if self.trainer.drafter.head_path is None and not self.version:
            log.warning(
                "There is no head to write to %s: the drafter began with random weights, and was not trained enough to "
                "be used. Train for more iterations, or with a larger `budget` (on given texts `passes`).",
                folder / "final",
            )
            return
        set_aside(folder, [folder / "final"], "the drafter")
        with self.loaded() as drafter:
            drafter.export(folder / "final", self.quality)

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact resume needs, tensors and primitives, the same on all ranks."""
        return {
            "published": self._published.tensors,
            "evidence": self._evidence,
            "quality": None if self.quality is None else asdict(self.quality),
            **{n: getattr(self, n) for n in _COUNTS},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` saved."""
        self._published.fill(state_dict["published"].items())
        # What was measured at another draft length than the selector of now asks for does not compare.
        num_draft_tokens = self.trainer.drafter.num_draft_tokens
        shape = (2, NUM_CLUSTERS, 2, num_draft_tokens)
        self._evidence = [pair for pair in state_dict["evidence"] if pair.shape == shape]
        quality = state_dict["quality"]
        is_comparable = quality is not None and len(quality["accepted"]) == num_draft_tokens
        self.quality = DraftQuality(**quality) if is_comparable else None
        for name in _COUNTS:
            setattr(self, name, state_dict[name])


_COUNTS = ("version", "data_version", "_num_lost")


def held_out_sample(texts: Sequence[PolicyText]) -> list[PolicyText]:
    """Return one text of each prompt, then another of each, and so on, until they have `ENOUGH` tokens.

    Gains scatter from prompt to prompt: more text of the same prompts costs time and says no more. No text is left out
    for its own length, which would favour short ones: with the one that reaches the limit, means stay true (Wald).
    """
    keys, turns, kept, num_tokens = list(map(prompt_key, texts)), Counter[bytes](), list[PolicyText](), 0
    least = len(set(keys)) if len(set(keys)) > 1 else _FEWEST
    order = []
    for text, key in zip(texts, keys, strict=True):
        order.append((turns[key], text))
        turns[key] += 1
    for _, text in sorted(order, key=lambda pair: pair[0]):
        if len(kept) >= least and num_tokens >= ENOUGH:
            break
        kept.append(text)
        num_tokens += len(text)
    return kept


def prompt_clusters(texts: Sequence[PolicyText], sum_over_ranks: Callable[[Tensor], Tensor]) -> list[int]:
    """Return the cluster of each text: its prompt's, or its own if all ranks' texts are of one prompt; a collective."""
    keys = [prompt_key(text) for text in texts]
    seen = torch.zeros(NUM_CLUSTERS + 1)
    seen[list(map(_cluster, keys))] = 1
    seen[-1] = len(set(keys)) > 1  # their clusters may be the same
    seen = sum_over_ranks(seen)
    is_one_prompt = not seen[-1] and seen.count_nonzero() == 1
    return [_cluster(text_key(text) if is_one_prompt else key) for text, key in zip(texts, keys, strict=True)]


def _cluster(key: bytes) -> int:
    # The last bytes: texts are held out by the order of their keys, so the first bytes are much the same.
    return int.from_bytes(key[8:], "little") % NUM_CLUSTERS


def gain_and_margin(pair: Tensor) -> tuple[float, float]:
    """Estimate the gain in tokens per engine step, and its one-sided 90% margin of error.

    The margin is infinite with text of a single cluster. Tokens per step are a sum of ratios, one of each draft. Each
    cluster moves the difference of two such sums by its influence, and the scatter of influences is the error of the
    difference (Taylor linearisation); quantiles are Student's. `pair` holds the steps that accept each draft and those
    that have it, of each cluster, before and after, on the same text. (2, clusters, 2, K)
    """
    pair = pair[:, (pair[:, :, 1, 0] > 0).any(0)]
    num_clusters = pair.shape[1]
    accepted, steps = pair.unbind(2)  # (2, clusters, K)
    num_steps = steps.sum(1, keepdim=True).clamp(min=torch.finfo(steps.dtype).tiny)  # of late drafts perhaps none
    ratios = accepted.sum(1, keepdim=True) / num_steps
    influence = ((accepted - ratios * steps) / num_steps).sum(-1)
    gain = float((ratios[1] - ratios[0]).sum())
    if num_clusters < 2:
        return gain, inf
    freedom = num_clusters - 1
    variance = float((influence[1] - influence[0]).square().sum()) * num_clusters / freedom
    # Student's quantile by its expansion around the normal one (Cornish and Fisher); 12% too small at one degree.
    quantile = _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
    return gain, quantile * sqrt(variance)
