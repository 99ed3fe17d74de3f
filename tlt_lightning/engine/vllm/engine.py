"""Roll out with vLLM in the training process."""

import gc
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from typing_extensions import override

from tlt_lightning.arguments import Bound, Count, Positive, checked
from tlt_lightning.engine.architectures import check_architecture, check_head_size
from tlt_lightning.engine.base import NamedTensors, OnProgress, RolloutEngine
from tlt_lightning.engine.planned_memory import gpu_bytes, planned_memory, step_tokens
from tlt_lightning.engine.progress_counter import ProgressCounter
from tlt_lightning.engine.requests import check_requests
from tlt_lightning.engine.rng import EngineRandom
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.drafter_weights import HeadWeights
from tlt_lightning.engine.vllm.graphs import PlannedGraphs
from tlt_lightning.engine.vllm.patches import asleep_free, flash_splits, patched
from tlt_lightning.engine.vllm.policy_weights import checked_weights, forget_reloads, reload_policy, silence_loaders
from tlt_lightning.engine.vllm.quantization import Quantization
from tlt_lightning.engine.vllm.request_writer import RequestWriter, sampling_params
from tlt_lightning.engine.vllm.runner import EngineParts, SpeculativeRunner
from tlt_lightning.engine.vllm.speculation import Speculation, check_exact, install, speculation_args
from tlt_lightning.model_files import check_files
from tlt_lightning.ranks.joined_ranks import count_ranks
from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.speculation.graph_plan import arms_by_batch
from tlt_lightning.speculation.head_files import HeadShape

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

_NO_WEIGHTS = -1  # the version of an engine that holds none, or not all of them


