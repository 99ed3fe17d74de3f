"""Load a Hugging Face policy; compute log-probs; stream its weights.

Log-probs never materialise (B, T, V) in float32: only the hidden states that predict a response token meet the head,
`chunk_size` of them at a time, and the backward pass recomputes each chunk of a head that is trained.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tlt_lightning.adapters import LoRA, adapters_of, merged_weight, streamed_name, with_adapters
from tlt_lightning.fused.layers import fuse_layers
from tlt_lightning.fused.logps import chosen_logps, chosen_logps_of_states, is_frozen_linear, joined, rows_per_chunk
from tlt_lightning.model_files import load_whole
from tlt_lightning.objectives.divergence import Divergence
from tlt_lightning.packed_pass import Pack, can_pack, note_if_packable, packed_states, register_varlen
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.sharding.units import Sharding, as_forward, gathered, is_sharded, named_units, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer at `path`.

    Raises:
        ValueError: Its responses could not end, or it has no words.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    # AutoTokenizer swaps a generic tokenizer beside a Qwen2 config for Qwen2's own class and with it the decoder: a
    # tokenizer that says it is generic is what its tokenizer.json says.
    saved_as = get_tokenizer_config(path).get("tokenizer_class")
    is_generic = saved_as in ("TokenizersBackend", "PreTrainedTokenizerFast")
    tokenizer = (PreTrainedTokenizerFast if is_generic else AutoTokenizer).from_pretrained(path)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of `policy` {path!r} has no end-of-sequence token; set `eos_token` and save it."
        )
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # what transformers makes of a folder without its files
        raise ValueError(
            f"The tokenizer of `policy` {path!r} has no tokens but special ones: its files are not in the folder. Save "
            "it there with `tokenizer.save_pretrained`."
        )
    return tokenizer


def end_token_ids(path: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return every token id that ends a response: the tokenizer's, and those of transformers' `generate` at `path`."""
    from transformers import GenerationConfig, PretrainedConfig

    try:
        ends: int | list[int] | None = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # without generation_config.json transformers makes one of config.json
        ends = PretrainedConfig.get_config_dict(path)[0].get("eos_token_id")
    return sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [] if ends is None else [ends])})


def load_policy(
    path: str,
    argument: str = "policy",
    *,
    lora: LoRA | None = None,
    attn_implementation: str = "sdpa",
    sharding: Sharding | None = None,
    needs_head: bool = True,
    is_half: bool = False,
) -> "PreTrainedModel":
    """Load the causal LM at `path` for training: float32, dropout off, train mode.

    With `is_half` it is bfloat16. With `lora` the result is a `peft.PeftModel`, its frozen part of `lora.base_dtype`.
    Warns if its passes cannot be packed. With `sharding` the weights stay in their files, in the files' type, until
    their layer is sharded. A model whose head is not needed may be a reward model.

    Raises:
        ValueError: As of `load_whole`; its weights hold NaN; its logits are more than the output of a linear layer;
            `lora` adapts no layer, or one of two that share a tensor.
    """
    from transformers import AutoModelForCausalLM

    dtype = _dtype_of(lora, is_half)
    options: dict[str, Any] = {
        "dtype": dtype if sharding is None else "auto",
        "attn_implementation": attn_implementation,
    }
    model = load_whole(
        AutoModelForCausalLM, path, argument, needs_head=needs_head, may_hold_more=not needs_head, **options
    )
    if model.base_model is model:  # Llama 4's class names a trunk that only its multimodal one has
        model.base_model_prefix = "model"
    _switch_dropout_off(model)
    fuse_layers(model)
    # A flash kernel needs a GPU: `varlen` stands in, which is told of a pack as it is, by arguments of each layer.
    model.set_attn_implementation(register_varlen() if attn_implementation != "eager" else "eager")
    _check_head(model, path, argument)
    if not note_if_packable(model.base_model):
        log.warning(
            "`%s` %r is a %s, whose layers would mix sequences laid end to end: passes over it are padded instead, "
            "to the same result.",
            *(argument, path, type(model).__name__),
        )
    if attn_implementation != "sdpa":
        model.set_attn_implementation(attn_implementation)
    adapted = with_adapters(model, lora).train()  # from_pretrained returns eval mode, in which checkpointing is off
    if sharding is not None:
        sharding.shard(model, dtype)
    return adapted


def _switch_dropout_off(model: "PreTrainedModel") -> None:
    """Set every dropout and jitter to 0, those that are numbers too: all passes must see the same function."""
    for owner in (model.config, model.config.get_text_config(), *model.modules()):
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            # PhiMoE's jitter is a threshold of its router, too.
            is_noise = "drop" in name or ("jitter" in name and model.config.model_type != "phimoe")
            if is_noise and isinstance(value, float) and value:
                setattr(owner, name, 0.0)


