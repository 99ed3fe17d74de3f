"""Tiny random policies of the architectures that are rolled out with vLLM."""

from pathlib import Path
from typing import Any

import torch

from tests.conftest import WORDS, save_tokenizer

_OWN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"rope_parameters": None},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "vaultgemma": {"head_dim": 32},
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
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    own = {name: value for name, value in _OWN[model_type].items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **{**shape, **own, **overrides})
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    save_tokenizer(path)
    return str(path)
