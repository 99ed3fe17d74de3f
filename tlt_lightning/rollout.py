"""Hold the plain data of a rollout: prompts, requests and responses, finished rollouts, and the tensors of a loss.

Nothing here knows an engine, a Trainer or a policy. `B` sequences, `S` tokens of the longest prompt plus response, `T`
tokens of the longest response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tlt_lightning.arguments import Bound, Count, CountOrZero, Probability, check_argument, checked
from tlt_lightning.speculation.strategy import Drafter

VerifiedDraft = tuple[int, Drafter, int, int]
"""Tokens of the response before a draft, its drafter, tokens drafted, and how many of them were kept."""


@dataclass(slots=True)
class Prompt:
    """Holds a question as the engine sees it.

    Args:
        text: The prompt after the chat template.
        ids: Its token ids.
        question: The prompt before the chat template; rewards receive it.
        answer: What the answer column says, or None.
        row: The whole row of the data file; rewards receive it.
        index: Row number in the data file.
    """

    text: str
    ids: Sequence[int]
    question: str = ""
    answer: Any = None
    row: dict[str, Any] = field(default_factory=dict)
    index: int = 0


@checked("sampling.")
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sets how an engine samples responses.

    Args:
        max_tokens: Longest response in tokens, the end-of-sequence token included.
        temperature: Softmax temperature; 0 is greedy.
        top_p: Nucleus mass; 1 keeps the whole distribution, where importance ratios are exact.
        top_k: Keep the `top_k` likeliest tokens; 0 keeps all.
        min_p: Keep tokens at least `min_p` times as likely as the likeliest; 0 keeps all.
        min_tokens: Tokens before which a response cannot end.
        stop_token_ids: Token ids that end a response besides the tokenizer's end-of-sequence token.
        stop_strings: Texts that end a response, of which they are the last part; special tokens count as text.
    """

    max_tokens: Count = 1024
    temperature: float = 1.0
    top_p: Annotated[float, Bound(0, 1, excludes=(0,)), "1 switches it off."] = 1.0
    top_k: CountOrZero = 0
    min_p: Probability = 0.0
    min_tokens: CountOrZero = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 0.01 <= self.temperature <= 2:  # vLLM raises less to 0.01 and refuses more
            raise ValueError(f"`sampling.temperature` must be 0 (greedy) or in [0.01, 2], got {self.temperature}.")
        check_argument("sampling.min_tokens", self.min_tokens, Annotated[int, Bound(0, self.max_tokens)])
        if not all(self.stop_strings):
            raise ValueError(f"`sampling.stop_strings` must be texts that are not empty, got {self.stop_strings!r}.")

    @property
    def filters(self) -> dict[str, float]:
        """Settings that sample from a part of the policy's distribution, by name; importance ratios are inexact."""
        is_on = {"top_p": self.top_p < 1, "top_k": self.top_k, "min_p": self.min_p, "min_tokens": self.min_tokens}
        return {name: getattr(self, name) for name, on in is_on.items() if on}


