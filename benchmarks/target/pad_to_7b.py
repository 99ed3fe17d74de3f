"""Lay a small policy and its draft heads into a network of Qwen2.5-7B's shape that computes the same function.

    python -m benchmarks pad_to_7b --policy target/policy --head target/head target/head-brief --out wide

A step of the result costs what a step of a 7B model costs, while its text, and how much of it a head drafts right, are
those of the small, trained policy. Each directory written says that it is padded. `--tiny` widens to a few hundred
dimensions on a CPU, to see that it works.

What is real: log-probs, text and acceptance are those of the small policy and head, to the rounding of bfloat16;
shapes, bytes, operations and KV cache are those of Qwen2.5-7B and of an EAGLE-3 head for it. No matrix is of zeros, on
which a GPU computes faster.

What is padded:

- It knows no more than the small policy. Each small dimension, query head and MLP unit is there several times
  (`target/pad_maps.py`), in as many layers as the small policy has. The other layers have random weights, in pairs and
  triples whose outputs cancel, so that they add nothing.
- The tokens above the small vocabulary have random embeddings and are never sampled: one residual dimension holds a
  constant that puts their logits far below all others.
- The head is widened like a layer. It drafts the first 32,000 tokens, as many as EAGLE-3 heads of 7B models do and all
  that occur among them; `--draft-vocab 152064` drafts all.
- Training it is not training a 7B model: what an optimizer does to the copies of a weight adds up, so that learning
  rates do not carry over, and the cancelling layers wake up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config

from benchmarks.common.results_file import about, heading, save, table
from benchmarks.target.pad_plan import SEVEN_B, TINY, Widening

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 4 << 30
COMPARED = {"wide": "wide against small", "floor": "small against itself in float32"}


def read(path: Path, device: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file, device)
    return tensors


def write(path: Path, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> int:
    """Write tensors in shards with their index; the number of weights."""
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    count = size = 0

    def flush() -> None:
        file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in named:
        if sum(held.nbytes for held in shard.values()) > SHARD_BYTES:
            flush()
        shard[name] = tensor.to(dtype).cpu().contiguous()
        count, size = count + tensor.numel(), size + shard[name].nbytes
    flush()
    contents = {"metadata": {"total_size": size}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(contents, indent=1))
    return count


def label(path: Path, what: str, facts: dict[str, Any]) -> None:
    """Say in the directory that what it holds is padded."""
    (path / "padded.json").write_text(json.dumps({"padded": True, "what": what, **facts}, indent=1) + "\n")
    (path / "README.md").write_text(
        f"# Padded: {what}\n\nMade by `target/pad_to_7b.py`, which says what of it is real and what is padding.\n"
        "It costs what a network of its shape costs and knows what the small one knows.\n\n"
        + "".join(f"- {name}: {value}\n" for name, value in facts.items())
    )


def widen_policy(plan: Widening, policy: Path, out: Path) -> None:
    """Write the wide policy, its configuration, tokenizer and label to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for file in policy.glob("*.json"):
        if file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    count = write(out, plan.policy(read(policy, plan.device)), plan.dtype)
    small = plan.config
    config = Qwen2Config(
        **vars(plan.shape),
        max_position_embeddings=small.max_position_embeddings,
        rms_norm_eps=small.rms_norm_eps,
        rope_parameters=dict(small.rope_parameters),
        hidden_act=small.hidden_act,
        tie_word_embeddings=False,
        bos_token_id=small.bos_token_id,
        eos_token_id=small.eos_token_id,
        pad_token_id=small.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
        dtype=plan.dtype,
    )
    config.save_pretrained(out)
    facts = {"source": str(policy), "layers that compute": plan.places, "tokens that occur": small.vocab_size}
    label(out, f"policy of {count / 1e9:.2f} billion weights", facts)


