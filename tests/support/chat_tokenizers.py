"""Tokenizers of bytes that know the special tokens of a chat template, for the templates of many models."""

import re
from pathlib import Path

import trl
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BAR = "\uff5c"  # of DeepSeek's tokens
FOLDER = Path(trl.__file__).parent / "chat_templates"
SPECIAL = re.compile(rf"<[|{BAR}][^<>\s]{{1,40}}[|{BAR}]>|<(?:start_of_turn|end_of_turn|bos|eos)>")
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_training": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "phi3": "<|endoftext|>",
    "phi3_5": "<|endoftext|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "lfm2": "<|im_end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek_r1_distill": f"<{BAR}end▁of▁sentence{BAR}>",
    "deepseek_r1_distill_training": f"<{BAR}end▁of▁sentence{BAR}>",
}
"""The token that ends a text, of each template."""


def template_of(name: str) -> str:
    """A chat template that TRL brings, as its model has it."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def byte_tokenizer(template: str, end: str) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes, which merges nothing, with a chat template and its special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Decoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, bos_token="<bos>")
    fast.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(template)})})
    fast.chat_template = template
    return fast
