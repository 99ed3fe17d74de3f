"""Parse the arguments that all benchmarks share, and name the files of each size."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "recipes/assets/countdown"
RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True, kw_only=True)
class Files:
    """Names the files of a size, as `python -m benchmarks target` and `pad_to_7b` leave them."""

    policy: str
    head: str | None
    train: str
    val: str


FILES = {
    "tiny": Files(
        policy=str(ASSETS / "policy"), head=None, train=str(ASSETS / "train.jsonl"), val=str(ASSETS / "val.jsonl")
    ),
    "25m": Files(policy="target/policy", head="target/head", train="target/train.jsonl", val="target/val.jsonl"),
    "7b": Files(policy="wide/policy", head="wide/head", train="target/train.jsonl", val="target/val.jsonl"),
}


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments of every benchmark; `doc` is its module's docstring."""
    name = " ".join(["python -m benchmarks", *sys.argv[1:2]])
    parser = argparse.ArgumentParser(name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on a CPU in minutes, to see that it works")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="said below the title, for instance what else ran on the device")
    out = Path(os.environ.get("OUT", RESULTS))
    parser.add_argument("--out", type=Path, default=out, help="directory of the results; $OUT or benchmarks/results")
    return parser


def sized_parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser of a benchmark that runs a policy of one of several sizes."""
    parser = parser_of(doc)
    parser.add_argument("--size", choices=list(FILES), default="25m", help="whose files are taken; in results' names")
    parser.add_argument("--policy", help="directory of the policy; the size's by default, as are the next two")
    parser.add_argument("--head", nargs="+", help="directories of heads, the first of EAGLE-3; the best one first")
    parser.add_argument("--prompts", help="file of prompts, JSON lines")
    parser.add_argument("--seconds", type=float, default=540.0, help="budget after which nothing new is begun")
    return parser


def take_size(args: argparse.Namespace, *, trains: bool) -> None:
    """Fill in `size` for `--tiny`, and the policy, heads and prompts that are not named.

    With `trains` the prompts are those to train on, else held-out ones.
    """
    if args.tiny:
        args.size = "tiny"
    args.tiny = args.size == "tiny"
    files = FILES[args.size]
    args.policy = args.policy or files.policy
    args.head = args.head or [files.head] * (files.head is not None)
    args.prompts = args.prompts or (files.train if trains else files.val)
    for name, path in (("policy", Path(args.policy, "config.json")), ("prompts", Path(args.prompts))):
        if not path.exists():
            raise SystemExit(
                f"`--{name}` {getattr(args, name)} holds none. `python -m benchmarks target` and `python -m benchmarks "
                "pad_to_7b` make those of the sizes; `--tiny` takes the quickstart's."
            )