@dataclass(frozen=True, slots=True)
class Request:
    """Asks an engine for one response.

    Args:
        id: Unique among the requests that are open; the response carries it back. In training it is
            `draw * group_size + member`, which is unique over the run.
        prompt_ids: Token ids of the prompt.
        group: Requests with the same group answer the same prompt (siblings).
        max_tokens: Limit for this request alone, `written` included; None uses `Sampling.max_tokens`.
        written: An unfinished response to go on with; the new response holds it, too. None begins anew.
        seed: Noise of this request alone. The same weights then write the same text whatever runs beside it, up to
            rounding, and unless drafts change the draws, as those that rejection sampling verifies do. None draws from
            the rollout's.
        expected_tokens: Mean length of earlier answers to the prompt, 0 if there are none: engines with room for a part
            of the requests start the longest first.
    """

    id: int
    prompt_ids: Sequence[int]
    group: int = 0
    max_tokens: int | None = None
    written: "Response | None" = None
    seed: int | None = None
    expected_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Response:
    """Answers one request.

    Args:
        request_id: The `Request.id` it answers.
        token_ids: The response, with its end-of-sequence token if that was sampled.
        logps: Log-probability of each token in the distribution sampled from, after temperature and `Sampling.filters`.
        finish_reason: "stop" (end-of-sequence, a stop token or a stop string), "length", or "unfinished" (taken out
            by `RolloutEngine.stop`).
        policy_versions: Versions of the weights that wrote it, oldest first; one unless it was continued.
        drafts: The drafts verified for it, in order. After the kept tokens of each comes one of the policy's own; the
            last draft's may reach past the end. All tokens between drafts were decoded plainly.
        version_tokens: Tokens that each of `policy_versions` wrote, what was observed behind them included; empty if
            there is one.
        observed: Spans (start, length) of tokens that an environment wrote, in order and apart; `logps` are 0 there.
    """

    request_id: int
    token_ids: Sequence[int]
    logps: Sequence[float]
    finish_reason: str
    policy_versions: tuple[int, ...]
    drafts: Sequence[VerifiedDraft] = field(default=(), compare=False)  # the same text may come by other drafts
    version_tokens: tuple[int, ...] = ()
    observed: tuple[tuple[int, int], ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """True if it was stopped, and may be continued."""
        return self.finish_reason == "unfinished"

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Version of the weights and tokens they wrote, oldest first."""
        return tuple(zip(self.policy_versions, self.version_tokens or (len(self.token_ids),), strict=True))

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Spans of tokens that the policy wrote, `start` to `stop`; one unless something was observed."""
        edges = [0, *(edge for start, length in self.observed for edge in (start, start + length))]
        return tuple(zip(edges[::2], [*edges[1::2], len(self.token_ids)], strict=True))

    @property
    def num_written(self) -> int:
        """Tokens that the policy wrote."""
        return len(self.token_ids) - sum(length for _, length in self.observed)

    def end_of_turn(self, at: int) -> int:
        """Return where the policy's turn ends that has the token `at`: no draft is kept beyond it."""
        return next((start for start, _ in self.observed if start >= at), len(self.token_ids))

    @property
    def num_kept(self) -> dict[str, int]:
        """Tokens of the response that each drafter proposed; a drafter without any may be missing."""
        kept: dict[str, int] = {}
        for at, drafter, _, count in self.drafts:
            kept[drafter] = kept.get(drafter, 0) + min(count, self.end_of_turn(at) - at)
        return kept

    def observing(self, token_ids: Sequence[int]) -> "Response":
        """Return the response with tokens of an environment behind it, unfinished: a request goes on from there."""
        versions, num_tokens = self.version_tokens, len(token_ids)
        return replace(
            self,
            token_ids=[*self.token_ids, *token_ids],
            logps=[*self.logps, *[0.0] * num_tokens],
            finish_reason="unfinished",
            version_tokens=versions and (*versions[:-1], versions[-1] + num_tokens),
            observed=(*self.observed, (len(self.token_ids), num_tokens)),
        )


@dataclass(slots=True)
class Rollout:
    """Holds one response with its prompt and its rewards.

    Args:
        prompt: The question.
        response: What the engine wrote.
        text: The response decoded, without the tokens that end or pad it.
        group: Number of the prompt within the iteration; its `group_size` rollouts share it.
        rewards: One value per reward function that applies, unweighted.
        reward: Their weighted sum, which the objective sees.
        turn_rewards: What an environment gave each turn, if it did; a part of `reward`.
        deferrals: Times a schedule had deferred the prompt before.
    """

    prompt: Prompt
    response: Response
    text: str
    group: int
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    deferrals: int = 0
    turn_rewards: tuple[float, ...] = ()

    @property
    def is_correct(self) -> bool:
        """True if the first reward that applies exceeds one half: what accuracy and pass@k count."""
        return next(iter(self.rewards.values()), 0.0) > 0.5

    @property
    def is_truncated(self) -> bool:
        """True if the response ended at the length limit."""
        return self.response.finish_reason == "length"

    def to_row(self) -> dict[str, Any]:
        """Return a JSON-ready row, as `predict` writes it."""
        observed = {"observed": self.response.observed} if self.response.observed else {}
        return {
            "index": self.prompt.index,
            "prompt": self.prompt.text,
            "response": self.text,
            "answer": self.prompt.answer,
            "reward": self.reward,
            "rewards": self.rewards,
            "correct": self.is_correct,
            "tokens": len(self.response.token_ids),
            "finish_reason": self.response.finish_reason,
            "deferrals": self.deferrals,
            "prompt_ids": list(self.prompt.ids),  # the tokens themselves: decoded text does not always encode back
            "response_ids": list(self.response.token_ids),
            **observed,
        }


@dataclass(slots=True)
class RolloutBatch:
    """Holds the tensors that an objective sees.

    Right-padded, so that a causal model needs no attention mask. Not frozen: Lightning rebuilds the batch to move it.

    Args:
        input_ids: Prompt then response then padding. (B, S), int64
        prompt_lengths: Tokens of each prompt. (B,), int64
        response_mask: 1 for response tokens that count in the loss, 0 for padding and what is masked. (B, T), float32
        rollout_logps: Log-probability of each token in the distribution it was sampled from. (B, T), float32
        rewards: Weighted reward of each sequence. (B,), float32
        groups: Sequences with equal numbers answer the same prompt. (B,), int64
        policy_versions: Oldest weights that wrote each sequence. (B,), int64
        truncated: Sequences that hit the length limit. (B,), bool
        response_lengths: Response tokens of each sequence, masked ones included; None takes the mask's. (B,), int64
        observed: Response tokens that an environment wrote, all of them masked; None if there are none. (B, T), bool
        turn_rewards: The part of `rewards` that turns earned, each at its last token; None if there is none. (B, T)
        temperature: Sampling temperature; the trainer's log-probs are computed at it.
        asynchronous: Written while the policy moved on, by a schedule whose texts are old as a rule.
        old_logps: Log-probs before this iteration's first update; None until they are known. (B, T), float32
        ref_logps: Log-probs under the frozen reference, if the objective asks for one. (B, T), float32
        divergence: The policy's divergence from its teacher, if the objective has one. (B, T), with gradient
        values: The critic's predictions before the update, if there is a critic. (B, T), float32
        advantages: Filled in by `PolicyObjective.advantages`. (B, T), float32
        returns: Targets of the critic, likewise. (B, T), float32
        num_loss_tokens: Response tokens of the whole optimizer step, over all its micro-batches and all ranks.
        num_loss_sequences: Sequences of the whole optimizer step, likewise.
        num_shares: Ranks, over which the optimizer step averages what it adds up over micro-batches. A sum over a
            micro-batch, times `num_shares`, over a `num_loss_*` count does not depend on how the step was split.
        rows: Numbers of these sequences in the batch that `select` took them from; empty if they are all there is.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    response_mask: Tensor
    rollout_logps: Tensor
    rewards: Tensor
    groups: Tensor
    policy_versions: Tensor
    truncated: Tensor
    response_lengths: Tensor = None  # type: ignore[assignment]
    observed: Tensor | None = None
    turn_rewards: Tensor | None = None
    temperature: float = 1.0
    asynchronous: bool = False
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    divergence: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    num_loss_tokens: float = 0.0
    num_loss_sequences: float = 0.0
    num_shares: int = 1
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.response_lengths is None:
            self.response_lengths = self.response_mask.sum(-1).long()

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, prompt and response, (B,) in int64."""
        return self.prompt_lengths + self.response_lengths

    def count_loss(self, rows: Sequence[int]) -> tuple[float, float]:
        """Count the loss tokens of the given sequences, and the sequences that have any."""
        mask = self.response_mask[rows]
        return float(mask.sum()), float(mask.bool().any(-1).sum())

    def select(self, rows: Sequence[int]) -> "RolloutBatch":
        """Take the given sequences, trimmed to their own longest prompt-plus-response and response."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.input_ids.device)
        lengths = self.response_lengths[index]
        num_columns = {"S": int((self.prompt_lengths[index] + lengths).max()), "T": int(lengths.max())}
        chosen: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = value[index]
                if value.dim() == 2:
                    value = value[:, : num_columns["S" if item.name == "input_ids" else "T"]]
                chosen[item.name] = value
        return replace(self, **chosen, rows=tuple(index.tolist()))


def collate(rollouts: Sequence[Rollout], *, pad_id: int, temperature: float) -> RolloutBatch:
    """Build the batch of `rollouts`, on the CPU, sequences right-padded with `pad_id`."""
    # NumPy reads a list of numbers faster than `torch.tensor` does.
    texts = ([*rollout.prompt.ids, *rollout.response.token_ids] for rollout in rollouts)
    sequences = [torch.from_numpy(np.array(text, np.int64)) for text in texts]
    logps = [torch.from_numpy(np.array(rollout.response.logps, np.float32)) for rollout in rollouts]
    masks = [torch.ones_like(part) for part in logps]
    for mask, rollout in zip(masks, rollouts, strict=True):
        for start, length in rollout.response.observed:
            mask[start : start + length] = 0
    turn_rewards = torch.zeros(len(logps), max(map(len, logps)))
    for row, rollout in enumerate(rollouts):
        for (_, stop), reward in zip(rollout.response.turns, rollout.turn_rewards, strict=False):
            turn_rewards[row, stop - 1] = reward
    is_observed = [mask == 0 for mask in masks] if any(rollout.response.observed for rollout in rollouts) else None
    return RolloutBatch(
        input_ids=pad_sequence(sequences, batch_first=True, padding_value=pad_id),
        prompt_lengths=torch.tensor([len(rollout.prompt.ids) for rollout in rollouts]),
        response_mask=pad_sequence(masks, batch_first=True),
        rollout_logps=pad_sequence(logps, batch_first=True),
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        groups=torch.tensor([rollout.group for rollout in rollouts]),
        policy_versions=torch.tensor([rollout.response.policy_versions[0] for rollout in rollouts]),
        response_lengths=torch.tensor([len(part) for part in logps]),
        observed=None if is_observed is None else pad_sequence(is_observed, batch_first=True),
        turn_rewards=turn_rewards if any(rollout.turn_rewards for rollout in rollouts) else None,
        truncated=torch.tensor([rollout.is_truncated for rollout in rollouts]),
        temperature=temperature,
    )


def split_groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts by group, groups and rollouts in their order."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def has_spread(group: Sequence[Rollout]) -> bool:
    """Return True if a group's rewards differ, so that some advantages do (DAPO, Eq. 11).

    They are compared in float32, in which advantages are computed: there 0.7 + 0.1 equals 0.8. What an objective adds
    to the rewards, such as DAPO's overlong punishment, does not count.
    """
    return len({np.float32(rollout.reward) for rollout in group}) > 1
