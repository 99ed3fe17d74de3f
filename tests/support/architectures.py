"""Tiny random policies of the architectures that are rolled out with vLLM."""

from pathlib import Path
from typing import Any

from tests.conftest import save_policy

_OWN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {},
    "mistral": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {},
    "granite": {"attention_multiplier": 0.1},  # by default 1: attention so sharp that rounding alone moves log-probs
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "vaultgemma": {"head_dim": 32},
    "gemma4_text": {"head_dim": 32},
    "llama4_text": {"head_dim": 32, "num_local_experts": 2},
    "gptj": {"n_embd": 64, "n_head": 2, "n_layer": 2, "rotary_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "stablelm": {},
    "starcoder2": {},
    "cohere": {},
    "ernie4_5": {"head_dim": 32},
    "seed_oss": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "falcon_h1": {},
    "phi": {},
    "nemotron": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}


def save_architecture(model_type: str, path: Path, seed: int = 0, **overrides: Any) -> str:
    """Save a tiny random policy of a Hugging Face model type, with the tests' tokenizer; return its path."""
    return str(save_policy(path, model_type, seed, **{"tie_word_embeddings": False, **_OWN[model_type], **overrides}))


def save_longrope(path: Path) -> str:
    """Save a tiny policy of Phi-3's kind whose RoPE turns otherwise beyond 32 tokens; return its path."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 3 * place for place in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    return save_architecture("phi3", path, original_max_position_embeddings=32, rope_parameters=rope)
