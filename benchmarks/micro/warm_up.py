"""Warm up heads on the texts of several writers, and by two schedules; take a stopwatch to the tokenizer.

    python -m benchmarks warm_up

Quickstart's policy answers, by `predict`, the questions it is trained on and those it is validated on. Heads learn from
the former by `recipes/drafter_warmup.yaml`, with packs, schedule and seeds set here, and are judged on the latter as
`fit` judges: tokens per step of 3 greedy drafts, expected over the policy's own text. A seed is that of a head's
weights and of the texts' order. The fewest packs are of as many answers, and as many passes over them, as the recipe's.

Other writers are those of `recipes/assets/make_countdown.py`, on questions of the same kind, in as many tokens: one who
searches as the policy was taught to, but never in haste, and one who writes the solution alone. The stopwatch is over
conversations in which the sections of `docs/` answer their headings: their rows are read, written by the chat template
and tokenised, as at the start of a warm-up, each of them 20 times. `--tiny` takes few questions and packs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.arguments import ASSETS, ROOT, parser_of
from benchmarks.common.results import about, heading, save, table
from recipes.assets.make_countdown import ANSWER, EOS, Question, sample_chain, sample_question, sample_response
from tlt_lightning.commands.cli import run_cli, run_drafter_cli
from tlt_lightning.data.formats import RowReader, Text
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import PackedBatch, packs_of
from tlt_lightning.drafter.quality import quality_of
from tlt_lightning.drafter.target import choose_layer_ids, read_target
from tlt_lightning.drafter.texts.states import StateReader, load_target
from tlt_lightning.drafter.texts.texts import texts_in
from tlt_lightning.policy import load_tokenizer

POLICY = str(ASSETS / "policy")
PACK_TOKENS = 1024  # of `recipes/drafter_warmup.yaml`
RECIPE_ANSWERS = 256  # that it learns from, one to each question of `val.jsonl`
VAL_SHARE = 0.1  # of `DrafterDataModule`
CONTEXT = 8192  # of SmolLM2
NUM_COPIES, NUM_ROUNDS = 20, 5
CONSTANT, COSINE = "constant rate", "WarmupCosine"
Searcher = Callable[[Question, random.Random], Sequence[str]]


def search_patiently(question: Question, rng: random.Random) -> Sequence[str]:
    """Search as the policy was taught to, never in haste."""
    return sample_response(question, rng, hasty_share=0.0)


def solve(question: Question, rng: random.Random) -> Sequence[str]:
    """Write the solution alone."""
    while True:
        _, expression, value = sample_chain(question.numbers, rng)
        if value == question.target:
            return [ANSWER, *expression, EOS]


WRITERS: dict[str, Searcher] = {"a patient searcher": search_patiently, "one who writes the solution alone": solve}
OWN = "the policy"


def predict(folder: Path, most: int | None) -> tuple[Path, Path]:
    """Let the policy answer by the quickstart's recipe; return its answers to questions to learn from, and to others.

    `most` is how many of each are asked; None is all.
    """
    asked = [(ASSETS / name).read_text().splitlines()[:most] for name in ("train.jsonl", "val.jsonl")]
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(itertools.chain(*asked)))
    arguments = ["predict", "-c", "recipes/quickstart.yaml"]
    arguments += ["--data.val.path", str(questions), "--trainer.default_root_dir", str(folder)]
    with contextlib.chdir(ROOT):  # which the recipe's paths start from
        run_cli(arguments)
    answers = (folder / "completions.jsonl").read_text().splitlines()
    answers.sort(key=lambda line: json.loads(line)["index"])
    files = folder / "own.jsonl", folder / "held_out.jsonl"
    for path, part in zip(files, (answers[: len(asked[0])], answers[len(asked[0]) :]), strict=True):
        path.write_text("\n".join(part))
    return files


def write(path: Path, searcher: Searcher, num_tokens: int, seed: int) -> Path:
    """Write a searcher's answers to questions that are not held out, at least `num_tokens` with their questions."""
    rows = map(json.loads, (ASSETS / "val.jsonl").read_text().splitlines())
    held_out = {Question(tuple(row["numbers"]), row["answer"]).key for row in rows}
    rng, left = random.Random(seed), num_tokens
    with path.open("w") as file:
        while left > 0:
            question = sample_question(rng)
            if question.key in held_out:
                continue
            words = [word for word in searcher(question, rng) if word != EOS]  # a text of the data ends by itself
            file.write(json.dumps({"prompt": question.prompt, "completion": f" {' '.join(words)}"}) + "\n")
            left -= len(question.prompt.split()) + len(words) + 1
    return path


