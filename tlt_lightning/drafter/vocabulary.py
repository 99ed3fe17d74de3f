"""Choose which of the target's tokens a head drafts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_lightning.drafter.architectures.base import Head


def count_tokens(input_ids: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
    """Count how often each token is in right-padded texts (B, S) of `lengths` (B,): (vocab_size,), on the CPU."""
    is_text = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
    return torch.bincount(input_ids[is_text].cpu(), minlength=vocab_size)


def with_ends(counts: Tensor, end_tokens: Sequence[int]) -> Tensor:
    """Let the tokens that end a text be the commonest of `counts` (V,), whatever the texts: one ends each of them."""
    counts = counts.clone()
    counts[[token for token in end_tokens if token < len(counts)]] = counts.max() + 1
    return counts


def choose_vocabulary(head: Head, counts: Tensor | None) -> None:
    """Let a reduced head draft the tokens with the highest `counts` (V,), then unseen ones of the lowest ids.

    Without `counts` all tokens are unseen. Tokenizers number tokens by how common they are, so low ids are likely.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    seen = {} if counts is None else {token: int(count) for token, count in enumerate(counts.tolist()) if count}
    d2t, t2d = build_vocab_mappings_from_distribution(seen, head.draft_vocab_size, head.verifier_vocab_size)
    head.load_vocab_mappings(t2d, d2t)


def check_as_many(vocabulary: Tensor, size: int) -> None:
    """Raise ValueError unless a checkpoint's `vocabulary` is of `size` tokens."""
    if (saved := int(vocabulary.sum())) != size:
        raise ValueError(
            f"The checkpoint's head drafts {saved} tokens, this one {size}: set `drafter.draft_vocab_size` to {saved}."
        )


def drafted_tokens(d2t: Tensor) -> Tensor:
    """Return the target's tokens that a head drafts; `d2t` holds their distances to its own."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def draft_ids(head: Head, tokens: Tensor) -> Tensor:
    """Number the target's `tokens` as the head does; -1 is a token that it cannot draft."""
    if head.d2t is None:
        return tokens
    numbers = torch.full((head.verifier_vocab_size,), -1, device=tokens.device)
    drafted = drafted_tokens(head.d2t)
    numbers[drafted] = torch.arange(len(drafted), device=tokens.device)
    return numbers[tokens]
