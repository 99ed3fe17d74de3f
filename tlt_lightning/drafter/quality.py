"""Measure the quality of a head's drafts on text that its target wrote.

The measure is the engine's own: tokens per request and engine step, expected under the rule by which it accepts drafts.
The target's and the head's distributions give it, which varies less than counts of accepted drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp, inf

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_lightning.fused.compiled import compiled_on_gpu
from tlt_lightning.rollout import Sampling

_COLDEST = 1e-3  # temperature of a distribution that is all but certain
_TINY = torch.finfo(torch.float32).tiny  # probabilities below it are zero on some devices
_LIKELIEST = 1024  # tokens by which a distribution is cut
_RATIOS = [exp(x) for x in (-4, -2, -1, -0.45, -0.15, 0, 0.15, 0.45, 1, 2, 4)]  # dense where good heads' are


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """States how the engine drafts and accepts (Leviathan et al., 2023, arXiv 2211.17192).

    Args:
        samples_drafts: Drafts are sampled from the head's distribution q and accepted with `min(1, p / q)`, in all with
            `sum of min(p, q)`; else they are its likeliest token, accepted with the target's p of it.
        temperature: Sampling temperature, of both p and q.
        shares_noise: Sampled drafts are drawn with the noise that the target is sampled with, and accepted where both
            draw the same token (`engine/vllm/patches/coupled_drafts.py`).
        top_p: Cuts p to its likeliest tokens that have this share together, as `Sampling.top_p`; q is never cut.
        top_k: Cuts p to so many tokens, as `Sampling.top_k`.
    """

    samples_drafts: bool = False
    temperature: float = 1.0
    shares_noise: bool = False
    top_p: float = 1.0
    top_k: int = 0

    def of(self, sampling: Sampling) -> AcceptanceRule:
        """Return this rule with the temperature and the cuts of `sampling`."""
        return replace(self, **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")})

    def in_words(self) -> str:
        """Say how drafts are made and accepted."""
        drafts = "greedy drafts"
        if self.samples_drafts:
            drafts = "drafts sampled with the noise of verification" if self.shares_noise else "sampled drafts"
        cuts = f", top_k {self.top_k}" * bool(self.top_k) + f", top_p {self.top_p:g}" * (self.top_p < 1)
        return f"{drafts} at temperature {self.temperature:g}{cuts}"

    def judge(self, logits: Tensor, targets: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chance that a draft is accepted, and that given the text's token, (n,) each.

        Args:
            logits: Logits of the head over its `V` tokens. (n, V)
            targets: Logits of the target over the same tokens. (n, V)
            written: Token of the text; -1 is one that the head cannot draft. (n,)
        """
        judge = _judge_likeliest
        if self.samples_drafts:
            judge = _judge_coupled if self.shares_noise else _judge_samples
        temperature = max(self.temperature, _COLDEST)
        rates, matches = judge(logits, self._cut(targets, temperature), written.clamp(min=0), temperature)
        # The target's distribution is known over the head's tokens alone; a text that leaves them stands for the rest.
        # With sampled drafts that foretells less than the engine has, by at most the share of text that leaves them.
        is_known = written >= 0
        # Drafts of a head whose features are no numbers, as after a rate that was too high, are worth nothing.
        is_known &= (logits[:, 0] + targets[:, 0]).isfinite()
        return rates.where(is_known, 0), matches.where(is_known, 0)

    def _cut(self, targets: Tensor, temperature: float) -> Tensor:
        """Return the logits without tokens that the engine leaves out: by `top_k`, then `top_p`, as vLLM.

        The likeliest tokens tell, for sorting all takes time and memory; a nucleus of more is not cut.
        """
        if (self.top_p, self.top_k) == (1, 0):
            return targets
        scores = targets.float().div(temperature)
        best = scores.topk(min(max(_LIKELIEST, self.top_k), scores.shape[-1])).values
        least = best[:, self.top_k - 1, None] if 0 < self.top_k <= best.shape[-1] else -inf
        scores = scores.masked_fill(scores < least, -inf)
        if self.top_p < 1:
            chances = (best.masked_fill(best < least, -inf) - scores.logsumexp(-1, keepdim=True)).exp()
            before = chances.cumsum(-1) - chances
            last = (before < self.top_p).sum(-1, keepdim=True) - 1
            is_whole = before[:, -1:] + chances[:, -1:] < self.top_p  # they do not have as much together
            scores = scores.masked_fill((scores < best.gather(-1, last)) & ~is_whole, -inf)
        return scores * temperature


