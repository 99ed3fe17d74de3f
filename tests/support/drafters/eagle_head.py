"""A small EAGLE-3 head in plain torch: saved as vLLM loads it, trained in seconds."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

LAYER_IDS = (1, 2, 3)
NUM_HEADS, NUM_KV_HEADS = 2, 1


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class EagleHead(nn.Module):
    """Reads token t + 1 and the target's hidden states at t, predicts token t + 2."""

    def __init__(self, vocab_size: int, hidden_size: int = 64, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)  # noqa: E731
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.head_dim = hidden_size // NUM_HEADS
        kv = self.head_dim * NUM_KV_HEADS
        self.fc = linear(len(LAYER_IDS) * hidden_size, hidden_size)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": RMSNorm(hidden_size),
                "hidden_norm": RMSNorm(hidden_size),
                "post_attention_layernorm": RMSNorm(hidden_size),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * hidden_size, hidden_size),
                        "k_proj": linear(2 * hidden_size, kv),
                        "v_proj": linear(2 * hidden_size, kv),
                        "o_proj": linear(hidden_size, hidden_size),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": linear(hidden_size, 2 * hidden_size),
                        "up_proj": linear(hidden_size, 2 * hidden_size),
                        "down_proj": linear(2 * hidden_size, hidden_size),
                    }
                ),
            }
        )
        self.norm = RMSNorm(hidden_size)
        self.lm_head = linear(hidden_size, draft_vocab_size or vocab_size)
        frequencies = 1 / (10000 ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        layer, attention = self.midlayer, self.midlayer["self_attn"]
        x = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](hidden)], -1)
        split = lambda y, heads: y.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # noqa: E731
        query = self.rotate(split(attention["q_proj"](x), NUM_HEADS))
        key = self.rotate(split(attention["k_proj"](x), NUM_KV_HEADS))
        value = split(attention["v_proj"](x), NUM_KV_HEADS)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        y = layer["post_attention_layernorm"](hidden)
        mlp = layer["mlp"]
        return self.norm(hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y)))


def make_head(policy: str, seed: int = 0, draft_vocab_size: int | None = None) -> EagleHead:
    config = json.loads((Path(policy) / "config.json").read_text())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return EagleHead(config["vocab_size"], config["hidden_size"], draft_vocab_size)


def save_head(head: EagleHead, path: Path, **overrides: object) -> str:
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.lm_head.out_features,
        "hidden_size": head.hidden_size,
        "target_hidden_size": head.hidden_size,
        "intermediate_size": 2 * head.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": head.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": list(LAYER_IDS),
    }
    (path / "config.json").write_text(json.dumps({**config, **overrides}))
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in head.state_dict().items()}
    if head.lm_head.out_features < head.vocab_size:
        tensors["d2t"] = torch.zeros(head.lm_head.out_features, dtype=torch.long)
    save_file(tensors, path / "model.safetensors")
    return str(path)


def train_head(head: EagleHead, policy: str, texts: list[list[int]], num_steps: int = 150) -> EagleHead:
    """Fit the head to the policy's own greedy texts (all of one length)."""
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    ids = torch.tensor(texts)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        hidden = torch.cat([states[layer] for layer in LAYER_IDS], -1)[:, :-2]
        embedded = model.get_input_embeddings()(ids[:, 1:-1])
    targets = ids[:, 2:]
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(num_steps):
        first = head(embedded, head.fc(hidden))
        loss = F.cross_entropy(head.lm_head(first).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval()
