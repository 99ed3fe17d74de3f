"""The models, batches and step counts of `micro/step_time.py`: one for a GPU, one to see that it works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is.

    Args:
        shape: The policy's configuration.
        batches: Batch sizes measured.
        switch_batches: Batch sizes at which switching on is measured.
        context: Prompt length there.
        steps: Steps timed for each cell, a multiple of the backlog's length.
        rounds: Times each cell is measured; the fastest counts.
        engine: Arguments of the engine.
    """

    shape: dict[str, Any]
    batches: tuple[int, ...]
    switch_batches: tuple[int, ...]
    context: int
    steps: int
    rounds: int
    engine: dict[str, Any]


COMMON = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6}
LARGE = Scale(
    shape={
        **COMMON,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151643,
        "bos_token_id": 151643,
    },
    batches=(1, 8, 32, 64, 128),
    switch_batches=(1, 8, 32),
    context=2048,
    steps=64,
    rounds=2,
    engine={"dtype": "bfloat16", "max_num_seqs": 128, "gpu_memory_utilization": 0.6, "sleep": False},
)
TINY = Scale(
    shape={
        **COMMON,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 1,
        "bos_token_id": 1,
    },
    batches=(1, 4),
    switch_batches=(1, 4),
    context=384,
    steps=16,
    rounds=1,
    engine={"dtype": "float32", "max_num_seqs": 4, "kv_cache_gib": 0.5, "enforce_eager": True},
)