@compiled_on_gpu
def _judge_samples(logits: Tensor, targets: Tensor, token: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    p, q = (values.float().div(temperature).softmax(-1) for values in (targets, logits))
    written_p, written_q = (values.gather(-1, token[:, None])[:, 0] for values in (p, q))
    matches = (written_q / written_p.clamp(min=_TINY)).clamp(max=1)
    return torch.minimum(p, q).sum(-1), matches


@compiled_on_gpu
def _judge_coupled(logits: Tensor, targets: Tensor, token: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Given that the target draws x, so does the head with the chance 1 / S(p_x / q_x), S(r) = sum of max(p_y, q_y r).

    S is made of straight lines that meet at the tokens' own ratios. It is computed at a few ratios; x's own term is
    taken out of the two next to p_x / q_x, and added as it is to the line between them.
    """
    p, q = (values.float().div(temperature).softmax(-1) for values in (targets, logits))
    at_ratios = torch.stack([torch.maximum(p, q * ratio).sum(-1) for ratio in _RATIOS], -1)  # (n, R)
    ratios, own = p.new_tensor(_RATIOS), p / q.clamp(min=_TINY)
    place = torch.bucketize(own, p.new_tensor(_RATIOS[1:-1]))  # not a slice, which torch 2.11 cannot compile on a GPU
    (low, below), (high, above) = (
        (ratios[at], at_ratios.gather(-1, at) - torch.maximum(p, q * ratios[at])) for at in (place, place + 1)
    )
    others = below + (above - below) * ((own - low) / (high - low))
    kept = ((q > 0) / (p + others)).clamp(0, 1)
    return (p * kept).sum(-1), kept.gather(-1, token[:, None])[:, 0]


@compiled_on_gpu
def _judge_likeliest(logits: Tensor, targets: Tensor, token: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    p, drafts = targets.float().div(temperature).softmax(-1), logits.argmax(-1)
    return p.gather(-1, drafts[:, None])[:, 0], (drafts == token).float()


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Says how well a head drafts `K` tokens; tuples hold one value per drafted token.

    Args:
        accepted: Share of engine steps expected to accept this draft and all before it, of the steps that have one.
        top1: Share of positions where the head's likeliest token is the target's.
        top3: Share of positions where the target's likeliest token is among the head's three likeliest.
        loss: Mean training loss, undecayed.
        num_steps: Engine steps that the first of `accepted` is the mean over; later drafts may be beyond the text.
    """

    accepted: tuple[float, ...]
    top1: tuple[float, ...]
    top3: tuple[float, ...]
    loss: tuple[float, ...]
    num_steps: int

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and engine step, the one that needs no draft included; `K + 1` at best."""
        return 1 + sum(self.accepted)

    def metrics(self, prefix: str = "drafter/") -> dict[str, float]:
        """Return the numbers under the loggers' names."""
        values = {"acceptance_length": self.acceptance_length}
        for name in ("top1", "top3", "loss"):
            values |= {f"{name}_pos_{k}": value for k, value in enumerate(getattr(self, name), start=1)}
        values |= {f"acceptance_rate_pos_{k}": value for k, value in enumerate(self.accepted, start=1)}
        return {prefix + name: value for name, value in values.items()}


def quality_of(sums: Tensor) -> DraftQuality:
    """Turn `sums` over packs and ranks into a quality.

    The rows are accepted drafts, engine steps, top1, top3, loss, and the positions of these three. (6, K)
    """
    accepted, steps, top1, top3, loss, positions = sums.tolist()

    def means(values: list[float], counts: list[float]) -> tuple[float, ...]:
        return tuple(value / count if count else 0.0 for value, count in zip(values, counts, strict=True))

    return DraftQuality(
        accepted=means(accepted, steps),
        top1=means(top1, positions),
        top3=means(top3, positions),
        loss=means(loss, positions),
        num_steps=round(steps[0]),
    )


def expect_acceptance(rates: Tensor, matches: Tensor, lengths: Sequence[int], is_response: Tensor) -> Tensor:
    """Retrace the engine steps that would have written each text with drafts of `K` tokens.

    Given the text, a step that starts from entry `i` accepts its first `k` drafts with the chance that each of them
    matches; the next step starts one entry after the last match. So `visits`, the chance that a step starts from an
    entry, follows from those before it. The last draft that counts is taken at its mean over all tokens that the target
    might have written, not at the one in the text: the same on average, with less variance. Drafts that would reach
    beyond the answer are in no count, and a later answer of the text starts anew.

    Args:
        rates: Chance that a draft is accepted, over the target's distribution. (K, T)
        matches: The same given the token that was written; 0 or 1 for greedy drafts. (K, T)
        lengths: Entries of each document, in their order; padding may follow.
        is_response: Entries that drafting may start from. (T,), bool

    Returns:
        Each document's engine steps expected to accept the k-th draft and all before it, and all of its engine steps
        whose k-th draft is within the answer. (documents, 2, K)
    """
    num_drafts, num_entries = len(rates), len(is_response)
    answers = list(_answers(is_response.tolist(), lengths))
    left = torch.zeros(num_entries)
    for first, end in answers:
        left[first:end] = torch.arange(end - first, 0, -1)
    is_known = torch.arange(num_drafts)[:, None] < left
    rates, matches = (x.cpu().double() * is_known for x in (rates, matches))  # entry by entry a GPU would be slow
    reached = F.pad(matches.cumprod(0), (0, 0, 1, 0), value=1.0)  # chance that the first k match, (K + 1, T)
    jumps = -reached.diff(dim=0, append=torch.zeros_like(reached[:1])).T  # that the next step starts k + 1 entries on
    visits = torch.zeros(num_entries, dtype=torch.float64)
    for first, end in answers:
        chances = [1.0, *[0.0] * (end + num_drafts - first)]
        for entry, way in enumerate(jumps[first:end].tolist()):
            if here := chances[entry]:
                for place, chance in enumerate(way, entry + 1):
                    chances[place] += here * chance
        visits[first:end] = visits.new_tensor(chances[: end - first])
    sums = torch.stack([reached[:-1] * rates, is_known]) * visits  # (2, K, T)
    documents = sums[..., : sum(lengths)].split(list(lengths), -1)
    return torch.stack([part.sum(-1) for part in documents])


def _answers(is_response: Sequence[bool], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first entry of each answer, and the one behind its last, of documents of these lengths."""
    start = 0
    for length in lengths:
        for is_answer, group in groupby(range(start, start + length), is_response.__getitem__):
            if is_answer:
                first, *rest = group
                yield first, first + 1 + len(rest)
        start += length
