"""Name the files of each rung: those that `target/run.py` and `target/pad_to_7b.py` leave, or the command line's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parents[2] / "recipes/assets/countdown"


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a rung.

    Args:
        policy: Directory of the policy.
        heads: Directories of its EAGLE-3 heads.
        train: Prompts to train on, JSON lines.
        val: Held-out prompts, JSON lines.
    """

    policy: str
    heads: tuple[str, ...]
    train: str
    val: str


FILES = {
    "tiny": Files(
        policy=str(ASSETS / "policy"), heads=(), train=str(ASSETS / "train.jsonl"), val=str(ASSETS / "val.jsonl")
    ),
    "25m": Files(policy="target/policy", heads=("target/head",), train="target/train.jsonl", val="target/val.jsonl"),
    "7b": Files(policy="wide/policy", heads=("wide/head",), train="target/train.jsonl", val="target/val.jsonl"),
}


def take_files(args: argparse.Namespace) -> None:
    """Fill in the rung's `policy`, `train` and `head` where the command line names none; exits without a policy."""
    files = FILES[args.rung]
    args.policy, args.train = existing(args.policy or files.policy), args.train or files.train
    args.head = args.head or next(iter(files.heads), None)


def existing(policy: str) -> str:
    """The same path; exits with what to do if nothing is there."""
    if not Path(policy, "config.json").exists():
        raise SystemExit(
            f"`--policy` {policy} holds no policy. `target/run.py --out target` and `target/pad_to_7b.py` make "
            "those of the rungs; `--tiny` takes the quickstart's."
        )
    return policy
