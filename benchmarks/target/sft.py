"""Fine-tune the benchmarks' policy on fresh text of its kind, and train a head along, by runs of the command line."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common.arguments import ROOT
from benchmarks.target.text import draw_question, spelling_of, write_search

RECIPES = ("sft_quickstart", "sft_drafter")
BATCH = 32  # texts of an optimizer step


def write_texts(policy: Path, path: Path, count: int, seed: int) -> None:
    """Write questions with searches, as tokens."""
    tokenizer, rng = AutoTokenizer.from_pretrained(policy), random.Random(f"sft {seed}")
    spelling = spelling_of(tokenizer)
    with path.open("w") as file:
        for _ in range(count):
            question = draw_question(rng)
            search = [token for word in write_search(question, rng) for token in spelling[word]]
            row = {"prompt_ids": tokenizer(question.prompt)["input_ids"], "response_ids": search}
            file.write(json.dumps(row) + "\n")


def fine_tune(policy: Path, out: Path, *, epochs: int, steps: int, device: str, seed: int) -> dict[str, Any]:
    """Fine-tune `policy` for `epochs` of `steps`; leave `policy` and `drafter/final` in `out`.

    Returns:
        Number of texts, seconds of the run, and tokens per step of the head on the last held-out texts.
    """
    policy, out = policy.absolute(), out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_texts(policy, out / "texts.jsonl", epochs * steps * BATCH, seed)
    options: dict[str, Any] = {
        "model.policy": policy,
        "model.optimizer.init_args.lr": 2e-5,
        "data.init_args.train": json.dumps({"rows": None, "path": str(out / "texts.jsonl"), "split": "train"}),
        "data.init_args.val": "null",
        "data.init_args.batch_size": BATCH,
        "data.init_args.steps_per_epoch": steps,
        "trainer.max_epochs": epochs,
        "trainer.accelerator": "auto",
        "trainer.precision": "bf16-mixed" if device == "cuda" else "32-true",
        "trainer.default_root_dir": out,
        "seed_everything": seed,
    }
    run = [sys.executable, "-m", "tlt_lightning"]
    recipes = [part for name in RECIPES for part in ("-c", str(ROOT / f"recipes/{name}.yaml"))]
    subprocess.check_call([*run, "fit", *recipes, *(f"--{name}={value}" for name, value in options.items())], cwd=ROOT)
    export = ["export", "--ckpt_path", str(out / "checkpoints/last.ckpt"), "--output_dir", str(out / "policy")]
    subprocess.check_call([*run, *export, "--dtype", "float32"], cwd=ROOT)
    seconds = json.loads((out / "summary.json").read_text())["seconds"]
    quality = re.search(r"([\d.]+) tokens per step", (out / "drafter/final/README.md").read_text())
    length = None if quality is None else float(quality[1])
    return {"texts": epochs * steps * BATCH, "run seconds": seconds, "tokens per step": length}
