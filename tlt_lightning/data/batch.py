"""Hold an iteration's data: prompts, finished rollouts, and the tensors of a loss.

`B` sequences, `S` tokens of the longest prompt plus response, `T` tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tlt_lightning.engine.base import Response


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


@dataclass(slots=True)
class Rollout:
    """Holds one response with its prompt and its rewards.

    Args:
        prompt: The question.
        response: What the engine wrote.
        text: The response decoded, special tokens left out.
        group: Number of the prompt within the iteration; its `group_size` rollouts share it.
        rewards: One value per reward function, unweighted.
        reward: Their weighted sum, which the objective sees.
        deferrals: Times a schedule had put the prompt aside before.
    """

    prompt: Prompt
    response: Response
    text: str
    group: int
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    deferrals: int = 0

    @property
    def is_correct(self) -> bool:
        """True if the first reward exceeds one half: what accuracy and pass@k count."""
        return next(iter(self.rewards.values()), 0.0) > 0.5

    @property
    def is_truncated(self) -> bool:
        """True if the response ended at the length limit."""
        return self.response.finish_reason == "length"

    def to_row(self) -> dict[str, Any]:
        """Return a JSON-ready row, as `predict` writes it."""
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
        temperature: Sampling temperature; the trainer's log-probs are computed at it.
        old_logps: Log-probs before this iteration's first update; None until they are known. (B, T), float32
        ref_logps: Log-probs under the frozen reference, if the objective asks for one. (B, T), float32
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
    temperature: float = 1.0
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
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

    def select(self, rows: Sequence[int]) -> RolloutBatch:
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