@torch.no_grad()
def _check_head(model: "PreTrainedModel", path: str, argument: str) -> None:
    """Raise ValueError unless the logits are the head's output alone, as chunks take them to be."""
    ids, head = torch.arange(1, 5)[None] % model.config.get_text_config().vocab_size, model.get_output_embeddings()
    logits = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.isfinite(logits).all():
        raise ValueError(
            f"`{argument}` {path!r} computes logits that are no numbers: its files hold NaN or infinite weights."
        )
    # A cap is not felt by logits as small as those of a new model, or of a head of zeros.
    factor = 100 / float(logits.abs().max().clamp(min=1e-30))
    with head.register_forward_hook(lambda *call: call[-1] * factor):
        error = (model(input_ids=ids, use_cache=False).logits.float() - factor * logits).abs().max() / 100
    if error > 0.02:
        raise ValueError(
            f"`{argument}` {path!r} computes logits that differ from its head's output by {float(error):.1%}: "
            "something scales or caps them (`final_logit_softcapping`, `logits_scaling`, `logit_scale`, "
            f"`lm_head_multiplier`), and log-probs in chunks would be wrong. {type(model).__name__} is supported only "
            "without it."
        )


def causal_lm(model: nn.Module) -> "PreTrainedModel":
    """Return the Hugging Face model inside `model`, adapters in place, PEFT's wrapper off."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[return-value,operator]


def response_states(model: nn.Module, batch: RolloutBatch) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Run the trunk and pick the hidden states that predict response tokens.

    Returns the states (N, H), the tokens they predict (N,), and the (sequence, token) index of each in (B, T).
    The sequences run as one pack; where the trunk cannot, padded on the right, so that it needs no mask.
    """
    trunk: Any = causal_lm(model).base_model
    rows, columns = batch.response_mask.nonzero(as_tuple=True)
    positions = batch.prompt_lengths[rows] + columns
    if can_pack(trunk):
        pack = Pack.of(batch.input_ids, batch.lengths)
        states = packed_states(trunk, pack)[pack.starts[rows] + positions - 1]
    else:
        states = trunk(input_ids=batch.input_ids, use_cache=False).last_hidden_state[rows, positions - 1]
    return states, batch.input_ids[rows, positions], (rows, columns)


@dataclass(frozen=True, slots=True)
class Teacher:
    """Holds what a frozen model makes of the tokens of a pass, with which the policy is compared chunk by chunk.

    Args:
        states: Its hidden states that predict the response tokens, in the policy's order. (N, H')
        weight: The head's weight. (V', H')
        bias: The head's bias, if it has one. (V',)
        divergence: How far from it the policy is.
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    divergence: Divergence

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, batch: RolloutBatch, divergence: Divergence) -> "Teacher":
        """Run a frozen model over a batch.

        Of a sharded one the head is put together once, for the backward pass, too: chunks are computed again there, and
        ranks have different numbers of them.
        """
        network = causal_lm(model)
        states, *_ = as_forward(network, lambda: response_states(model, batch))
        head: Any = network.get_output_embeddings()
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        weight, bias = (None if each is None else whole(each.to(dtype)) for each in (head.weight, head.bias))
        return cls(states.to(dtype), cast("Tensor", weight), bias, divergence)

    def compare(self, logits: Tensor, states: Tensor, temperature: float) -> Tensor:
        """Return the divergence of a chunk of the policy's logits, (N,), from what the head makes of its own states."""
        return self.divergence(logits, nn.functional.linear(states, self.weight, self.bias), temperature)


