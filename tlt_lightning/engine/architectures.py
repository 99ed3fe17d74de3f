"""List the architectures that tests prove on vLLM, and refuse all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WAY_OUT = (
    "`data.engine: tlt_lightning.TransformersEngine` rolls out with the trainer's own model, slower, if its logits are "
    "the output of its head alone"
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes an architecture and what it takes beside plain rollouts and look-ups.

    Args:
        name: First of the `architectures` in a Hugging Face config.
        model_type: The config's `model_type`.
        takes_head: vLLM's model hands out the hidden states that an EAGLE-3 head reads.
        has_drafter: `DrafterModule` and `LongTailIdleCallback` build and train heads for it.
    """

    name: str
    model_type: str
    takes_head: bool = False
    has_drafter: bool = False


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("Qwen2ForCausalLM", "qwen2", takes_head=True, has_drafter=True),
    Architecture("Qwen3ForCausalLM", "qwen3", takes_head=True, has_drafter=True),
    Architecture("LlamaForCausalLM", "llama", takes_head=True, has_drafter=True),
    Architecture("MistralForCausalLM", "mistral", takes_head=True),
    Architecture("GemmaForCausalLM", "gemma"),
    Architecture("Gemma3ForCausalLM", "gemma3_text"),
    Architecture("Phi3ForCausalLM", "phi3", takes_head=True),
    Architecture("PhiForCausalLM", "phi"),
    Architecture("SmolLM3ForCausalLM", "smollm3"),
    Architecture("Olmo2ForCausalLM", "olmo2"),
    Architecture("Olmo3ForCausalLM", "olmo3"),
    Architecture("GraniteForCausalLM", "granite", takes_head=True),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", takes_head=True),
    Architecture("OlmoeForCausalLM", "olmoe"),
)


def check_architecture(policy: str, *, with_head: bool = False) -> Architecture:
    """Raise ValueError unless tests prove the policy on vLLM; import nothing of vLLM.

    Args:
        policy: Path or hub name.
        with_head: The engine is to draft with an EAGLE-3 head.
    """
    from transformers import AutoConfig

    name = (AutoConfig.from_pretrained(policy).architectures or ["an unnamed architecture"])[0]
    found = next((each for each in ARCHITECTURES if each.name == name), None)
    if found is None:
        raise ValueError(
            f"`policy` {policy!r} is a {name}, for which rollouts with vLLM are not proven; they are for "
            f"{', '.join(each.name for each in ARCHITECTURES)}. {WAY_OUT}."
        )
    if with_head and not found.takes_head:
        raise ValueError(
            f"`speculation` has a head, but vLLM's {name} (`policy` {policy!r}) hands no hidden states to one; "
            "speculate by look-ups (`siblings`, `ngram`)."
        )
    return found


def check_head_size(policy: str, supported: Sequence[int]) -> None:
    """Raise ValueError unless `supported` has the size of the attention heads."""
    from transformers import AutoConfig

    size = head_size(AutoConfig.from_pretrained(policy))
    if size not in supported:
        raise ValueError(
            f"`policy` {policy!r} has attention heads of size {size}; vLLM's CPU build runs only {list(supported)}. "
            f"{WAY_OUT}."
        )


def head_size(config: Any) -> int:
    """Return the size of an attention head of a Hugging Face config, of the first layer where layers differ."""
    layer = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
