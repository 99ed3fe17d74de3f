"""What is rolled out, and with which engine settings: shared by `rollout/run.py` and `lossless/run.py`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common.sizes import FILES, existing
from tlt_lightning.engine import Request, Sampling
from tlt_lightning.policy import load_tokenizer

SETTLE_STEPS, CELL_STEPS = 48, 145  # steps of a batch x context cell before it is timed, and in all
ROOM = 8 * CELL_STEPS + 120  # tokens that a request of a batch x context cell may write
SLACK = 64  # beyond the longest sequence: near the end of the positions an engine drafts less

SIZES = ("num_prompts", "group_size", "max_tokens", "kv_cache_gib")
TINY: dict[str, Any] = {
    "num_prompts": 4,
    "group_size": 4,
    "max_tokens": 48,
    "dtype": "float32",
    "kv_cache_gib": 0.25,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Policy, drafters, prompts and engine settings; crosses into the engines' processes.

    Args:
        policy: Directory of the policy.
        heads: Directories of EAGLE-3 heads of one shape; the first is the drafter of all arms but those named after
            another one.
        prompts: File of prompts, one JSON object with `prompt` a line.
        num_prompts: Prompts of a rollout, the first of the file.
        group_size: Responses to each.
        max_tokens: Longest response.
        contexts: Contexts of the batch x context cells; sequences get room for the longest.
        dtype: Type of the engine's weights.
        kv_cache_gib: KV cache of each engine; several engines share the device.
        max_num_batched_tokens: Tokens an engine step may hold, prompts included.
        enforce_eager: No CUDA graphs.
        seed: Of everything.
    """

    policy: str
    heads: tuple[str, ...] = ()
    prompts: str = ""
    num_prompts: int = 32
    group_size: int = 8
    max_tokens: int = 4096
    contexts: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    kv_cache_gib: float = 18.0
    max_num_batched_tokens: int = 16384
    enforce_eager: bool = False
    seed: int = 0

    @property
    def num_requests(self) -> int:
        """Responses of a rollout; all may run at once."""
        return self.num_prompts * self.group_size

    @property
    def sampling(self) -> Sampling:
        """The whole distribution at temperature 1."""
        return Sampling(max_tokens=self.max_tokens)

    @property
    def max_model_len(self) -> int:
        """Longest sequence asked for, within what the policy can."""
        longest_prompt = max(map(len, self.prompt_ids()))
        wanted = SLACK + max(longest_prompt + self.max_tokens, *(context + ROOM for context in self.contexts), 0)
        return min(wanted, int(self.shape["max_position_embeddings"]))

    @property
    def shape(self) -> dict[str, int]:
        """The policy's configuration."""
        return json.loads((Path(self.policy) / "config.json").read_text())

    def prompt_ids(self) -> list[list[int]]:
        """Token ids of the prompts.

        Raises:
            ValueError: If the file has too few.
        """
        return _prompt_ids(self.policy, self.prompts, self.num_prompts)

    def requests(self, lengths: list[int] | None = None) -> list[Request]:
        """The rollout's requests, siblings next to each other; with `lengths` each is as long as told."""
        return [
            Request(
                id=prompt * self.group_size + sample,
                prompt_ids=ids,
                group=prompt,
                max_tokens=None if lengths is None else lengths[prompt * self.group_size + sample],
            )
            for prompt, ids in enumerate(self.prompt_ids())
            for sample in range(self.group_size)
        ]


@cache
def _prompt_ids(policy: str, prompts: str, num: int) -> list[list[int]]:
    with Path(prompts).open() as file:
        texts = [json.loads(line)["prompt"] for line in file if line.strip()][:num]
    if len(texts) < num:
        raise ValueError(f"`prompts` {prompts!r} has {len(texts)} prompts, but `num_prompts` is {num}; lower it.")
    return [list(ids) for ids in load_tokenizer(policy)(texts)["input_ids"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that make a `Setup`, and where results go."""
    parser.add_argument("--rung", choices=list(FILES), default="25m", help="whose files are taken; in results' names")
    parser.add_argument("--policy", help="directory of the policy; the rung's by default, as are the next two")
    parser.add_argument("--head", nargs="+", help="directories of EAGLE-3 heads of one shape, best first")
    parser.add_argument("--prompts", help="file of prompts, JSON lines")
    parser.add_argument("--note", default="", help="said below the title, for instance that the model is padded")
    parser.add_argument("--num-prompts", type=int, help="prompts of a rollout; as the next three, less with `--tiny`")
    parser.add_argument("--group-size", type=int, help="responses to each")
    parser.add_argument("--max-tokens", type=int, help="longest response")
    parser.add_argument(
        "--kv-gib", type=float, dest="kv_cache_gib", help="KV cache of each engine; up to three live at once"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="budget after which nothing new is begun")
    parser.add_argument(
        "--tiny", dest="rung", action="store_const", const="tiny", help="--rung tiny: the quickstart's policy on a CPU"
    )


def setup_of(args: argparse.Namespace, contexts: tuple[int, ...] = (), sizes: Mapping[str, int] | None = None) -> Setup:
    """The setup that the arguments ask for; what they leave open is as in `sizes`, or tiny."""
    files = FILES[args.rung]
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    return Setup(
        policy=existing(args.policy or files.policy),
        heads=tuple(args.head or files.heads),
        prompts=args.prompts or files.val,
        contexts=contexts,
        seed=args.seed,
        **{**(TINY if args.rung == "tiny" else sizes or {}), **given},
    )