def token_logps(
    head: nn.Module,
    states: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    *,
    needs_entropy_grad: bool = False,
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (N,) log-probs of `targets`, entropies of softmax(head(states) / temperature), divergences from a teacher.

    Args:
        head: The output embedding, (N, H) to (N, V).
        states: Hidden states. (N, H)
        targets: Token ids. (N,)
        temperature: Positive.
        chunk_size: Rows that meet the vocabulary at a time; memory is `chunk_size * V * 4` bytes a few times over.
        needs_entropy_grad: Let entropies carry a gradient, too.
        teacher: Whom the policy is compared with, with gradient; None compares it with nobody.
    """
    is_grad_wanted = torch.is_grad_enabled() and states.requires_grad
    if is_grad_wanted and not needs_entropy_grad and teacher is None and is_frozen_linear(head):
        return *chosen_logps_of_states(cast("nn.Linear", head), states, targets, temperature, chunk_size), None

    def chunk(states: Tensor, targets: Tensor, teacher_states: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = head(states)
        logps, entropy = chosen_logps(logits, targets, temperature)
        found: tuple[Tensor, ...] = logps, entropy
        if teacher is not None and teacher_states is not None:
            found = joined(logps, entropy, teacher.compare(logits, teacher_states, temperature))
        logps, entropy, *divergence = found
        return logps, entropy if needs_entropy_grad else entropy.detach(), *divergence

    results = []
    rows = (states, targets) if teacher is None else (states, targets, teacher.states)
    for parts in zip(*(each.split(chunk_size) for each in rows), strict=True):
        if torch.is_grad_enabled():
            results.append(checkpoint(chunk, *parts, use_reentrant=False))
        else:
            results.append(chunk(*parts))
    logps, entropy, *compared = (torch.cat(each) for each in zip(*results, strict=True))
    return logps, entropy, compared[0] if compared else None


def scatter(values: Tensor, index: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """Put `values` (N,) at `index` into zeros of the shape of `like` (B, T)."""
    return torch.zeros_like(like, dtype=values.dtype).index_put(index, values)


class ResponseTokens(NamedTuple):
    """Holds what a pass computes of the response tokens: (B, T) each, but for states (N, H) and their places in it."""

    logps: Tensor
    entropy: Tensor
    divergence: Tensor | None
    states: Tensor
    places: tuple[Tensor, Tensor]


def response_logps(
    model: nn.Module,
    batch: RolloutBatch,
    *,
    chunk_size: int | None = None,
    needs_entropy_grad: bool = False,
    teacher: Teacher | None = None,
) -> ResponseTokens:
    """Compute log-probs, entropies and divergences of the response tokens, at the batch's temperature.

    Entropies carry a gradient only if `needs_entropy_grad`; there are no divergences without a teacher.
    """
    head = causal_lm(model).get_output_embeddings()
    num_rows = chunk_size or rows_per_chunk(head.weight.shape[0], 1 if teacher is None else 2)

    def compute() -> tuple[Tensor, Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor]]:
        states, targets, index = response_states(model, batch)
        found = token_logps(
            head, states, targets, batch.temperature, num_rows, needs_entropy_grad=needs_entropy_grad, teacher=teacher
        )
        return *found, states, index

    logps, entropy, divergence, states, places = as_forward(causal_lm(model), compute)
    like = batch.rollout_logps
    if divergence is not None:
        divergence = scatter(divergence, places, like)
    return ResponseTokens(scatter(logps, places, like), scatter(entropy, places, like), divergence, states, places)


class PolicyWeights(Iterable[tuple[str, Tensor]]):
    """Streams the policy's weights by Hugging Face name, adapters merged, one at a time.

    Tied weights come once. Merged tensors are fresh copies; all others are the live ones and must not be written. Of a
    sharded policy all ranks stream together, layer by layer: use a layer's tensors before the next one is asked for.

    Args:
        model: The policy, adapters in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.adapters = adapters_of(model)
        self.model = causal_lm(model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors, with nothing merged."""
        parameters = self.model.named_parameters()
        return {streamed_name(name): tuple(each.shape) for name, each in parameters if ".lora_" not in name}

    @override
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for unit, names in named_units(self.model):
            # vLLM completes embedding and head, whose vocabulary it pads, after all others: the root's need copies.
            must_copy = unit is self.model and is_sharded(unit)
            with gathered(unit):
                for name in names:
                    if ".lora_" in name:
                        continue
                    parameter, layer = self.model.get_parameter(name).detach(), self.adapters.get(streamed_name(name))
                    if layer is not None:
                        parameter = merged_weight(layer, parameter)
                    yield streamed_name(name), parameter.clone() if must_copy and layer is None else parameter


def merged(policy: nn.Module) -> "PreTrainedModel":
    """Return a policy as a plain Hugging Face model that holds what `PolicyWeights` streams, in the policy's place."""
    weights = dict(PolicyWeights(policy))
    adapted: Any = policy
    model = adapted.unload() if hasattr(policy, "unload") else adapted
    model.load_state_dict(weights, strict=False)  # tied weights come once
    return model


def _dtype_of(lora: LoRA | None, is_half: bool) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, "bfloat16" if is_half else "float32" if lora is None else lora.base_dtype)
    return dtype


def load_shapes(path: str, lora: LoRA | None = None, *, is_half: bool = False) -> "PreTrainedModel":
    """Return the model that `load_policy` would load, on the meta device: made of its config, without values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype_of(lora, is_half), attn_implementation="eager")
        model.set_attn_implementation(register_varlen())  # GPT-J and others are not built with it
        fuse_layers(model)
        return with_adapters(model, lora)


def policy_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights of the policy at `path`, from its config alone."""
    return PolicyWeights(load_shapes(path)).shapes
