"""Speculate on vLLM's V2 model runner, the GPU's default, without a wait for the device.

Drafts that are single tokens, not distributions, are verified by drawing: at every row of logits a token is drawn as
plain decoding draws it, with noise of the request's seed and the position, and drafts are kept as long as they are what
was drawn. A draft is kept with the policy's probability of it, as in rejection sampling; but what is drawn never hangs
on it. So the text is that of plain decoding with the same seed, and a draft may know the noise.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.engine.vllm.graphs import PlannedGraphs
from tlt_lightning.engine.vllm.internals import reach
from tlt_lightning.engine.vllm.runner import SpeculativeRunner
from tlt_lightning.speculation.controller import StrategyController
from tlt_lightning.speculation.lookup import LookupDraft, Source
from tlt_lightning.speculation.strategy import Strategy


class RunnerV2(SpeculativeRunner):
    """Speculates on a V2 model runner.

    The host runs one to two steps ahead of the device, and looks up continuations of texts without their last tokens.
    The device knows these tokens: it keeps a continuation that begins with them, and drafts what comes next in it.

    Args:
        runner: vLLM's model runner.
        controller: Chooses the strategies.
        has_head: True if its speculator is a head; otherwise it only stands in.
        graphs: The CUDA graphs captured by plan; None without.
    """

    def __init__(
        self, runner: Any, controller: StrategyController, *, has_head: bool, graphs: PlannedGraphs | None = None
    ) -> None:
        self.speculator = reach(runner, "speculator")
        self.states = reach(runner, "req_states")
        super().__init__(runner, controller, head=reach(self.speculator, "model") if has_head else None, graphs=graphs)
        self._drafts = torch.zeros_like(reach(self.states, "draft_tokens"))
        self._group, self._block_size = self._find_cache() if has_head else (0, 0)
        self._propose = reach(self.speculator, "propose")
        self._signature = inspect.signature(self._propose)
        self.speculator.propose = self.propose
        if reach(self.speculator, "draft_logits") is None:  # drafts are tokens alone, and are verified as such
            self._verifier = reach(runner, "rejection_sampler")
            width = reach(self._verifier, "num_speculative_steps") + 1
            self._columns = torch.arange(width + 1, device=self._drafts.device)
            self._verifier._verify = self.verify

    @property
    @override
    def num_engine_drafts(self) -> int:
        return self.controller.strategy.num_draft_tokens

    def _find_cache(self) -> tuple[int, int]:
        """Return the index of the head's block table, and the tokens a block holds."""
        layers = reach(self.speculator, "draft_attn_layer_names")
        groups = reach(self.speculator, "kv_cache_config.kv_cache_groups")
        index = next(index for index, group in enumerate(groups) if layers & set(group.layer_names))
        return index, reach(self.speculator, "block_tables.block_sizes")[index]

    @override
    def _cache(self) -> tuple[Mapping[str, int], Tensor, int]:
        return self.states.req_id_to_index, self.speculator.block_tables.block_tables[self._group].gpu, self._block_size

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return drafts, (B, longest draft); stands in front of the speculator's own `propose`."""
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        batch, last_sampled = given["input_batch"], given["last_sampled"].view(-1)
        if given.get("dummy_run"):
            return self._propose(*args, **kwargs)
        strategy = self.controller.strategy
        drafts = self._drafts[: batch.num_reqs]
        if self.head is not None:
            is_plain_decode = not batch.has_prefill and int(batch.num_scheduled_tokens.max()) == 1
            if strategy.is_learned or not is_plain_decode:
                self._catch_up()
                given["num_speculative_tokens"] = given["num_speculative_tokens"] if strategy.is_learned else 0
                drafts = self._propose(*bound.args, **bound.kwargs)
            else:
                rows = batch.num_reqs
                hidden = [states[:rows] for states in given["aux_hidden_states"]]
                self._skip(
                    batch.req_ids,
                    hidden=hidden,
                    last_ids=last_sampled,
                    positions=batch.positions[:rows],
                    rows=batch.idx_mapping,
                )
        if strategy.is_off:
            return drafts
        if not strategy.is_learned:
            drafts.copy_(last_sampled[batch.idx_mapping][:, None])  # any token will do: it is verified
        # Long enough to outlast two steps under way, which emit K + 1 tokens each at most.
        self._lookups = self.controller.look_up(batch.req_ids, 3 * strategy.num_draft_tokens + 2)
        return self._splice(batch, drafts) if self._lookups else drafts

    def verify(
        self,
        logits: Tensor,
        draft_logits: None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return processed logits, tokens and numbers of tokens; stands in place of the rejection sampler's `_verify`.

        The parameters are those of vLLM 0.32, which calls by position. Log-probs are asked for because vLLM's fused
        samplers, which it takes without, have noise of another kind.
        """
        drawn, processed = self._verifier.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=True,
        )
        return processed, *keep_drawn(drawn, verify_draft_sampled, cu_num_logits, self._columns)

    def _splice(self, batch: Any, drafts: Tensor) -> Tensor:
        packed = torch.from_numpy(pack_lookups(batch.req_ids, self._lookups))
        if drafts.is_cuda:
            packed = packed.pin_memory().to(drafts.device, non_blocking=True)
        rows = batch.idx_mapping
        width = packed.shape[1] - 2
        known = packed[:, 0]
        last = self.states.all_token_ids.gpu.shape[1] - 1
        columns = (known[:, None] + torch.arange(width, device=packed.device)).clamp(max=last)
        written = self.states.all_token_ids.gpu[rows[:, None], columns]
        return splice(drafts, packed, written, self.states.total_len.gpu[rows])

    @override
    def source(self, strategy: Strategy, lookup: LookupDraft | None, request: Any) -> Source | None:
        """Return the drafts' source; by now the host knows if the device kept the look-up."""
        if lookup is not None:
            since = list(request.all_token_ids[lookup.num_known :])
            if lookup.tokens[: len(since)] != since or len(lookup.tokens) <= len(since):
                lookup = None
        return super().source(strategy, lookup, request)


def keep_drawn(drawn: Tensor, drafts: Tensor, bounds: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of each request, (B, K + 1), and how many are written, (B,); no wait.

    These are the drafts that were drawn, up to the first that was not, and what was drawn after them.

    Args:
        drawn: Token drawn from each row of logits, (N,); a request has a row more than drafts, at most K + 1.
        drafts: Token that each row follows, (N,): in a request's later rows its drafts, of which -1 is none.
        bounds: First row of each request, and the end of the last one's, (B + 1,).
        columns: 0 to K + 1, (K + 2,).
    """
    rows = bounds[:-1, None] + columns  # (B, K + 2)
    is_end = rows[:, 1:] >= bounds[1:, None]
    rows.clamp_(max=len(drawn) - 1)
    tokens = drawn[rows[:, :-1]]
    differs = is_end.logical_or_(tokens != drafts[rows[:, 1:]])
    return tokens, differs.view(torch.uint8).argmax(1).int().add_(1)  # the first of equals


def pack_lookups(request_ids: list[str], lookups: Mapping[str, LookupDraft]) -> np.ndarray:
    """Return look-ups as rows, (B, 2 + longest): tokens known, draft length, padded draft."""
    longest = max(len(lookup.tokens) for lookup in lookups.values())
    packed = np.zeros((len(request_ids), 2 + longest), dtype=np.int64)
    for row, request_id in zip(packed, request_ids, strict=True):
        lookup = lookups.get(request_id)
        if lookup is not None:
            row[0], row[1] = lookup.num_known, len(lookup.tokens)
            row[2 : 2 + len(lookup.tokens)] = lookup.tokens
    return packed


def splice(drafts: Tensor, packed: Tensor, written: Tensor, total: Tensor) -> Tensor:
    """Return drafts, (B, K): continuations that turned out right so far, else `drafts`; no wait.

    Args:
        drafts: What is drafted where no continuation fits, (B, K).
        packed: Rows of `pack_lookups`, (B, 2 + M).
        written: Tokens since the host stopped knowing, (B, M); only the first `total - known` are real.
        total: Tokens each request has by now, (B,).
    """
    known, length, continuation = packed[:, 0], packed[:, 1], packed[:, 2:]
    ahead = total.to(known.dtype) - known  # (B,)
    at = torch.arange(continuation.shape[1], device=packed.device)
    agrees = ((continuation == written) | (at >= ahead[:, None])).all(dim=1)
    columns = ahead[:, None] + torch.arange(drafts.shape[1], device=packed.device)  # (B, K)
    fits = agrees[:, None] & (ahead >= 0)[:, None] & (columns < length[:, None])
    taken = continuation.gather(1, columns.clamp(0, continuation.shape[1] - 1))
    return torch.where(fits, taken.to(drafts.dtype), drafts)
