"""Define the contract of rollout engines.

Nothing here knows about vLLM, CUDA or the Trainer; `engine/vllm/` and `engine/transformers.py` implement the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.speculation.strategy import OFF, Strategy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NamedTensors = Iterable[tuple[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Counts the requests and tokens of a running rollout; an engine of several ranks counts those of all.

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

    waiting: int = 0
    running: int = 0
    finished: int = 0
    tokens: int = 0
    longest: int = 0
    elapsed: float = 0.0
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

    weight_dtype: str | None = None
    """Type that all its weights are kept in, in which they may travel; None if they are of several."""

    sleeps = True
    """True if `sleep` gives back all bytes of `planned_memory`."""

    can_stop = False
    """True with `add` and `stop`, which all schedules but the synchronous one need."""

    seeds_requests = False
    """True if a seed for each request costs no more than one for all; rollouts then do not hang on who writes them."""

    updates_running = False
    """True if `update_weights` works while requests run: they go on with the new weights, in a new segment."""

    runs_on = False
    """True if requests are written while nobody reads `generate`, whose iterator may stay open over iterations."""

    num_hosts: int = 1
    """Engines that it is made of, each with weights of its own."""

    speculation: Any = None
    """The `Speculation` by which it drafts, which may be set before `setup`; None if it drafts nothing."""

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
            requests: What to write. An id may be added again once its response has been yielded.
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

    def warm_up(self, num_requests: int = 1) -> None:  # noqa: B027 - most engines need none
        """Measure what the engine must know before its first rollout of `num_requests`, if anything.

        Takes seconds at most, needs current weights, and leaves no trace in what is written later.
        """

    def update_drafter(
        self, named_tensors: NamedTensors, version: int, accepted: Sequence[float] | None = None
    ) -> None:
        """Replace the drafter's trainable weights; touch no tensor of the policy.

        `accepted` is the share of its drafts that the policy accepts, by position, where that is known.
        """
        raise RuntimeError(f"{type(self).__name__} runs no learned drafter, so `update_drafter` has nothing to update.")

    def planned_memory(self, policy: str, *, max_model_len: int, device_bytes: float) -> Mapping[str, float]:
        """Return the bytes that the engine will take of a device of `device_bytes`, by name; empty for nothing."""
        return {}

    def stats(self) -> dict[str, float]:
        """Return scalars of the last rollout under metric names (`speculation/...`)."""
        return {}

    def take_laps(self) -> Mapping[str, Sequence[tuple[str, float]]]:
        """Return the stages, with seconds, that engines beside this process went through since the last call, by name.

        `writing`, `waiting` for requests, `weights` being loaded. Empty for an engine in this process.
        """
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