class VLLMEngine(RolloutEngine):
    """Rolls out with vLLM inside the training process; weights arrive by reference.

    Args:
        dtype: Type of the engine's weights; `auto` takes that of the checkpoint. Choose the type the trainer computes
            in (`bfloat16` for `bf16-mixed`, `float32` for `32`): the closer both are, the smaller `mismatch/kl`.
        max_num_seqs: Most requests decoded at once.
        gpu_memory_utilization: Share of the device that weights and KV cache may take while the engine is awake.
        kv_cache_gib: GiB of KV cache; None takes what `gpu_memory_utilization` leaves, at most what `max_num_seqs`
            responses of full length fill. Give it on a CPU.
        enforce_eager: Run without CUDA graphs: starts sooner, decodes slower.
        sleep: Free the engine's memory while the policy is trained, so that both use the whole GPU in turn; no effect
            on a CPU. One such engine at a time in a process.
        speculation: How to speculate; None decodes plainly.
        quantization: `fp8` computes the linear layers in 8 bit, for which `dtype` must be one of 16 bit; a
            `Quantization` says which of them. None leaves all as they are.
        tensor_parallel: Neighbouring ranks that are one engine, each with its part of every weight and of the cache,
            for policies that are too large or too slow on one device. It must divide the devices of a node.
        kv_on_update: What `update_weights` does with keys and values of requests that run: `recompute` reads what they
            have so far anew, so that they go on as if the new weights had met it all; `keep` costs nothing, and goes on
            from a cache that older weights filled.
    """

    max_num_seqs: int

    @checked()
    def __init__(
        self,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_num_seqs: Count = 256,
        gpu_memory_utilization: Annotated[float, Bound(0, 1, excludes=(0,))] = 0.5,
        kv_cache_gib: Annotated[Positive | None, "None derives it."] = None,
        enforce_eager: bool = False,
        sleep: bool = True,
        speculation: Speculation | None = None,
        quantization: Literal["fp8"] | Quantization | None = None,
        tensor_parallel: Count = 1,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
    ) -> None:
        self.dtype, self.max_num_seqs = dtype, max_num_seqs
        self.gpu_memory_utilization, self.kv_cache_gib = gpu_memory_utilization, kv_cache_gib
        self.enforce_eager, self.sleeps = enforce_eager, sleep
        self.quantization = quantization if isinstance(quantization, Quantization) else Quantization(quantization)
        self.speculation: Speculation | None = speculation
        self.num_ranks, self.kv_on_update = tensor_parallel, kv_on_update
        self.updates_running = tensor_parallel == 1  # a rank cannot know between which steps the others are
        self._speculative: SpeculativeRunner | None = None
        self._undone_by_close = ExitStack()
        self._engine: LLMEngine | None = None
        self._writer: RequestWriter | None = None  # writes with the live engine
        self._sampling: Sampling | None = None  # of the `generate` that is being read
        self._set_up_for: tuple[str, int, int] | None = None
        self._asleep = False

    @override
    def planned_memory(self, policy: str, *, max_model_len: int, device_bytes: float) -> dict[str, float]:
        return planned_memory(self, policy, max_model_len=max_model_len, device_bytes=device_bytes)

    # Life

    @override
    def check_sampling(self, sampling: Sampling) -> None:
        if self.speculation is not None:
            check_exact(sampling)

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        wanted = (policy, max_model_len, seed)
        if self._engine is not None:
            if self._set_up_for != wanted:
                held = f"(policy, max_model_len, seed) {self._set_up_for}"
                raise RuntimeError(f"`setup` asks for {wanted} of an engine set up for {held}; call `close` first.")
            return
        head = self._read_policy(policy)
        started = time.perf_counter()
        graphs = self._plan_graphs()
        self._start(policy, max_model_len, seed, graphs)
        self._take_over(head, graphs)
        self._set_up_for = wanted
        seconds, parts = time.perf_counter() - started, internals.live_executor(self._live).start_up
        log.info("vLLM %s is ready after %.1f s (%s)", internals.installed_version(), seconds, parts)

    def _read_policy(self, policy: str) -> HeadShape | None:
        """Read the policy's shapes and tokenizer, and return the draft head's shape; no weights are loaded.

        Raises:
            ImportError: This vLLM is not supported.
            ValueError: vLLM would not run policy, head or quantization rightly.
        """
        from tlt_lightning.policy import end_token_ids, load_tokenizer, policy_shapes

        internals.check_version()
        path = None if self.speculation is None else self.speculation.head
        check_architecture(policy, with_head=path is not None)
        self._shapes = policy_shapes(policy)
        check_files(policy, self._shapes)
        head = None if self.speculation is None else self.speculation.check(policy, self.max_num_seqs)
        if (world_size := count_ranks()) % self.num_ranks:  # vLLM would wait for the others
            raise ValueError(f"`tensor_parallel` {self.num_ranks} must divide the ranks of the run, {world_size}.")
        internals.set_environment()
        silence_loaders()
        if internals.is_cpu_build():
            check_head_size(policy, internals.supported_head_sizes())
        self.quantization.check(self._shapes, self.num_ranks)
        self._tokenizer = load_tokenizer(policy)
        self._end_token_ids = end_token_ids(policy, self._tokenizer)
        return head

    def _plan_graphs(self) -> PlannedGraphs | None:
        """Return the CUDA graphs to capture by plan; None where vLLM chooses them, or captures none."""
        if self.speculation is None or self.enforce_eager or not internals.runs_v2():
            return None
        return PlannedGraphs(self.speculation.pool, arms_by_batch(self.speculation.selector, self.max_num_seqs))

    def _start(self, policy: str, max_model_len: int, seed: int, graphs: PlannedGraphs | None) -> None:
        """Start vLLM's engine, repaired, with random numbers of its own; `close` undoes it."""
        self._is_cpu = internals.is_cpu_build()
        self._keeps_group = torch.distributed.is_initialized()
        needs_splits = graphs is None or not graphs.pool.limits_splits
        with ExitStack() as undone_by_close:
            if self._can_sleep:
                asleep_free.claim_sleep_mode()
                undone_by_close.callback(asleep_free.release_sleep_mode)
            undone_by_close.enter_context(patched(without=(flash_splits.PATCH,) if needs_splits else ()))
            installed = nullcontext() if graphs is None else graphs.installed()
            with EngineRandom(seed).in_force(), installed:
                args = self._engine_args(policy, max_model_len, seed)
                self._engine = internals.start(args, undone_by_close, keep_process_group=self._keeps_group)
            self._undone_by_close = undone_by_close.pop_all()

    def _take_over(self, head: HeadShape | None, graphs: PlannedGraphs | None) -> None:
        """Join the ranks of the engine that has started, steer its drafts, and write with it from now on."""
        engine = self._live
        internals.reach(engine, "output_processor").tokenizer = self._tokenizer  # for stop strings
        self.compute_dtype = self.quantization.compute_dtype(engine)
        types = {parameter.dtype for parameter in internals.live_model(engine).parameters()}
        self.weight_dtype = str(types.pop()).removeprefix("torch.") if len(types) == 1 else None
        engine_ranks = internals.live_executor(engine).join(engine, graphs)
        if self.speculation is not None:
            self._speculative = install(self.speculation, engine, self.compute_dtype, head, graphs, engine_ranks)
        self._writer = RequestWriter(engine, self._speculative, engine_ranks)

    def _engine_args(self, policy: str, max_model_len: int, seed: int) -> Any:
        from vllm import EngineArgs

        return EngineArgs(
            model=policy,
            dtype=self.dtype,
            seed=seed,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=None if self._is_cpu else step_tokens(gpu_bytes()),
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30),
            enforce_eager=self.enforce_eager,
            enable_sleep_mode=self._can_sleep,
            tensor_parallel_size=self.num_ranks,
            distributed_executor_backend="tlt_lightning.engine.vllm.executor.RankExecutor",
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **({} if self.speculation is None else speculation_args(self.speculation, is_v2=internals.runs_v2())),
            **self.quantization.engine_args(),
        )

    @override
    def close(self) -> None:
        engine, self._engine, self._writer, self._set_up_for = self._engine, None, None, None
        self.policy_version, self.drafter_version, self._asleep = _NO_WEIGHTS, -1, False
        speculative, self._speculative = self._speculative, None
        if engine is not None:
            forget_reloads(engine, None if speculative is None else speculative.head)
            internals.shut_down(engine, keep_process_group=self._keeps_group)
            self._undone_by_close.close()
            del engine, speculative
            gc.collect()  # its cycles hold device memory
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            if self._can_sleep:
                asleep_free.free_pools()

    @property
    @override
    def unmapped_bytes(self) -> float:
        return asleep_free.asleep_bytes() if self._can_sleep else 0.0

    @override
    def sleep(self) -> None:
        if self._engine is None or self._asleep:
            return
        if self._engine.has_unfinished_requests():
            raise RuntimeError("`sleep` found the engine writing, and would drop its cache: end `generate` first.")
        if self._can_sleep:
            if self._head is not None:
                self._head.keep()
            self._engine.sleep(level=2)  # weights are dropped, not copied out: the next sync brings them anyway
            self.policy_version, self._asleep = _NO_WEIGHTS, True

    @override
    def wake(self) -> None:
        if self._asleep:
            self._live.wake_up()
            self._asleep = False
            if self._head is not None:
                self._head.restore()

    def inspect(self) -> EngineParts:
        """Return the live parts; raise RuntimeError unless the engine is set up."""
        return EngineParts(self._live, self._speculative)

    @property
    def _head(self) -> HeadWeights | None:
        return None if self._speculative is None else self._speculative.weights

    @property
    def _can_sleep(self) -> bool:
        return self.sleeps and not self._is_cpu

    @property
    def _live(self) -> "LLMEngine":
        if self._engine is None:
            raise RuntimeError("The engine is not set up: call `setup` first, and not after `close`.")
        return self._engine

    # Weights

    @override
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        engine, writer = self._live, self._writer
        assert writer is not None
        if self._asleep or (engine.has_unfinished_requests() and not self.updates_running):
            raise RuntimeError(
                f"`update_weights` found the engine asleep, or writing with `tensor_parallel` {self.num_ranks}, whose "
                "ranks need not be between the same two steps: call `wake`, or end `generate`, first."
            )
        tensors = checked_weights(named_tensors, self._shapes)
        writer.end_step()
        self.policy_version = _NO_WEIGHTS  # were the update to break half-way, nothing may claim to be current
        reload_policy(engine, tensors)
        writer.weights_changed(version, keep_cache=self.kv_on_update == "keep")
        if self._speculative is not None:
            self._speculative.begin_rollout()  # an iteration counts from its weights on, also where requests run on
            self._speculative.controller.weights_changed()
        self.policy_version = version

    @override
    def warm_up(self, num_requests: int = 1) -> None:
        if self._speculative is None or self._live.has_unfinished_requests() or not self._speculative.wants_calibration:
            return
        assert self._writer is not None
        try:
            self._speculative.calibrate(self._writer.write_freely, num_requests, self.max_num_seqs)
        finally:
            self._live.reset_prefix_cache()

    @override
    def update_drafter(
        self, named_tensors: NamedTensors, version: int, accepted: Sequence[float] | None = None
    ) -> None:
        if self._speculative is None or self._head is None:
            raise RuntimeError("`update_drafter` has nothing to update: the engine has no head, `speculation.head`.")
        self._head.update(named_tensors)
        if not self._live.has_unfinished_requests():
            self._live.reset_prefix_cache()  # of keys and values that the old head computed for prompts
        self._speculative.controller.weights_changed(version, accepted)
        self.drafter_version = version

    # What speculation did and learned

    @override
    def stats(self) -> dict[str, float]:
        return {} if self._speculative is None else self._speculative.stats()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._speculative is None else self._speculative.controller.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._speculative is not None and state_dict:
            self._speculative.controller.load_state_dict(state_dict)

    # Writing

    can_stop = seeds_requests = True

    @override
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        self._check_weights()
        self.check_sampling(sampling)
        self._check(requests, sampling)
        writer, counter = self._writer, ProgressCounter()
        assert writer is not None
        params = partial(self._params, sampling)
        steps = writer.steps(requests, params, seed, self.policy_version)
        self._sampling = sampling
        try:
            for finished in steps:
                if on_progress is not None:
                    on_progress(writer.progress(counter, finished))
                yield from writer.pool.responses_of_this_rank(finished)
                self._check_weights()  # an update that broke half-way may have been caught
        finally:
            self._sampling = None
            steps.close()

    @override
    def add(self, requests: Sequence[Request]) -> None:
        writer = self._writing("add")
        self._check(requests, self._sampling or Sampling(), taken=writer.ids)
        writer.pool.add(requests)

    @override
    def stop(self, ids: Collection[int]) -> None:
        self._writing("stop").stop(ids)

    def _check_weights(self) -> None:
        if self.policy_version == _NO_WEIGHTS:
            raise RuntimeError("The engine holds no current weights: call `update_weights` before `generate`.")

    def _writing(self, call: str) -> RequestWriter:
        if self._writer is None or self._sampling is None:
            raise RuntimeError(f"`{call}` found nobody reading `generate`; call it between two of its responses.")
        return self._writer

    def _check(self, requests: Sequence[Request], sampling: Sampling, taken: Collection[int] = ()) -> None:
        vocab_size = self._live.vllm_config.model_config.get_vocab_size()
        check_requests(requests, sampling, vocab_size=vocab_size, taken=taken)

    def _params(self, sampling: Sampling, request: Request) -> Any:  # overridden to write past ends of text
        return sampling_params(sampling, request, self._end_token_ids)
