"""Capture CUDA graphs by plan on vLLM's V2 model runner; count their cost and use.

Where the bytes are, for a 7B policy and 512 tokens (by sources and shapes, where no measurement is named):

- Splits of long contexts, 235 MB: see `patches/flash_splits.py`.
- Streams: the target, the drafter's first pass and its further ones are captured on a stream each, which share no
  memory. Each has its activations (60 MB), and on a Hopper GPU a cuBLAS workspace of 32 MB, and one of the rehearsal.
- The graphs themselves, some 50 KB for each piece between two attention layers: 51 piecewise sizes of 29 pieces each
  and 35 full graphs, without a drafter, took 184 MB.

`python -m benchmarks step_time --parts bucketed full` measures it. A row of its tables that fits into the memory of the
rows before it shows close to none.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tlt_lightning.replacing import replace as replace_attribute
from tlt_lightning.speculation.graph_plan import GraphKind, GraphPlan, GraphPool
from tlt_lightning.speculation.strategy import Strategy


def release_graphs(runner: Any) -> None:
    """Free all CUDA graphs of a V2 runner.

    NCCL ends a communicator once no graph holds its kernels any more: the ranks of an engine would wait for ever.
    """
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    for owner in (runner, getattr(runner, "speculator", None)):
        for value in [] if owner is None else vars(owner).values():
            if isinstance(value, CudaGraphManager):
                value.release_graphs()
    CUDAGraphWrapper.clear_all_graphs()


class PlannedGraphs:
    """Puts a graph pool's plan in the place of vLLM's own, from an engine's start to its end.

    Args:
        pool: Plans the graphs.
        arms: The strategies reachable at each batch size.
    """

    def __init__(self, pool: GraphPool, arms: dict[int, tuple[Strategy, ...]]) -> None:
        self.pool, self.arms = pool, arms
        self.plan: GraphPlan | None = None
        self.mib: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self.hits: Counter[str] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace vLLM's plan while an engine starts inside this block."""
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

        capture = CudaGraphManager.capture
        with ExitStack() as undone:
            put = partial(replace_attribute, undone)
            put(CudaGraphManager, "_init_candidates", lambda manager: self.fill(manager))
            put(CudaGraphManager, "capture", lambda manager, *args: self.measure(manager, capture, *args))
            put(SpeculatorCudaGraphManager, "specialize_spec_tokens", lambda m, desc, k: self.specialize(m, desc, k))
            yield

    def attach(self, runner: Any) -> None:
        """Count and dispatch by plan in a started engine; raise RuntimeError if vLLM cannot."""
        speculator = runner.speculator
        if not getattr(speculator, "supports_decode_metadata_update", True):
            raise RuntimeError(
                "CUDA graphs by plan draft all tokens of a step in one graph, which this attention backend of vLLM "
                "cannot; choose another backend, or set `enforce_eager: true`."
            )
        managers = {"target": runner.cudagraph_manager}
        block = getattr(speculator, "query_cudagraph_manager", None)
        managers["drafter_prefill"] = getattr(speculator, "prefill_cudagraph_manager", block)
        managers["drafter_decode"] = getattr(speculator, "decode_cudagraph_manager", None)
        for kind, manager in managers.items():
            if manager is not None:
                self._count(kind, manager)
        if managers["drafter_decode"] is not None:
            manager = managers["drafter_decode"]
            manager.specialize_spec_tokens = lambda desc, k: self.specialize(manager, desc, k)

    def _count(self, kind: str, manager: Any) -> None:
        dispatch = manager.dispatch

        def counted(num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any) -> Any:
            desc = dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
            if uniform_token_count is not None:
                self.hits[f"{kind}_{desc.cg_mode.name.lower()}"] += 1
            return desc

        manager.dispatch = counted

    def fill(self, manager: Any) -> None:
        """Fill a manager's descriptors and candidates from the plan."""
        sizes = manager.compilation_config.cudagraph_capture_sizes
        if not (manager.cudagraph_mode and sizes):
            return
        if self.plan is None:
            self.plan = self.pool.plan(self.arms, sizes)
        fill_manager(manager, self.plan)

    def specialize(self, manager: Any, desc: Any, num_draft_tokens: int) -> Any:
        """Return the graph that drafts exactly `num_draft_tokens` for `desc`; eager without one."""
        from vllm.config.compilation import CUDAGraphMode

        if desc.cg_mode != CUDAGraphMode.FULL or desc in manager.graphs:
            return desc
        assert self.plan is not None
        graph = self.plan.find("drafter_decode", desc.num_reqs, num_draft_tokens)
        planned = None if graph is None else decode_descriptor(graph.num_requests, num_draft_tokens)
        return planned if planned in manager.graphs else replace(desc, cg_mode=CUDAGraphMode.NONE)

    def measure(self, manager: Any, capture: Callable[..., None], *args: Any) -> None:
        """Capture each mode and note its cost; memory used only to warm up does not count."""
        kind, is_rehearsal = graph_kind(manager), manager._max_full_descs_to_capture is not None
        if kind == "target" and not is_rehearsal:  # what came before was vLLM's rehearsal, to know what to reserve
            self.mib.clear()
            self.seconds.clear()
        descriptors = manager._capture_descs
        for mode in sorted(descriptors, key=lambda mode: mode.name != "PIECEWISE"):  # whose activations are the larger
            manager._capture_descs = {mode: descriptors[mode]}
            free, started = _free_mib(), time.perf_counter()
            capture(manager, *args)
            row = "piecewise" if mode.name == "PIECEWISE" else kind
            self.mib[row] += free - _free_mib()
            self.seconds[row] += time.perf_counter() - started
        manager._capture_descs = descriptors

    def num_misses(self) -> int:
        """Return the number of decode passes that no full graph served in this rollout."""
        return sum(count for name, count in self.hits.items() if not name.endswith("_full"))

    def hit_share(self) -> float:
        """Return the share of the target's decode steps that a full graph served."""
        total = sum(count for name, count in self.hits.items() if name.startswith("target_"))
        return self.hits["target_full"] / total if total else 1.0


