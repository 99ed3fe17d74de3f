"""Configure policies of Qwen2.5's shapes, and one of SmolLM2's, from which random weights are made."""

from __future__ import annotations

from typing import Any


def _qwen(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, **others: Any
) -> dict[str, Any]:
    """Return a configuration as its `config.json` has it; the rest is the 7B model's, or of `others`."""
    common = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151643,
        "bos_token_id": 151643,
    }
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    return {**common, **shape, **others}


_SMALL = {"vocab_size": 151936, "tie_word_embeddings": True}
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
_TINY = {"vocab_size": 512, "max_position_embeddings": 4096, "torch_dtype": "float32"}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen(64, 128, 4, 2, 1, **_TINY, eos_token_id=1, bos_token_id=1),
    "135m": _qwen(576, 1536, 30, 9, 3, **_SMOLLM2, eos_token_id=2, bos_token_id=1),
    "1.5b": _qwen(1536, 8960, 28, 12, 2, **_SMALL),
    "3b": _qwen(2048, 11008, 36, 16, 2, **_SMALL),
    "7b": _qwen(3584, 18944, 28, 28, 4),
    "14b": _qwen(5120, 13824, 48, 40, 8),
    "32b": _qwen(5120, 27648, 64, 40, 8),
}