def read(path: Path) -> list[Text]:
    """Return the texts of a file, as the policy reads them."""
    config = read_target(POLICY)
    return texts_in([str(path)], RowReader(POLICY, config.max_position_embeddings), config.vocab_size)[0]


def fit(folder: Path, texts: Path, split: str, num_packs: int, schedule: str, seed: int) -> DrafterModule:
    """Teach a head of random weights by the recipe."""
    arguments = ["fit", "-c", str(ROOT / "recipes/drafter_warmup.yaml"), "--trainer.default_root_dir", str(folder)]
    arguments += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    arguments += ["--trainer.max_epochs", "-1", "--trainer.max_steps", str(num_packs)]
    arguments += ["--model.target", POLICY, "--data.completions", str(texts), "--data.split", split]
    arguments += [part for name in ("seed_everything", "model.seed", "data.seed") for part in (f"--{name}", str(seed))]
    if schedule == COSINE:
        arguments += ["--model.lr_scheduler", COSINE]
    drafter = run_drafter_cli(arguments).model
    assert isinstance(drafter, DrafterModule)
    return drafter


def judge(drafter: DrafterModule, held_out: Sequence[PackedBatch]) -> float:
    """Return the tokens per step that are expected on the held-out packs."""
    return quality_of(torch.cat([drafter.measure(pack) for pack in held_out]).sum(0)).acceptance_length


def converse(path: Path, num_copies: int) -> Path:
    """Write conversations in which the sections of `docs/` answer their headings."""
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    with path.open("w") as file:
        for section in [section for page in pages for section in page.split("\n## ")] * num_copies:
            turns = dict(zip(("user", "assistant"), section.split("\n", 1), strict=True))
            rows = [{"role": role, "content": content} for role, content in turns.items()]
            file.write(json.dumps({"messages": rows}) + "\n")
    return path


def time_tokenising(tokenizer: str, conversations: Path) -> dict[str, Any]:
    """Take a stopwatch to the first reading of conversations, several times."""
    vocab_size, rates = len(load_tokenizer(tokenizer)), []
    for _ in range(NUM_ROUNDS):
        reader = RowReader(tokenizer, CONTEXT)
        assert reader.tokenizer  # loaded before the clock runs
        began = time.perf_counter()
        texts, _ = texts_in([str(conversations)], reader, vocab_size)
        num_tokens = sum(len(text.ids) for text in texts)
        rates.append(num_tokens / (time.perf_counter() - began))
    return {
        "tokenizer": Path(tokenizer).name,
        "conversations": len(texts),
        "tokens": num_tokens,
        "tokens_per_second": rates,
    }


