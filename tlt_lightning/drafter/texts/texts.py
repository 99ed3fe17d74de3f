"""Read the texts that a drafter learns from, and hold some of them out."""

import random
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from tlt_lightning.data.formats import RowReader, Text
from tlt_lightning.data.rows import each_row


def texts_in(
    paths: Sequence[str], reader: RowReader, vocab_size: int, config: str | None = None, split: str = "train"
) -> tuple[list[Text], list[int]]:
    """Return the texts of all rows, and a key of each one's prompt: texts of one conversation have that of its row.

    Args:
        paths: Files, folders or hub datasets.
        reader: Reads their rows.
        vocab_size: Tokens of the target.
        config: Configuration of a hub dataset.
        split: Split to read.

    Raises:
        ValueError: A row has no known format, holds another model's tokens, or there is no text at all.
    """
    texts: list[Text] = []
    keys: list[int] = []
    for path in paths:
        name = f"`completions` {path!r}"
        by_row = reader.read(each_row(path, config, split), name)
        for row in by_row:
            prompt = str(row[0].prompt).encode()
            keys += [int.from_bytes(blake2b(prompt, digest_size=8).digest(), "little")] * len(row)
            texts += row
        if any(min(text.ids) < 0 or max(text.ids) >= vocab_size for row in by_row for text in row):
            raise ValueError(
                f"{name} holds tokens that the target's vocabulary of {vocab_size} has not: they are another model's."
            )
    return texts, keys


def split_by_prompt(keys: Sequence[Hashable], val_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split texts, given a key of each one's prompt, into rows to train on and held-out ones.

    No prompt is on both sides.
    """
    prompts = sorted(set(keys))  # type: ignore[type-var]
    if len(prompts) < 2:
        raise ValueError(
            f"`completions` answer {len(prompts)} prompt(s); at least one to train on and one to hold out."
        )
    num_held_out = min(len(prompts) - 1, max(1, round(val_share * len(prompts))))
    held_out = set(random.Random(seed).sample(prompts, num_held_out))
    parts: tuple[list[int], list[int]] = ([], [])
    for row, key in enumerate(keys):
        parts[key in held_out].append(row)
    return parts
