"""Describe the policy, prompts and engine settings that `rollout` and `lossless` share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rollout import Request, Sampling

SLACK = 64  # beyond the longest sequence: near the end of the positions an engine drafts less
GIVEN = ("num_prompts", "group_size", "max_tokens", "kv_cache_gib")
TINY: dict[str, Any] = {
    "num_prompts": 4,
    "group_size": 4,
    "max_tokens": 48,
    "dtype": "float32",
    "kv_cache_gib": 0.25,
    "enforce_eager": True,
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Holds policy, prompts and engine settings; crosses into the engines' processes.

    Args:
        policy: Directory of the policy.
        heads: Directories of its heads; the first, of EAGLE-3, drafts in all arms but those named after another.
        prompts: File of prompts, one JSON object with `prompt` a line.
        num_prompts: Prompts of a rollout, the first of the file.
        group_size: Responses to each.
        max_tokens: Longest response.
        dtype: Type of the engine's weights.
        kv_cache_gib: KV cache of each engine; several engines share the device.
        enforce_eager: No CUDA graphs.
        seed: Of everything.
    """

    policy: str
    heads: tuple[str, ...] = ()
    prompts: str = ""
    num_prompts: int = 32
    group_size: int = 8
    max_tokens: int = 4096
    dtype: str = "bfloat16"
    kv_cache_gib: float = 18.0
    enforce_eager: bool = False
    seed: int = 0

    @property
    def num_requests(self) -> int:
        """Responses of a rollout; all may run at once."""
        return self.num_prompts * self.group_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence asked for, within the policy's positions."""
        positions = json.loads((Path(self.policy) / "config.json").read_text())["max_position_embeddings"]
        return min(SLACK + max(map(len, self.prompt_ids())) + self.max_tokens, int(positions))

    def prompt_ids(self) -> list[list[int]]:
        """Return the token ids of the prompts.

        Raises:
            ValueError: The file has too few.
        """
        return _prompt_ids(self.policy, self.prompts, self.num_prompts)

    def requests(self, lengths: Sequence[int] | None = None) -> list[Request]:
        """Return the requests, siblings next to each other, each of its length in `lengths`, if any."""
        prompts = [(group, ids) for group, ids in enumerate(self.prompt_ids()) for _ in range(self.group_size)]
        limits = lengths or [self.max_tokens] * len(prompts)
        return [
            Request(id=index, prompt_ids=ids, group=group, max_tokens=limit)
            for index, ((group, ids), limit) in enumerate(zip(prompts, limits, strict=True))
        ]

    @property
    def sampling(self) -> Sampling:
        """The whole distribution at temperature 1."""
        return Sampling(max_tokens=self.max_tokens)


@cache
def _prompt_ids(policy: str, prompts: str, num: int) -> list[list[int]]:
    with Path(prompts).open() as file:
        texts = [json.loads(line)["prompt"] for line in file if line.strip()][:num]
    if len(texts) < num:
        raise ValueError(f"`prompts` {prompts!r} has {len(texts)} prompts, but `num_prompts` is {num}; lower it.")
    return [list(ids) for ids in load_tokenizer(policy)(texts)["input_ids"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that size a `Setup`."""
    parser.add_argument("--num-prompts", type=int, help="prompts of a rollout; as the next three, less with `--tiny`")
    parser.add_argument("--group-size", type=int, help="responses to each")
    parser.add_argument("--max-tokens", type=int, help="longest response")
    parser.add_argument("--kv-gib", type=float, dest="kv_cache_gib", help="of each engine; several live at once")


def setup_of(args: argparse.Namespace, **sizes: int) -> Setup:
    """Return the setup of the arguments; the rest is as in `sizes`, or tiny."""
    given = {name: getattr(args, name) for name in GIVEN if getattr(args, name) is not None}
    settings = {**(TINY if args.tiny else sizes), **given}
    return Setup(policy=args.policy, heads=tuple(args.head), prompts=args.prompts, seed=args.seed, **settings)