def render(results: dict[str, Any]) -> list[str]:
    """Return the report in Markdown: a table of writers, one of schedules, and the stopwatch's."""
    runs, clock = results["runs"], results["stopwatch"]

    def found(**wanted: Any) -> str:
        values = [run["tokens_per_step"] for run in runs if wanted.items() <= run.items()]
        return ", ".join(f"{value:.2f}" for value in values)

    num_packs = results["packs"][1]
    writers = [
        [name, count, tokens / count, found(writer=name, packs=num_packs, schedule=CONSTANT)]
        for name, count, tokens in (text.values() for text in results["texts"])
    ]
    schedules = [
        [count, *(found(writer=OWN, packs=count, schedule=each) for each in (CONSTANT, COSINE))]
        for count in results["packs"]
    ]
    rates = [rate / 1e6 for rate in clock["tokens_per_second"]]
    return [
        *heading("Warming up a head", results["about"]),
        f"Tokens per step expected on {results['held_out']} answers of the policy to other questions, 3 drafted; a "
        f"number for each of the seeds {', '.join(map(str, results['seeds']))}.",
        "",
        f"Taught {num_packs} packs of {PACK_TOKENS:,} tokens at a constant rate:",
        "",
        *table(["taught on answers of", "texts", "tokens a text", "tokens per step"], writers),
        f"Taught on answers of the policy; the fewest packs are of {results['recipe_answers']} answers, over and over:",
        "",
        *table([f"packs of {PACK_TOKENS:,}", CONSTANT, f"`{COSINE}`"], schedules),
        f"By a stopwatch, {clock['conversations']:,} conversations of {clock['tokens']:,} tokens are read, written by "
        f"the chat template and tokenised with `{clock['tokenizer']}` in one thread at a median of "
        f"{statistics.median(rates):.2f} million tokens a second ({min(rates):.2f} to {max(rates):.2f}, "
        f"{NUM_ROUNDS} rounds).",
    ]


def run(args: argparse.Namespace, folder: Path) -> None:
    """Time, write, teach and judge in a folder; save the results after each head."""
    stopwatch = time_tokenising(args.tokenizer, converse(folder / "docs.jsonl", 1 if args.tiny else NUM_COPIES))
    few, epoch, many = args.packs
    own, held_out = predict(folder, 24 if args.tiny else None)
    num_tokens = round(1.05 * epoch * PACK_TOKENS / (1 - VAL_SHARE))  # about an epoch
    others = (write(folder / f"{each.__name__}.jsonl", each, num_tokens, args.seed) for each in WRITERS.values())
    files = {OWN: own, **dict(zip(WRITERS, others, strict=True))}
    texts = [(writer, read(file)) for writer, file in files.items()]
    judged, layers = read(held_out), choose_layer_ids(read_target(POLICY).num_hidden_layers)
    reader = StateReader(load_target(POLICY, torch.device("cpu"), is_mixed=False), layers, PACK_TOKENS)
    packs = list(packs_of(reader.read(judged), PACK_TOKENS))
    results: dict[str, Any] = {
        "about": about("quickstart", args.note, args.seed, on_cpu=True),
        "seeds": args.seeds,
        "packs": args.packs,
        "recipe_answers": RECIPE_ANSWERS,
        "held_out": len(judged),
        "stopwatch": stopwatch,
        "texts": [
            {"writer": writer, "texts": len(each), "tokens": sum(len(text.ids) for text in each)}
            for writer, each in texts
        ],
        "runs": [],
    }
    arms = [(OWN, count, schedule) for count in (few, epoch, many) for schedule in (CONSTANT, COSINE)]
    arms += [(writer, epoch, CONSTANT) for writer in WRITERS]
    for seed, (writer, count, schedule) in itertools.product(args.seeds, arms):
        split = f"train[:{RECIPE_ANSWERS}]" if count == few else "train"
        began, place = time.perf_counter(), folder / f"fit_{len(results['runs'])}"
        found = judge(fit(place, files[writer], split, count, schedule, seed), packs)
        arm = {"writer": writer, "packs": count, "schedule": schedule, "seed": seed}
        results["runs"].append(arm | {"tokens_per_step": found, "seconds": time.perf_counter() - began})
        save(args.out / "warm_up", results, render(results))
    print("\n".join(render(results)))


def main(arguments: list[str]) -> None:
    """Measure in a temporary folder, and write `warm_up.json` and `.md`."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the heads")
    parser.add_argument(
        "--tokenizer", default=str(ROOT / "models/SmolLM2-135M-Instruct"), help="directory, with a chat template"
    )
    args = parser.parse_args(arguments)
    args.packs = [30, 101, 303]  # the recipe's; about an epoch of the policy's answers; about three
    if args.tiny:
        args.seeds, args.packs = [0], [1, 2, 3]
    if not Path(args.tokenizer).is_dir():
        parser.error(
            f"`--tokenizer` {args.tokenizer} is no directory; `make models/SmolLM2-135M-Instruct/model.safetensors` "
            "makes the one taken by default"
        )
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))
