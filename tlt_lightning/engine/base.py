"""Define the contract of rollout engines and the plain data of its calls.

Nothing here knows about vLLM, CUDA or the Trainer; `engine/vllm/` and `engine/transformers.py` implement the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from tlt_lightning.arguments import check_count, check_list, check_number, check_within
from tlt_lightning.speculation.strategy import OFF, Drafter, Strategy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NamedTensors = Iterable[tuple[str, "Tensor"]]
VerifiedDraft = tuple[int, Drafter, int, int]
"""Tokens of the response before a draft, its drafter, tokens drafted, and how many of them were kept."""

FINISH_REASONS = ("stop", "length", "unfinished")
"""Ways in which a response ends, see `Response`."""


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

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("sampling.max_tokens", self.max_tokens)
        for name in ("temperature", "top_p"):
            check_number(f"sampling.{name}", getattr(self, name))
        if self.temperature != 0 and not 0.01 <= self.temperature <= 2:  # vLLM raises less to 0.01 and refuses more
            raise ValueError(f"`sampling.temperature` must be 0 (greedy) or in [0.01, 2], got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`sampling.top_p` must be in (0, 1], got {self.top_p}; 1 switches it off.")
        check_count("sampling.top_k", self.top_k, 0)
        check_within("sampling.min_p", self.min_p, 0, 1)
        check_within("sampling.min_tokens", self.min_tokens, 0, self.max_tokens)
        check_list("sampling.stop_token_ids", self.stop_token_ids, Integral, "whole numbers")
        check_list("sampling.stop_strings", self.stop_strings, str, "texts")
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
        id: Unique within one `generate` call; the response carries it back.
        prompt_ids: Token ids of the prompt.
        group: Requests with the same group answer the same prompt (siblings).
        max_tokens: Limit for this request alone, `written` included; None uses `Sampling.max_tokens`.
        written: An unfinished response to go on with; the new response holds it, too. None begins anew.
        seed: Noise of this request alone. The same weights then write the same text whatever runs beside it, up to
            rounding, and unless drafts change the draws (see `drafts_may_share_noise`). None draws from the rollout's.
        expected_tokens: Mean length of earlier answers to the prompt, 0 if there are none: engines with room for a part
            of the requests start the longest first.
        earlier_answers: Texts to look drafts up in, for engines that do. Unless `drafts_may_share_noise`, none of them
            may have been written with this request's noise: exactness then rests on drafts that know nothing of what
            verification will draw.
        twin: What other weights wrote for this very request, with its prompt and its seed: the first draft of engines
            whose `drafts_may_share_noise`, passed over by others.
    """

    id: int
    prompt_ids: Sequence[int]
    group: int = 0
    max_tokens: int | None = None
    written: Response | None = None
    seed: int | None = None
    expected_tokens: float = 0.0
    earlier_answers: Sequence[Sequence[int]] = ()
    twin: Sequence[int] = ()


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
        version_tokens: Tokens that each of `policy_versions` wrote; empty if one wrote all.
    """

    request_id: int
    token_ids: Sequence[int]
    logps: Sequence[float]
    finish_reason: str
    policy_versions: tuple[int, ...]
    drafts: Sequence[VerifiedDraft] = field(default=(), compare=False)  # the same text may come by other drafts
    version_tokens: tuple[int, ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """True if it was stopped, and may be continued."""
        return self.finish_reason == "unfinished"

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Version of the weights and tokens they wrote, oldest first."""
        return tuple(zip(self.policy_versions, self.version_tokens or (len(self.token_ids),), strict=True))

    @property
    def num_kept(self) -> dict[str, int]:
        """Tokens of the response that each drafter proposed; a drafter without any may be missing."""
        kept: dict[str, int] = {}
        for at, drafter, _, count in self.drafts:
            kept[drafter] = kept.get(drafter, 0) + min(count, len(self.token_ids) - at)
        return kept


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Counts the requests and tokens of a running rollout on this worker's engine, those of its other ranks included.

    Args:
        waiting: Requests that have not started.
        running: Requests that are being decoded.
        finished: Requests that are done.
        tokens: Response tokens written so far, by this rollout.
        longest: Tokens in the longest response so far, those that earlier rollouts wrote of it included.
        elapsed: Seconds since the rollout began.
        strategy: The speculation strategy in force.
        acceptance_length: Mean tokens per request and speculative step, bonus token included; 1 without speculation.
    """

    waiting: int
    running: int
    finished: int
    tokens: int
    longest: int
    elapsed: float
    strategy: Strategy = OFF
    acceptance_length: float = 1.0

    @property
    def total(self) -> int:
        """All requests of this rollout."""
        return self.waiting + self.running + self.finished


OnProgress = Callable[[RolloutProgress], None]


class RolloutEngine(ABC):
    """Writes responses with the current policy.

    The constructor only checks arguments; `setup` loads. Order of calls: `setup`, `attach`, then for each iteration
    `wake`, `update_weights`, `warm_up`, `generate`, `sleep`; `close` at any time.
    """

    num_ranks: int = 1
    """Neighbouring ranks that are one engine: all call every method, `generate` each with its own requests."""

    max_num_seqs: int | None = None
    """Most requests that run at once, the others wait; None if there is no limit."""

    policy_version: int = -1
    """Version given to the last `update_weights`; -1 before the first."""

    drafter_version: int = -1
    """Version given to the last `update_drafter`; -1 before the first."""

    compute_dtype: str = "float32"
    """Type of the log-probs, which limits how closely they agree with the trainer's."""

    sleeps = True
    """True if `sleep` gives back all bytes of `planned_memory`."""

    can_stop = False
    """True with `add` and `stop`, which all schedules but the synchronous one need."""

    seeds_requests = False
    """True if a seed for each request costs no more than one for all; rollouts then do not hang on who writes them."""

    reads_drafts = False
    """True if drafts are looked up in `Request.earlier_answers`."""

    drafts_may_share_noise = False
    """True if drafts may have been written with the noise that verifies them; known after `setup`."""

    @abstractmethod
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        """Load the engine for a policy, given by path or hub name.

        `max_model_len` counts tokens of prompt and response; `seed` is this engine's.
        """

    def check_sampling(self, sampling: Sampling) -> None:  # noqa: B027 - most engines can do all
        """Raise ValueError for what the engine cannot sample exactly; called before `setup`."""

    def attach(self, model: PreTrainedModel) -> None:  # noqa: B027 - most engines keep their own weights
        """Hand over the live policy; engines with their own copy of the weights ignore the call."""

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        """Yield one response per request as each finishes.

        Args:
            requests: What to write; ids must be unique.
            sampling: How to sample.
            seed: Makes the rollout reproducible: the same weights, requests and seed give the same responses.
            on_progress: Called after each engine step; must return quickly.
        """

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests to the `generate` that is being read; they begin with its next engine step."""
        raise RuntimeError(f"{type(self).__name__} takes no requests while it writes.")

    def stop(self, ids: Collection[int]) -> None:
        """Stop requests of the `generate` that is being read; those that have ended are left alone.

        It yields what they have written, as responses that are `unfinished`. An engine that writes batches to their
        end stops only requests that have not begun; one of several ranks hears of it when its next response ends.
        """
        raise RuntimeError(f"{type(self).__name__} cannot stop requests.")

    @abstractmethod
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace the policy's weights (Hugging Face names) and forget all cached prefixes."""

    def warm_up(self) -> None:  # noqa: B027 - most engines need none
        """Measure what the engine must know before its first rollout, if anything.

        Takes seconds at most, needs current weights, and leaves no trace in what is written later.
        """

    def update_drafter(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace the drafter's trainable weights; touch no tensor of the policy."""
        raise RuntimeError(f"{type(self).__name__} runs no learned drafter, so `update_drafter` has nothing to update.")

    def planned_memory(self, policy: str, *, max_model_len: int, device_bytes: float) -> Mapping[str, float]:
        """Return the bytes that the engine will take of a device of `device_bytes`, by name; empty for nothing."""
        return {}

    def stats(self) -> dict[str, float]:
        """Return scalars of the last rollout under metric names (`speculation/...`)."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what the engine learned (a selector's statistics), as tensors and primitives."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027 - most engines learn nothing
        """Restore what `state_dict` saved."""

    def sleep(self) -> None:  # noqa: B027 - optional
        """Give accelerator memory back to the trainer until `wake`."""

    def wake(self) -> None:  # noqa: B027 - optional
        """Take the memory back; `update_weights` must follow before `generate`."""

    @property
    def unmapped_bytes(self) -> float:
        """Memory that PyTorch counts as the engine's though the device has it back, while the engine sleeps."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice and after an error."""