def widen_head(plan: Widening, head: Path, policy: Path, out: Path, draft_vocab: int) -> None:
    """Write to `out` the wide draft head for the wide policy at `policy`, rows of whose output head it takes.

    Raises:
        ValueError: It is a head with an output head or vocabulary of its own, or one that drafts from normed features.
    """
    config = json.loads((head / "config.json").read_text())
    tensors = read(head, plan.device)
    if own := sorted({"lm_head.weight", "d2t"} & set(tensors)):
        raise ValueError(
            f"`--head` {head} has {own} of its own; it should draft all tokens by its policy's output head."
        )
    if config["norm_before_residual"]:
        raise ValueError(f"`--head` {head} has `norm_before_residual`, which would not keep the constant dimension.")
    out.mkdir(parents=True, exist_ok=True)
    wide = dict(plan.head(tensors))
    if draft_vocab < plan.shape.vocab_size:
        file = json.loads((policy / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
        with safe_open(policy / file, framework="pt") as shard:
            wide["lm_head.weight"] = shard.get_slice("lm_head.weight")[:draft_vocab]
    saved = {name: tensor.to(plan.dtype).cpu().contiguous() for name, tensor in wide.items()}
    count = sum(tensor.numel() for tensor in saved.values())
    if draft_vocab < plan.shape.vocab_size:
        saved["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)  # draft token i is token i
        saved["t2d"] = torch.arange(plan.shape.vocab_size) < draft_vocab
    save_file(saved, out / "model.safetensors", metadata={"format": "pt"})
    layer_ids = [plan.layer_id(layer) for layer in config["eagle_aux_hidden_state_layer_ids"]]
    config["transformer_layer_config"] |= {**vars(plan.shape), "num_hidden_layers": 1, "head_dim": plan.head_dim}
    config["transformer_layer_config"].pop("layer_types", None)
    config |= {"draft_vocab_size": draft_vocab, "eagle_aux_hidden_state_layer_ids": layer_ids}
    config["dtype"] = str(plan.dtype).removeprefix("torch.")
    config["speculators_config"]["verifier"]["name_or_path"] = str(policy)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    facts = {"source": str(head), "reads layers": layer_ids, "draft vocabulary": draft_vocab}
    label(out, f"EAGLE-3 head of {count / 1e6:.0f} million weights", facts)


def main() -> None:
    """Widen the policy and the heads, check what was written, and print how far it is from the small ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="the small policy")
    parser.add_argument("--head", type=Path, nargs="*", default=[], help="draft heads for it")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks/results")))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--draft-vocab", type=int, default=32000, help="tokens that the wide heads can draft")
    parser.add_argument("--seed", type=int, default=0, help="of the random padding")
    parser.add_argument("--tiny", action="store_true", help="a few hundred dimensions in float32 on the CPU")
    args = parser.parse_args()
    started = time.perf_counter()

    def report(what: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)

    shape, dtype = (TINY, torch.float32) if args.tiny else (SEVEN_B, torch.bfloat16)
    device = "cpu" if args.tiny else args.device
    plan = Widening(Qwen2Config.from_pretrained(args.policy), shape, device, dtype, args.seed)
    wide_policy = args.out / "policy"
    widen_policy(plan, args.policy, wide_policy)
    report(f"{wide_policy}: layers {plan.places} of {shape.num_hidden_layers} compute")
    for head in args.head:
        widen_head(plan, head, wide_policy, args.out / head.name, min(args.draft_vocab, shape.vocab_size))
        report(f"{args.out / head.name}: {head} widened")
    from benchmarks.target.pad_check import compare  # imports the drafter, which takes seconds

    pairs = [(head, args.out / head.name) for head in args.head]
    facts = compare(args.policy, wide_policy, pairs, device, dtype)
    report("compared")
    note = "Padded: the function of the small policy in the shape of a large one; see target/pad_to_7b.py."
    results = {**about("tiny" if args.tiny else "7b-shaped", note, args.seed), "shape": vars(shape), **facts}
    args.results.mkdir(parents=True, exist_ok=True)
    save(args.results / "widen.json", results)
    (args.results / "widen.md").write_text(render(results, facts))
    print(render(results, facts))


def render(results: dict[str, Any], facts: dict[str, dict[str, Any]]) -> str:
    """The report in Markdown."""
    policy = facts["policy"]
    names = list(policy["wide"])
    rows = [[label, *(f"{policy[kind][name]:.4g}" for name in names)] for kind, label in COMPARED.items()]
    lines = [*heading("Widened", results), "Log-probs of text at temperature 1:\n", *table(["", *names], rows)]
    lines += [f"Largest log-probability of all padded tokens together: {policy['largest_padded_log_mass']:.0f}.\n"]
    heads = {name: qualities for name, qualities in facts.items() if name != "policy"}
    rows = [
        [name, *(f"{quality['acceptance_length']:.3f}" for quality in pair.values())] for name, pair in heads.items()
    ]
    lines += ["Tokens per step of 7 greedy drafts on the same text:\n", *table(["head", "small", "wide"], rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
