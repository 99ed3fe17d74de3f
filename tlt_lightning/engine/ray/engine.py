"""Roll out with engines in processes of their own, on this host or on a cluster, by Ray."""

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from typing_extensions import override

from tlt_lightning.arguments import Count, NotNegative, checked
from tlt_lightning.engine.base import NamedTensors, OnProgress, RolloutEngine
from tlt_lightning.engine.requests import check_requests
from tlt_lightning.engine.usual import usual_engine
from tlt_lightning.ranks.joined_ranks import count_ranks, own_rank
from tlt_lightning.rollout import Request, Response, Sampling

if TYPE_CHECKING:
    from tlt_lightning.engine.ray.fleet import Fleet


class RayEngine(RolloutEngine):
    """Rolls out with several engines, each in a process of its own with its own GPU, beside the trainer.

    They write while the policy is trained, and take new weights while they write; `docs/ray.md` tells what travels how.

    Args:
        engine: What each of them is, such as a `VLLMEngine`, with weights and all settings of its own; None takes what
            suits this machine. Its `max_num_seqs` and cache are those of one.
        num_engines: How many, over all ranks; each rank has as many of its own.
        gpus_per_engine: GPUs of each; None takes one for each of its ranks (`tensor_parallel`) where the trainer has
            one or Ray finds any.
        address: A Ray cluster, as ``host:port`` or ``auto``; None takes the environment's `RAY_ADDRESS`, and without
            it rank zero starts one of this host's cores and of the GPUs on which no rank trains.
    """

    runs_on, sleeps = True, False

    @checked()
    def __init__(
        self,
        engine: RolloutEngine | None = None,
        num_engines: Count = 1,
        gpus_per_engine: Annotated[NotNegative | None, "None derives it."] = None,
        address: str | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ImportError("`RayEngine` needs Ray: `pip install tlt-lightning[ray]`.")
        self.engine = engine = usual_engine() if engine is None else engine
        if type(engine).attach is not RolloutEngine.attach:
            raise ValueError(
                f"`engine` {type(engine).__name__} writes with the trainer's own policy, which a process of Ray's does "
                "not have: install vLLM and give a `VLLMEngine`, or leave `RayEngine` out."
            )
        self.num_engines, self.address = num_engines, address
        self.gpus_per_engine = gpus_per_engine
        self.can_stop, self.seeds_requests = engine.can_stop, engine.seeds_requests
        self.updates_running = engine.updates_running
        self._fleet: Fleet | None = None
        self._sampling: Sampling | None = None  # of the last `generate`
        self._disconnect: Callable[[], None] | None = None

    @property
    @override
    def num_hosts(self) -> int:  # type: ignore[override]
        """Engines of this rank.

        Raises:
            ValueError: The ranks cannot have equally many.
        """
        if self.num_engines % (ranks := count_ranks()):
            raise ValueError(f"`num_engines` is {self.num_engines}, and must be a multiple of the {ranks} ranks.")
        return self.num_engines // ranks

    @property
    @override
    def max_num_seqs(self) -> int | None:  # type: ignore[override]
        """Most requests that run at once on all engines of this rank."""
        return None if self.engine.max_num_seqs is None else self.engine.max_num_seqs * self.num_hosts

    @property
    @override
    def speculation(self) -> Any:
        """The `Speculation` by which each engine drafts."""
        return self.engine.speculation

    @speculation.setter
    def speculation(self, speculation: Any) -> None:
        self.engine.speculation = speculation

    # Life

    @override
    def check_sampling(self, sampling: Sampling) -> None:
        self.engine.check_sampling(sampling)

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        wanted = (policy, max_model_len, seed)
        if self._fleet is not None:
            if self._fleet.set_up_for != wanted:
                held = f"(policy, max_model_len, seed) {self._fleet.set_up_for}"
                raise RuntimeError(f"`setup` asks for {wanted} of engines set up for {held}; call `close` first.")
            return
        import ray

        from tlt_lightning.engine.ray.cluster import check_room, connect
        from tlt_lightning.engine.ray.fleet import Fleet

        number = self.num_hosts
        self._disconnect = connect(self.address)
        gpus = self.gpus_per_engine
        if gpus is None:
            has_any = torch.cuda.is_initialized() or "GPU" in ray.cluster_resources()
            gpus = float(self.engine.num_ranks * has_any)
        check_room(number, self.engine.num_ranks, gpus)
        names = [f"Engine {own_rank() * number + index}" for index in range(number)]
        self._fleet = Fleet(self.engine, names, gpus, wanted)
        report = self._fleet.hosts[0].report  # kept, as a process that takes its place has none until it has loaded
        self.compute_dtype, self.weight_dtype = report.compute_dtype, report.weight_dtype
        self.take_laps()  # loading belongs to no iteration

    @override
    def take_laps(self) -> Mapping[str, Sequence[tuple[str, float]]]:
        hosts = [] if self._fleet is None else self._fleet.hosts
        return {host.name.lower(): host.take_laps() for host in hosts}

    @override
    def close(self) -> None:
        fleet, self._fleet, self._sampling = self._fleet, None, None
        disconnect, self._disconnect = self._disconnect, None
        self.policy_version = self.drafter_version = -1
        if fleet is not None:
            fleet.close()
        if disconnect is not None:
            disconnect()

    @property
    def _live(self) -> "Fleet":
        if self._fleet is None:
            raise RuntimeError("The engine is not set up: call `setup` first, and not after `close`.")
        return self._fleet

    # Weights

    @override
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self._live.publish("weights", named_tensors, version, self.weight_dtype)
        self.policy_version = version

    @override
    def update_drafter(
        self, named_tensors: NamedTensors, version: int, accepted: Sequence[float] | None = None
    ) -> None:
        self._live.publish("drafter", named_tensors, version, self.weight_dtype, accepted)
        self.drafter_version = version

    @override
    def warm_up(self, num_requests: int = 1) -> None:
        from tlt_lightning.engine.ray.host import EngineHost

        share = -(-num_requests // self.num_hosts)
        self._live.tell(partial(EngineHost.warm_up, num_requests=share))

    # What speculation did and learned

    @override
    def stats(self) -> dict[str, float]:
        return {} if self._fleet is None else self._fleet.stats()

    @override
    def state_dict(self) -> dict[str, Any]:
        states = [] if self._fleet is None else [host.report.state for host in self._fleet.hosts]
        first: dict[str, Any] = next(filter(None, states), {})  # an engine in the trainer's process goes on from it
        return {**first, "hosts": states} if first else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fleet is not None and state_dict:
            self._fleet.load(state_dict.get("hosts", [state_dict]))

    # Writing

    @override
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        if self.policy_version == -1:
            raise RuntimeError("The engines hold no current weights: call `update_weights` before `generate`.")
        self.check_sampling(sampling)
        check_requests(requests, sampling, vocab_size=sys.maxsize)  # their tokens are checked by the engines
        self._sampling = sampling
        return self._live.write(requests, sampling, seed, on_progress)

    @override
    def add(self, requests: Sequence[Request]) -> None:
        fleet = self._live
        if self._sampling is None:
            raise RuntimeError("`add` found nothing being written: call `generate` first.")
        check_requests(requests, self._sampling, vocab_size=sys.maxsize, taken=fleet.open_ids)
        fleet.ask(requests)

    @override
    def stop(self, ids: Collection[int]) -> None:
        self._live.stop(ids)
