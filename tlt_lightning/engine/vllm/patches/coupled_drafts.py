"""Let a head sample its drafts with the noise by which the V2 runner then verifies them.

Verification draws at every position the token with the largest log-probability plus Gumbel noise of the request's seed
and the position (`runner_v2.py`). A head that draws with the same noise from its own distribution q draws the same
token as the policy, of distribution p, with the chance

    sum over x of 1 / (sum over y of max(p_y / p_x, q_y / q_x)),

a few percent below rejection sampling's `sum of min(p, q)`, and well above p of the head's likeliest token (Daliri et
al. 2025, "Coupling without communication and drafter-invariant speculative decoding"). Nothing but the token is kept:
the drafts need no memory for distributions, may be mixed with look-ups, and leave the text of a seed as it is.

vLLM salts the noise of drafts, as its own rejection sampling must, and samples drafts only to verify them by that.
"""

from functools import partial
from math import inf
from typing import Any

import torch

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch

COUPLED = {"tlt_lightning.coupled_drafts": True}
"""vLLM's `additional_config` of an engine whose drafts are coupled."""


def sample_coupled(
    speculator: Any,
    hidden_states: Any,
    sample_src_positions: Any,
    idx_mapping: Any,
    temperature: Any,
    seeds: Any,
    draft_step: Any,
    draft_logits: Any,
    spec_step_idx: int = 0,
) -> Any:
    """Return drafts as verification draws; stands in place of the speculator's `sample_draft`."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    return gumbel_sample(
        speculator.compute_draft_logits(hidden_states, spec_step_idx),
        idx_mapping,
        temperature,
        seeds,
        sample_src_positions,
        apply_temperature=True,
        is_drafting=False,  # a draft's noise would be salted
        use_fp64=speculator.use_fp64_gumbel,
    )


def sample_block_coupled(speculator: Any, logits: Any, idx_map: Any, sample_pos: Any, step: int) -> Any:
    """Return one draft of each block, likewise; stands in place of DSpark's `_sample_logits`."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    tokens = speculator.model.draft_id_to_target_id
    if tokens is not None:  # the noise is that of the policy's tokens
        whole = logits.new_full((len(logits), speculator.vocab_size), -inf)
        own = torch.arange(len(tokens), device=tokens.device)
        logits = whole.index_copy_(1, own + tokens, logits)
    return gumbel_sample(
        logits,
        idx_map,
        speculator.temperature,
        speculator.seeds,
        sample_pos - 1,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=speculator.use_fp64_gumbel,
    )


def _sample(coupled: Any, usual: Any, speculator: Any, *args: Any, **kwargs: Any) -> Any:
    is_coupled = COUPLED.items() <= speculator.vllm_config.additional_config.items()
    return (coupled if is_coupled else usual)(speculator, *args, **kwargs)


PATCH = Patch(
    why="Drafts are sampled with other noise than verification draws with, to be verified by their distributions: "
    "look-ups have none.",
    versions="0.32, V2 model runner, CUDA",
    is_needed=lambda: not is_cpu_build(),
    around={
        "vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.sample_draft": partial(_sample, sample_coupled),
        "vllm.v1.worker.gpu.spec_decode.dspark.speculator.DSparkSpeculator._sample_logits": partial(
            _sample, sample_block_coupled
        ),
    },
)
