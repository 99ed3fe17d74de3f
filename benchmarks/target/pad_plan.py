"""Plan each tensor of a padded policy and its head: copies of small ones, or padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import Qwen2Config

from benchmarks.common.shapes import SHAPES
from benchmarks.target.pad_maps import Axis, cancelling, copied, heads, pad_matrix, residual, side_by_side

INIT_STD = 0.02  # of random weights, as Qwen2 initialises them
CONSTANT = 2.0**-7  # the constant dimension relative to an embedding: too small to be seen by an RMSNorm in float32
# What padded tokens make of the constant, as large as the final norm makes it. Their logits are below -100 while the
# residual stream is less than a million times an embedding. (A product of 2**24 was too little where a policy's stream
# grew to thousands.) A head of random weights has a norm of its own: with all of the product in the output head, the
# first packs would cost it 1e10 nats a token, and teach it nothing else.
GAIN, NEVER = 2.0**32, -(2.0**2)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sets the shape of the wide policy and its heads; names as in a Qwen2 configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SEVEN_B = Shape(**{item.name: SHAPES["7b"][item.name] for item in fields(Shape)})
TINY = Shape(
    hidden_size=448,
    intermediate_size=1000,
    num_hidden_layers=7,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=256,
)


class Padding:
    """Plans the wide tensors of one small policy, with random padding.

    `config` is the small policy's, `shape` and `dtype` the wide one's, `seed` that of the padding.
    """

    def __init__(self, config: Qwen2Config, shape: Shape, device: str, dtype: torch.dtype, seed: int) -> None:
        self.config, self.shape, self.device, self.dtype = config, shape, device, dtype
        small = (config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads)
        wide = (shape.num_attention_heads, shape.num_key_value_heads)
        self.head_dim = config.hidden_size // small[0]
        if config.num_hidden_layers > shape.num_hidden_layers or config.vocab_size > shape.vocab_size:
            raise ValueError(f"The policy has more layers or tokens than {shape}.")
        if shape.hidden_size != wide[0] * self.head_dim:
            raise ValueError(f"Heads of {self.head_dim} dimensions, as the policy has, do not fill {shape}.")
        self.stream = residual(config.hidden_size, shape.hidden_size)
        self.units = copied(config.intermediate_size, shape.intermediate_size)
        self.query, self.key = heads(small, wide, self.head_dim)
        layers = config.num_hidden_layers
        self.places = [index * shape.num_hidden_layers // layers for index in range(layers)]
        self._generator = torch.Generator(device).manual_seed(seed)

    def layer_id(self, small: int) -> int:
        """Return the wide layer whose input is that of layer `small` of the small policy."""
        return [*self.places, self.shape.num_hidden_layers][small]

    def random(self, *size: int, std: float = INIT_STD) -> Tensor:
        """Draw random padding."""
        return std * torch.randn(*size, generator=self._generator, device=self.device)

    def axes(self, projection: str, inputs: Axis) -> tuple[Axis, Axis]:
        """Return the axes of a projection; `inputs` are the columns that read the residual stream."""
        return {
            "q_proj": (self.query, inputs),
            "k_proj": (self.key, inputs),
            "v_proj": (self.key, inputs),
            "o_proj": (self.stream, self.query),
            "gate_proj": (self.units, inputs),
            "up_proj": (self.units, inputs),
            "down_proj": (self.stream, self.units),
        }[projection]

    def layer(self, tensors: dict[str, Tensor], inputs: Axis) -> Iterator[tuple[str, Tensor]]:
        """Return a decoder layer's wide tensors by name; a head's attention reads more."""
        for name, tensor in tensors.items():
            *_, module, kind = name.split(".")
            if module in ("q_norm", "k_norm"):
                yield name, tensor  # of each attention head by itself
                continue
            if module.endswith("norm"):
                yield name, self.norm(tensor)
                continue
            rows, columns = self.axes(module, self.stream if module in ("gate_proj", "up_proj") else inputs)
            yield name, pad_matrix(tensor, rows, columns) if kind == "weight" else tensor[rows.source]

    def norm(self, weight: Tensor, gain: float = 1.0) -> Tensor:
        """Return the wide weight of a norm: copies, and `gain` for the constant."""
        wide = weight[self.stream.source.to(weight.device)].clone()
        wide[-1] = gain
        return wide

    def idle_layer(self) -> Iterator[tuple[str, Tensor]]:
        """Return a random layer that adds nothing: outputs of equal units and heads cancel."""
        shape, width = self.shape, self.shape.hidden_size
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.weight", 1 + self.random(width, std=0.1)
        groups, group = shape.num_key_value_heads, shape.num_attention_heads // shape.num_key_value_heads
        sets, weights = (tensor.to(self.device) for tensor in cancelling(group))
        count = int(sets.max()) + 1
        for kind, size in (("weight", width), ("bias", 1)):
            queries = self.random(groups, count, self.head_dim, size)[:, sets].flatten(0, 2)
            keys, values = self.random(2, groups * self.head_dim, size)
            for name, tensor in zip("qkv", (queries, keys, values), strict=True):
                yield f"self_attn.{name}_proj.{kind}", tensor if kind == "weight" else tensor[:, 0]
        written = self.random(width, groups, count, self.head_dim)[:, :, sets] * weights[:, None]
        yield "self_attn.o_proj.weight", self.keep_constant(written.flatten(1))
        sets, weights = (tensor.to(self.device) for tensor in cancelling(shape.intermediate_size))
        count = int(sets.max()) + 1
        yield "mlp.gate_proj.weight", self.random(count, width)[sets]
        yield "mlp.up_proj.weight", self.random(count, width)[sets]
        yield "mlp.down_proj.weight", self.keep_constant(self.random(width, count)[:, sets] * weights)

    @staticmethod
    def keep_constant(matrix: Tensor) -> Tensor:
        """Let an output projection leave the constant dimension alone."""
        matrix[-1] = 0.0
        return matrix

    def embedding(self, weight: Tensor) -> Tensor:
        """Return the wide embedding, random above the small vocabulary, with the constant."""
        columns = Axis(self.stream.source, self.stream.write, self.stream.write)  # written, not read
        wide = self.random(self.shape.vocab_size, self.shape.hidden_size, std=weight.float().std().item())
        wide[: len(weight)] = pad_matrix(weight, _identity(len(weight)), columns)
        scale = weight.float().square().mean(-1).sqrt()
        scale = scale[scale > 0].min()  # small beside every token; that of padding, which never occurs, is zero
        wide[:, -1] = CONSTANT * 2.0 ** scale.log2().floor()
        return wide

    def output_head(self, weight: Tensor) -> Tensor:
        """Return the wide output head; it pushes tokens above the small vocabulary below all others."""
        wide = self.random(self.shape.vocab_size, self.shape.hidden_size)
        wide[: len(weight)] = pad_matrix(weight, _identity(len(weight)), self.stream)
        wide[len(weight) :, -1] = NEVER
        return wide

    def policy(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors of the wide policy by name."""
        embedding = tensors["model.embed_tokens.weight"]
        yield "model.embed_tokens.weight", self.embedding(embedding)
        for index in range(self.shape.num_hidden_layers):
            prefix = f"model.layers.{index}."
            if index in self.places:
                small = _below(tensors, f"model.layers.{self.places.index(index)}.")
                named = self.layer(small, self.stream)
            else:
                named = self.idle_layer()
            yield from ((prefix + name, tensor) for name, tensor in named)
        yield "model.norm.weight", self.norm(tensors["model.norm.weight"], GAIN)
        yield "lm_head.weight", self.output_head(tensors.get("lm_head.weight", embedding))

    def head(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Return all trained tensors of the wide EAGLE-3 head by name."""
        small = self.config.hidden_size
        fused = pad_matrix(tensors["fc.weight"], self.stream, side_by_side(self.stream, small, 3))
        fused[-1] = 0.0
        fused[-1, self.shape.hidden_size - 1] = 1.0  # hands on the constant of the first of the policy's layers
        yield "fc.weight", fused
        inputs = side_by_side(self.stream, small, 2)
        yield from (("layers.0." + name, tensor) for name, tensor in self.layer(_below(tensors, "layers.0."), inputs))
        yield "norm.weight", self.norm(tensors["norm.weight"], GAIN)

    def block_head(self, tensors: dict[str, Tensor], draft_vocab: int) -> Iterator[tuple[str, Tensor]]:
        """Return all trained tensors of the wide DSpark head by name; its constant is that of the embedding."""
        small = self.config.hidden_size
        yield "fc.weight", pad_matrix(tensors["fc.weight"], self.stream, side_by_side(self.stream, small, 3))
        yield "hidden_norm.weight", self.norm(tensors["hidden_norm.weight"])
        yield from self.layer({name: each for name, each in tensors.items() if name.startswith("layers.")}, self.stream)
        yield "norm.weight", self.norm(tensors["norm.weight"], GAIN)
        for name, size in (("markov_w1", self.shape.vocab_size), ("markov_w2", draft_vocab)):
            known = tensors[f"markov_head.{name}.weight"][:size]
            others = self.random(size - len(known), known.shape[1], std=known.float().std().item())
            yield f"markov_head.{name}.weight", torch.cat([known.float(), others])


def _identity(size: int) -> Axis:
    return copied(size, size)


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
