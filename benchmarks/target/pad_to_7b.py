"""Widen a small policy and its heads to Qwen2.5-7B's shape, with the same function.

    python -m benchmarks pad_to_7b --head target/head target/head-block

A step of the result costs what a step of a 7B model costs, while its text, and how much of it a head drafts right, are
those of the small, trained policy. Each directory written says that it is padded. `--tiny` pads to a few hundred
dimensions on a CPU, to see that it works.

What is real: log-probs, text and acceptance are those of the small policy and head, to the rounding of bfloat16;
shapes, bytes, operations and KV cache are those of Qwen2.5-7B and of an EAGLE-3 head for it, or of a DSpark head of as
many layers as the small one. No matrix is of zeros, on which a GPU computes faster.

What is padded:

- It knows no more than the small policy. Each small dimension, query head and MLP unit is there several times
  (`target/pad_maps.py`), in as many layers as the small policy has. The other layers have random weights, in pairs and
  triples whose outputs cancel, so that they add nothing.
- The tokens above the small vocabulary have random embeddings and are never sampled: one residual dimension holds a
  constant that puts their logits far below all others.
- A head is widened like layers. It drafts the first 32,000 tokens, as many as EAGLE-3 heads of 7B models do and all
  that occur among them; `--draft-vocab 152064` drafts all. What a DSpark head adds to logits for the token before has
  random rows for tokens that never occur.
- Training it is not training a 7B model: what an optimizer does to the copies of a weight adds up, so that learning
  rates do not carry over, and the cancelling layers wake up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config

from benchmarks.common.arguments import parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.target.head import NUM_DRAFT_TOKENS, load_policy, measure, write_rows
from benchmarks.target.pad_plan import SEVEN_B, TINY, Padding
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.speculation.head_files import EAGLE3, read_head

ROWS, LENGTH = 4, 1026  # of text to compare on


def read(path: Path, device: str) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file, device)
    return tensors


def write(path: Path, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> int:
    """Write tensors and return their number of weights."""
    tensors = {name: tensor.to(dtype).cpu().contiguous() for name, tensor in named}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def label(path: Path, source: Path, what: str) -> None:
    """Say in the directory that what it holds is padded."""
    (path / "padded.json").write_text(json.dumps({"padded": True, "source": str(source), "what": what}) + "\n")


def pad_policy(plan: Padding, policy: Path, out: Path) -> None:
    """Write the wide policy, its configuration, tokenizer and label to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for file in policy.glob("*.json"):
        if file.name != "config.json":
            shutil.copy(file, out)
    count = write(out, plan.policy(read(policy, plan.device)), plan.dtype)
    small = plan.config
    config = Qwen2Config(
        **vars(plan.shape),
        max_position_embeddings=small.max_position_embeddings,
        rms_norm_eps=small.rms_norm_eps,
        rope_parameters=dict(small.rope_parameters or {}),
        hidden_act=small.hidden_act,
        tie_word_embeddings=False,
        bos_token_id=small.bos_token_id,
        eos_token_id=small.eos_token_id,
        pad_token_id=small.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
        dtype=plan.dtype,
    )
    config.save_pretrained(out)
    label(out, policy, f"policy of {count / 1e9:.2f} billion weights")