def graph_kind(manager: Any) -> GraphKind:
    """Return the kind of a V2 runner's graph manager."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    if isinstance(manager, ModelCudaGraphManager):
        return "target"
    return "drafter_decode" if manager.decode_query_len == 1 else "drafter_prefill"


def decode_descriptor(num_requests: int, num_draft_tokens: int) -> Any:
    """Return vLLM's name of the graph that drafts `num_draft_tokens` for `num_requests`."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

    return SpeculatorBatchDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=num_requests,
        num_reqs=num_requests,
        uniform_token_count=1,
        num_speculative_tokens=num_draft_tokens,
    )


def fill_manager(manager: Any, plan: GraphPlan) -> None:
    """Write a plan into a graph manager, in vLLM's own form.

    Candidates of a token count, in order: the tightest full graph of each query length, the smallest piecewise one.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

    kind, mode = graph_kind(manager), manager.cudagraph_mode
    shapes = plan.shapes(kind)
    if isinstance(manager, DFlashCudaGraphManager):  # its one pass drafts the whole block, whatever is then verified
        shapes = sorted({(num_requests, manager.decode_query_len) for num_requests, _ in shapes})
    full: dict[int, list[Any]] = defaultdict(list)
    captured: list[Any] = []
    if mode.decode_mode() == CUDAGraphMode.FULL and mode.separate_routine():
        for num_requests, length in shapes:
            per_request = 1 if kind == "drafter_decode" else length
            desc = BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=num_requests * per_request,
                num_reqs=num_requests,
                uniform_token_count=per_request,
            )
            if desc not in full[per_request]:
                full[per_request].append(desc)
            is_fused = kind == "drafter_decode" and length > 0
            captured.append(decode_descriptor(num_requests, length) if is_fused else desc)
    piecewise = []
    if mode.mixed_mode() == CUDAGraphMode.PIECEWISE:
        piecewise = [
            BatchExecutionDescriptor(cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=size, num_reqs=None)
            for size in plan.piecewise
        ]
    if captured:  # the largest first: the others then fit into its memory
        manager._capture_descs[CUDAGraphMode.FULL] = sorted(captured, key=lambda desc: -desc.num_tokens)
    if piecewise:
        manager._capture_descs[CUDAGraphMode.PIECEWISE] = piecewise[::-1]
    # vLLM looks a batch up by its token count, and takes the first candidate that it fits into. So a count lists, for
    # each query length, the smallest graph of at least so many tokens: full ones first, the piecewise one last.
    lists = [*(sorted(descs, key=lambda desc: desc.num_tokens) for descs in full.values()), piecewise]
    most = max((desc.num_tokens for descs in lists for desc in descs), default=0)
    for tokens in range(most + 1):
        found = (descs[bisect_left(descs, tokens, key=lambda desc: desc.num_tokens) :][:1] for descs in lists)
        manager._candidates[tokens, 0] = [desc for descs in found for desc in descs]


def _free_mib() -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**20
