"""Give CUDA graphs only as many splits of a context as their requests can use.

FlashAttention 3 splits a long context among multiprocessors. A graph keeps partial results for as many splits as may
ever be used: 32 by vLLM's default, of 4 bytes for each token, head and channel, 235 MB for a 7B policy and 512 tokens.
Only few requests leave multiprocessors idle enough for many splits.
"""

from typing import Any

import torch

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch
from tlt_lightning.replacing import replaced

MIN_SPLITS = 4
"""Splits that even a full batch keeps: one context may be far longer than the others."""


def useful_splits(num_requests: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return the splits of a context that still keep more multiprocessors busy in decoding."""
    return max(MIN_SPLITS, -(-2 * num_multiprocessors // (num_requests * num_kv_heads)))


def build_with_fewer_splits(
    build: Any, builder: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    """Build FlashAttention's metadata of a batch with useful splits alone; stands around the builder's `build`."""
    splits = builder.max_num_splits
    if splits > 0:  # 0: it does not serve graphs
        multiprocessors = torch.cuda.get_device_properties(builder.device).multi_processor_count
        splits = min(splits, useful_splits(common_attn_metadata.num_reqs, builder.num_heads_kv, multiprocessors))
    with replaced(builder, "max_num_splits", splits):
        return build(builder, common_prefix_len, common_attn_metadata, *args, **kwargs)


PATCH = Patch(
    why="A CUDA graph reserves memory for 32 splits of every context, which batches of more than a few requests "
    "cannot use: hundreds of MB a graph pool.",
    versions="0.32, FlashAttention 3, CUDA",
    is_needed=lambda: not is_cpu_build(),
    around={"vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder.build": build_with_fewer_splits},
)