def pad_head(plan: Padding, head: Path, policy: Path, out: Path, draft_vocab: int) -> None:
    """Write the wide head to `out`, with rows of the output head of the wide `policy`.

    Raises:
        ValueError: It is a head with an output head or vocabulary of its own, or one that drafts from normed features.
    """
    config, its = json.loads((head / "config.json").read_text()), read_head(str(head))
    tensors = read(head, plan.device)
    if own := sorted({"lm_head.weight", "d2t"} & set(tensors)):
        raise ValueError(
            f"`--head` {head} has {own} of its own; it should draft all tokens by its policy's output head."
        )
    if config.get("norm_before_residual"):
        raise ValueError(f"`--head` {head} has `norm_before_residual`, which would not keep the constant dimension.")
    out.mkdir(parents=True, exist_ok=True)
    wide = dict(plan.head(tensors) if its.kind is EAGLE3 else plan.block_head(tensors, draft_vocab))
    if draft_vocab < plan.shape.vocab_size:
        with safe_open(policy / "model.safetensors", framework="pt") as file:
            wide["lm_head.weight"] = file.get_slice("lm_head.weight")[:draft_vocab]
    saved = {name: tensor.to(plan.dtype).cpu().contiguous() for name, tensor in wide.items()}
    count = sum(tensor.numel() for tensor in saved.values())
    if draft_vocab < plan.shape.vocab_size:
        saved["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)  # draft token i is token i
        saved["t2d"] = torch.arange(plan.shape.vocab_size) < draft_vocab
    save_file(saved, out / "model.safetensors", metadata={"format": "pt"})
    layer_ids = [plan.layer_id(layer) for layer in its.layer_ids]
    sizes = {"num_hidden_layers": its.num_layers, "head_dim": plan.head_dim}
    config["transformer_layer_config"] |= {**vars(plan.shape), **sizes}
    config["transformer_layer_config"].pop("layer_types", None)
    config |= {"draft_vocab_size": draft_vocab, its.kind.layer_ids: layer_ids}
    config["dtype"] = str(plan.dtype).removeprefix("torch.")
    config["speculators_config"]["verifier"]["name_or_path"] = str(policy)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    label(out, head, f"{its.kind.name} head of {count / 1e6:.0f} million weights")


@torch.no_grad()
def log_probs(policy: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return log-probs after each token of `ids`, float32, on the CPU: (B, S, V)."""
    return torch.stack([policy(row[None].to(policy.device)).logits[0].float().log_softmax(-1).cpu() for row in ids])


def distance(reference: Tensor, other: Tensor) -> dict[str, float]:
    """Return mean and largest difference of the text's log-probs, mean KL, and equal argmax.

    Args:
        reference: Log-probs. (B, S, V)
        other: Log-probs over the same tokens, and perhaps more. (B, S, V or more)
    """
    same_argmax = (reference.argmax(-1) == other.argmax(-1)).double().mean().item()
    other, probs = other[..., : reference.shape[-1]], reference.exp()
    difference = (reference - other).abs() * (probs > 1e-3)
    return {
        "mean difference": (probs * difference).sum(-1).mean().item(),
        "largest difference": difference.max().item(),
        "kl": (probs * (reference - other)).sum(-1).mean().item(),
        "same argmax": same_argmax,
    }


def compare(small: Path, wide: Path, heads: Sequence[Path], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compare the wide policy and heads in `wide` with the small ones on the same text.

    Returns:
        Rows of distances, of the wide policy and of the small one from itself in float32; the log of the padded tokens'
        probability where it is largest; rows of tokens per step of the small and the wide heads.
    """
    ids = write_rows(0, ROWS, LENGTH)
    exact = log_probs(load_policy(small, device, torch.float32), ids)
    policies = [load_policy(path, device, dtype) for path in (small, wide / "policy")]
    rounded, padded = (log_probs(policy, ids) for policy in policies)
    distances = {"wide against small": distance(rounded, padded)}
    distances["small against itself in float32"] = distance(exact, rounded)
    lengths = []
    for head in heads:
        row: dict[str, Any] = {"head": head.name}
        paths = ((small, head), (wide / "policy", wide / head.name))
        for name, (path, its_head), policy in zip(("small", "wide"), paths, policies, strict=True):
            module = DrafterModule(str(path), str(its_head), num_draft_tokens=NUM_DRAFT_TOKENS)
            module.configure_model()
            row[name] = measure(module.to(device), policy, ids).acceptance_length
        lengths.append(row)
    mass = padded[..., exact.shape[-1] :].logsumexp(-1).max().item()
    rows = [{"policy": name, **found} for name, found in distances.items()]
    return {"distances": rows, "largest_padded_log_mass": mass, "tokens_per_step": lengths}


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    lines = [*heading("Padded", results), "Log-probs of text at temperature 1:", ""]
    rows = results["distances"]
    lines += table(list(rows[0]), [list(row.values()) for row in rows])
    lines += [f"Largest log-probability of all padded tokens together: {results['largest_padded_log_mass']:.0f}.", ""]
    if rows := results["tokens_per_step"]:
        lines += ["Tokens per step of 7 greedy drafts on the same text:", ""]
        lines += table(list(rows[0]), [list(row.values()) for row in rows])
    return lines


def main(arguments: Sequence[str]) -> None:
    """Pad the policy and the heads, and compare what was written with the small ones."""
    parser = parser_of(__doc__)
    parser.add_argument("--policy", type=Path, default=Path("target/policy"), help="the small policy")
    parser.add_argument("--head", type=Path, nargs="*", default=[Path("target/head")], help="draft heads for it")
    parser.add_argument("--models", type=Path, default=Path("wide"), help="directory to write")
    parser.add_argument("--draft-vocab", type=int, default=32000, help="tokens that the wide heads can draft")
    args = parser.parse_args(arguments)
    shape, dtype, device = (TINY, torch.float32, "cpu") if args.tiny else (SEVEN_B, torch.bfloat16, "cuda")
    plan = Padding(Qwen2Config.from_pretrained(args.policy), shape, device, dtype, args.seed)
    pad_policy(plan, args.policy, args.models / "policy")
    for head in args.head:
        draft_vocab = min(args.draft_vocab, shape.vocab_size)
        pad_head(plan, head, args.models / "policy", args.models / head.name, draft_vocab)
    facts = compare(args.policy, args.models, args.head, device, dtype)
    note = " ".join(filter(None, [args.note, "Padded: the function of the small policy in the shape of a large one."]))
    record = about("tiny" if args.tiny else "7b", note, args.seed, on_cpu=args.tiny)
    results = {**record, "shape": vars(shape), **facts}
    save(args.out / "pad_to_7b", results, render(results))
    print("\n".join(render(results)))
