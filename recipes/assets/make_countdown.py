"""Make the quickstart's policy and data: a tiny Qwen2 trained from scratch on generated Countdown searches.

    python recipes/assets/make_countdown.py --device cuda      # 2 minutes on one H200; README.md has its output
    python recipes/assets/make_countdown.py --texts outputs/searches.jsonl --searches 6000   # no policy, in seconds

A question reads `make 33 from 3 7 12 :`. A search tries random left-to-right chains, `7 * 3 = 21 - 12 = 9 no`, until
one reaches the target, `3 * 7 = 21 + 12 = 33 yes`, and then writes `<answer>` and that chain as an expression. The
searches are imperfect on purpose, which leaves reinforcement learning something to improve: most of them soon lose
patience and answer with a chain that missed. The patient minority makes the long tail of lengths.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from tlt_lightning.rewards.answers import ANSWER
from tlt_lightning.rewards.countdown import countdown

MAX_NUMBER = 12  # largest given number
MAX_VALUE = 99  # largest partial result; each of 0..99 is one token
DIFFICULTY = {2: 0.4, 3: 0.4, 4: 0.2}  # share of questions by how many numbers they give
MIN_ODDS = {2: 0.0, 3: 0.05, 4: 0.03}  # a random chain reaches the target at least this often
HASTY_SHARE = 0.7  # searches without patience
GIVE_UP = {True: 0.5, False: 0.02}  # chance to give up after a chain that missed: hasty, patient
MAX_RESPONSE = 720  # tokens; longer searches are cut
PAD, EOS, START, HIT, MISS = "<pad>", "<eos>", "make", "yes", "no"
WORDS = [PAD, EOS, START, "from", ":", *"+-*/=", HIT, MISS, ANSWER, *"()", *map(str, range(MAX_VALUE + 1))]


@dataclass(frozen=True)
class Question:
    """Numbers to combine into a target."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        """The question as the policy reads it."""
        return f"{START} {self.target} from {' '.join(map(str, self.numbers))} :"

    @property
    def row(self) -> dict[str, Any]:
        """The question as a row of the data files."""
        return {"prompt": self.prompt, "answer": self.target, "numbers": list(self.numbers)}

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Equal for questions that differ only in the order of their numbers."""
        return tuple(sorted(self.numbers)), self.target


