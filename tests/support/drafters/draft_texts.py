"""Sequences and trained heads for the drafter's tests."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import PackedBatch, packs_of
from tlt_lightning.drafter.quality import DraftQuality, quality_of
from tlt_lightning.hidden_states import PolicyText


def random_sequence(
    num_tokens: int, prompt_length: int = 3, width: int = 64, vocab_size: int = 32, seed: int = 0
) -> PolicyText:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    ids = torch.randint(2, vocab_size, (num_tokens,), generator=generator)
    states = torch.randn(num_tokens, 3 * width, generator=generator)
    return PolicyText(ids, states, torch.randn(num_tokens, width, generator=generator), prompt_length)


def read_by_target(
    policy: str | Any, texts: Sequence[Sequence[int]], prompt_length: int, layer_ids: Sequence[int]
) -> list[PolicyText]:
    """What a drafter reads of texts of one length, in float32: by Hugging Face's own record of hidden states."""
    model = AutoModelForCausalLM.from_pretrained(policy) if isinstance(policy, str) else policy
    last: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    ids = torch.tensor([list(text) for text in texts])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    handle.remove()
    layers = torch.cat([states[layer] for layer in layer_ids], -1)
    return [PolicyText(*row, prompt_length) for row in zip(ids, layers, last[0], strict=True)]


def draft_logits(head: Any, features: torch.Tensor) -> torch.Tensor:
    """Logits over the draft vocabulary of features before the norm."""
    return head.norm(features) @ head.lm_head.weight.T


def make_drafter(policy: str, **arguments: object) -> DrafterModule:
    drafter = DrafterModule(policy, **arguments)  # type: ignore[arg-type]
    drafter.configure_model()
    return drafter


def train(drafter: DrafterModule, batches: Sequence[PackedBatch], num_steps: int, lr: float = 3e-3) -> list[float]:
    """The loss of each step; on a GPU in bfloat16."""
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr)
    losses = []
    for step in range(num_steps):
        batch = batches[step % len(batches)]
        # Of this step alone: autocast keeps weights that it has cast until it is left.
        with torch.autocast(batch.states.device.type, torch.bfloat16, enabled=batch.states.is_cuda):
            loss, _ = drafter.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pack(sequences: Sequence[PolicyText], num_tokens: int, device: torch.device | None = None) -> list[PackedBatch]:
    return list(packs_of(sequences, num_tokens, device))


def quality_on(drafter: DrafterModule, batches: Sequence[PackedBatch]) -> DraftQuality:
    return quality_of(torch.cat([drafter.measure(batch) for batch in batches]).sum(0))


def alone(sequence: PolicyText, num_tokens: int = 256) -> PackedBatch:
    (batch,) = pack([sequence], num_tokens)
    return batch