def steps(value: int, number: int) -> list[tuple[str, int]]:
    """The operations that take `value` and `number` to a natural number of at most `MAX_VALUE`, with their results."""
    results = [("+", value + number), ("-", value - number), ("*", value * number)]
    if value % number == 0:
        results.append(("/", value // number))
    return [(sign, result) for sign, result in results if 0 <= result <= MAX_VALUE]


def target_odds(numbers: Sequence[int]) -> dict[int, float]:
    """How likely a random chain over `numbers` ends at each value."""
    odds: dict[int, float] = {}

    def walk(value: int, rest: tuple[int, ...], chance: float) -> None:
        if not rest:
            odds[value] = odds.get(value, 0.0) + chance
            return
        options = steps(value, rest[0])
        for _, result in options:
            walk(result, rest[1:], chance / len(options))

    orders = list(itertools.permutations(numbers))
    for first, *rest in orders:
        walk(first, tuple(rest), 1 / len(orders))
    return odds


def sample_question(rng: random.Random) -> Question:
    """Draw a question that a patient search can solve."""
    count = rng.choices(list(DIFFICULTY), list(DIFFICULTY.values()))[0]
    while True:
        numbers = tuple(rng.randint(1, MAX_NUMBER) for _ in range(count))
        odds = {target: chance for target, chance in target_odds(numbers).items() if chance >= MIN_ODDS[count]}
        if odds:
            return Question(numbers, rng.choices(list(odds), list(odds.values()))[0])


def sample_chain(numbers: Sequence[int], rng: random.Random) -> tuple[list[str], list[str], int]:
    """Draw a chain over all `numbers`; return it as written in the search, as an expression, and its value."""
    value, *rest = rng.sample(numbers, len(numbers))
    written, expression = [str(value)], ["("] * (len(rest) - 1) + [str(value)]
    for position, number in enumerate(rest):
        sign, value = rng.choice(steps(value, number))
        written += [sign, str(number), "=", str(value)]
        expression += [sign, str(number)] + [")"] * (position < len(rest) - 1)
    return written, expression, value


def sample_response(question: Question, rng: random.Random, hasty_share: float = HASTY_SHARE) -> list[str]:
    """Draw an imperfect search for the target and its final answer, as words."""
    give_up = GIVE_UP[rng.random() < hasty_share]
    words: list[str] = []
    while len(words) < MAX_RESPONSE:
        written, expression, value = sample_chain(question.numbers, rng)
        words += [*written, HIT if value == question.target else MISS]
        if value == question.target or rng.random() < give_up:
            return [*words, ANSWER, *expression, EOS]
    return words


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Build the tokenizer: one token per word, the space before it included.

    It is of the class that `AutoTokenizer` takes for every Qwen2 model, whatever the files say. That class rebuilds its
    own splitting rules, which would cut numbers into digits; only added tokens are matched before those.
    """
    vocabulary = {word if index < 3 else f" {word}": index for index, word in enumerate(WORDS)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=PAD, eos_token=EOS, pad_token=PAD)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in list(vocabulary)[2:]])
    return tokenizer


def make_model(args: argparse.Namespace) -> Qwen2ForCausalLM:
    """Build the untrained policy."""
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 32,  # heads of 32, the smallest that vLLM's CPU attention takes
        num_key_value_heads=args.hidden_size // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=WORDS.index(EOS),
        pad_token_id=WORDS.index(PAD),
        initializer_range=args.init_range,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def batches(pool: Sequence[Question], rng: random.Random, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of fresh searches, of similar lengths and about `batch_tokens` tokens padding included.

    Yields:
        Token ids (B, S), and the same with -100 where no loss is wanted: prompt and padding.
    """
    ids = {word: index for index, word in enumerate(WORDS)}
    while True:
        examples = []
        for question in rng.choices(pool, k=4096):
            prompt = question.prompt.split()
            words = [ids[word] for word in prompt + sample_response(question, rng)]
            examples.append((words[:MAX_RESPONSE], len(prompt)))
        examples.sort(key=lambda example: len(example[0]))
        chunks: list[list[tuple[list[int], int]]] = [[]]
        for example in examples:  # sorted, so the newest example is the longest of its chunk
            if (len(chunks[-1]) + 1) * len(example[0]) > batch_tokens:
                chunks.append([])
            chunks[-1].append(example)
        rng.shuffle(chunks)
        for chunk in chunks:
            inputs = torch.full((len(chunk), max(len(words) for words, _ in chunk)), WORDS.index(PAD))
            labels = torch.full_like(inputs, -100)
            for row, (words, start) in enumerate(chunk):
                inputs[row, : len(words)] = torch.tensor(words)
                labels[row, start : len(words)] = torch.tensor(words[start:])
            yield inputs, labels


class Searches(IterableDataset[tuple[Tensor, Tensor]]):
    """`batches` for worker processes: each draws with a seed of its own, and they take turns."""

    def __init__(self, pool: Sequence[Question], args: argparse.Namespace) -> None:
        self.pool, self.args = pool, args

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        seed = self.args.seed * 1000 + (worker.id if worker else 0)
        return batches(self.pool, random.Random(seed), self.args.batch_tokens)


def train(model: Qwen2ForCausalLM, pool: Sequence[Question], args: argparse.Namespace) -> None:
    """Train `model` on fresh searches for questions of `pool`: AdamW, warm-up, cosine; bfloat16 on CUDA."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.steps, pct_start=0.03, cycle_momentum=False, final_div_factor=1000
    )
    model.train()
    started, tokens = time.perf_counter(), 0
    stream = DataLoader(Searches(pool, args), batch_size=None, num_workers=args.workers)
    for step, (inputs, labels) in enumerate(itertools.islice(stream, args.steps), start=1):
        inputs, labels = inputs.to(args.device), labels.to(args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += inputs.numel()
        if step % 1000 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step}  loss {loss.item():.3f}  tokens/s {tokens / seconds:.0f}  {seconds:.0f} s", flush=True)


@torch.inference_mode()
def measure(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], args: argparse.Namespace
) -> None:
    """Print accuracy and response lengths at temperature 1, by how many numbers the question gives."""
    model.eval()
    results: dict[int, list[tuple[float, int]]] = {}
    for count in DIFFICULTY:
        asked = [question for question in questions if len(question.numbers) == count]
        inputs = tokenizer([question.prompt for question in asked], return_tensors="pt").to(args.device)
        outputs = model.generate(  # type: ignore[misc]
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_RESPONSE
        )[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        lengths = (outputs != tokenizer.pad_token_id).sum(-1).tolist()
        results[count] = [
            (countdown(question.prompt, text, question.row), length)
            for question, text, length in zip(asked, texts, lengths, strict=True)
        ]
    print("numbers  samples  accuracy  length p50  p90  p99  max  at the limit")
    for name, rows in [*results.items(), ("all", list(itertools.chain(*results.values())))]:
        lengths = sorted(length for _, length in rows)
        quantiles = "  ".join(str(lengths[int(q * (len(lengths) - 1))]) for q in (0.5, 0.9, 0.99, 1.0))
        accuracy = sum(reward for reward, _ in rows) / len(rows)
        limit = sum(length >= MAX_RESPONSE for length in lengths)
        print(f"{name}  {len(rows)}  {accuracy:.3f}  {quantiles}  {limit}")


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Write one JSON object per question: prompt, answer (the target), numbers."""
    with path.open("w") as file:
        for question in questions:
            file.write(json.dumps(question.row) + "\n")


def write_searches(
    path: Path, questions: Sequence[Question], seed: int, hasty_share: float = 0.0, *, must_hit: bool = True
) -> None:
    """Write one JSON object per question: prompt, and a search for its answer, which has found it if it must."""
    rng, rows = random.Random(seed), []
    for question in questions:
        words = sample_response(question, rng, hasty_share)
        if words[-1] == EOS and (HIT in words or not must_hit):
            rows.append({"prompt": question.prompt, "completion": f" {' '.join(words[:-1])}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_questions(args: argparse.Namespace) -> tuple[list[Question], list[Question], list[Question]]:
    """Draw the questions to pretrain on, to train on and to validate on; no validation question is in the others."""
    rng = random.Random(args.seed)
    drawn = list(dict.fromkeys(sample_question(rng) for _ in range(args.pool)))
    val = drawn[: args.val]
    held_out = {question.key for question in val}
    pool = [question for question in drawn if question.key not in held_out]
    return pool, pool[: args.train], val


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("recipes/assets/countdown"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workers", type=int, default=4, help="processes that write searches")
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--intermediate_size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--init_range", type=float, default=0.05, help="standard deviation of the initial weights")
    parser.add_argument("--steps", type=int, default=6000, help="optimizer steps")
    parser.add_argument("--batch_tokens", type=int, default=16384, help="tokens of a batch, padding included")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--pool", type=int, default=60000, help="questions to draw, before duplicates go")
    parser.add_argument("--train", type=int, default=2048, help="rows of train.jsonl")
    parser.add_argument("--val", type=int, default=256, help="rows of val.jsonl")
    parser.add_argument("--searches", type=int, default=400, help="questions whose searches may be imitated")
    parser.add_argument("--texts", type=Path, help="write only searches, hasty and patient, to this file")
    return parser.parse_args()


def main() -> None:
    """Make the data, train the policy, save both, measure; with `--texts` write searches alone."""
    args = parse_args()
    torch.manual_seed(args.seed)
    pool, train_questions, val_questions = make_questions(args)
    if args.texts is not None:
        args.texts.parent.mkdir(parents=True, exist_ok=True)
        asked = pool[args.train : args.train + args.searches]
        write_searches(args.texts, asked, args.seed, HASTY_SHARE, must_hit=False)
        return
    model, tokenizer = make_model(args).to(args.device), make_tokenizer()
    print(f"{len(pool)} questions to pretrain on, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    train(model, pool, args)
    args.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.output / "policy")
    tokenizer.save_pretrained(args.output / "policy")
    write_questions(args.output / "train.jsonl", train_questions)
    write_questions(args.output / "val.jsonl", val_questions)
    write_searches(args.output / "searches.jsonl", pool[args.train : args.train + args.searches], args.seed)
    measure(model, tokenizer, val_questions * 4, args)


if __name__ == "__main__":
    main()
