"""Write the policy's text: endless streams of Countdown questions, searches and answers.

Questions, vocabulary and tokenizer are the quickstart's (`recipes/assets/make_countdown.py`); the searches are longer.
A searcher does not start anew with each chain but goes back a few steps and tries another way from there, which keeps
the entropy of the text near that of a reasoning model. How long he goes on is drawn from a log-normal distribution once
per search, and how often a chain can reach the target differs between questions by a factor of a hundred: together they
make the long tail of lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from recipes.assets.make_countdown import (
    ANSWER,
    EOS,
    HIT,
    MAX_NUMBER,
    MAX_VALUE,
    MISS,
    PAD,
    START,
    WORDS,
    Question,
    steps,
    target_odds,
)

MAX_RESPONSE = 4096  # tokens; the longest response that a rollout asks for
DIFFICULTY = {3: 0.2, 4: 0.8}  # share of questions by how many numbers they give
MIN_ODDS = {3: 0.005, 4: 0.001}  # a random chain reaches the target at least this often
FLATNESS = 0.4  # targets are drawn with their odds to this power: 0 makes all equally likely
PATIENCE = (3.55, 1.3)  # mean and deviation of the logarithm of how many misses a searcher endures
# How many steps of the chain before are kept, as weights of 0, 1, ...: going back by one step is likeliest.
KEPT = {count: list(accumulate(range(1, count + 1))) for count in DIFFICULTY}

_IDS = {word: index for index, word in enumerate(WORDS)}
_NUMBERS = [_IDS[str(value)] for value in range(MAX_VALUE + 1)]
# (sign, result) by value and number, as `steps` gives them, the sign as a token id.
_STEPS = [
    [[(_IDS[sign], result) for sign, result in steps(value, number)] if number else [] for number in range(13)]
    for value in range(MAX_VALUE + 1)
]
WORD_BY_WORD = [[index] for index in range(len(WORDS))]
"""Tokens of each of `WORDS` in the tokenizer of the policies made from scratch."""

Key = tuple[tuple[int, ...], int]


def draw_question(rng: random.Random, held_out: Collection[Key] = ()) -> Question:
    """Draw a question that is not `held_out`."""
    while True:
        count = rng.choices(list(DIFFICULTY), list(DIFFICULTY.values()))[0]
        numbers = tuple(rng.randint(1, MAX_NUMBER) for _ in range(count))
        odds = {target: chance for target, chance in target_odds(numbers).items() if chance >= MIN_ODDS[count]}
        if not odds:
            continue
        weights = [chance**FLATNESS for chance in odds.values()]
        question = Question(numbers, rng.choices(list(odds), weights)[0])
        if question.key not in held_out:
            return question


def make_questions(seed: int, num_train: int, num_val: int) -> tuple[list[Question], list[Question]]:
    """Draw the questions to train and to validate on; no two ask the same."""
    rng = random.Random(seed)
    drawn: dict[Key, Question] = {}
    while len(drawn) < num_train + num_val:
        question = draw_question(rng)
        drawn.setdefault(question.key, question)
    questions = list(drawn.values())
    return questions[num_val:], questions[:num_val]


def write_search(question: Question, rng: random.Random, max_tokens: int = MAX_RESPONSE) -> list[int]:
    """Write a search and its final answer as token ids, cut at `max_tokens`."""
    hit, miss, equals, random_unit = _IDS[HIT], _IDS[MISS], _IDS["="], rng.random
    order, count = list(question.numbers), len(question.numbers)
    give_up = min(1.0, math.exp(-rng.gauss(*PATIENCE)))
    written, values, kept, ids = [0] * (4 * count - 3), [0] * count, 0, []
    while True:
        tail = order[kept:]
        rng.shuffle(tail)
        order[kept:] = tail
        if kept == 0:
            values[0], written[0] = order[0], _NUMBERS[order[0]]
        for step in range(max(kept, 1), count):
            options = _STEPS[values[step - 1]][order[step]]
            sign, values[step] = options[int(random_unit() * len(options))]
            written[4 * step - 3 : 4 * step + 1] = sign, _NUMBERS[order[step]], equals, _NUMBERS[values[step]]
        is_hit = values[-1] == question.target
        ids += written
        ids.append(hit if is_hit else miss)
        if is_hit or random_unit() < give_up or len(ids) > max_tokens:
            return [*ids, _IDS[ANSWER], *_expression(written, count), _IDS[EOS]][:max_tokens]
        kept = rng.choices(range(count), cum_weights=KEPT[count])[0]


def _expression(written: list[int], count: int) -> list[int]:
    """Write a chain as an expression, without its results, its steps in brackets."""
    ids = [_IDS["("]] * (count - 2) + written[:1]
    for step in range(1, count):
        ids += written[4 * step - 3 : 4 * step - 1]
        if step < count - 1:
            ids.append(_IDS[")"])
    return ids


def spelling_of(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each of `WORDS`, with the space before it.

    Raises:
        ValueError: The tokenizer spells a word otherwise beside others.
    """

    def spell(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ends = {START: spell(START), EOS: [tokenizer.eos_token_id], PAD: [tokenizer.pad_token_id]}
    spelling = [ends.get(word) or spell(f" {word}") for word in WORDS]
    inner = [index for index, word in enumerate(WORDS) if word not in ends]
    text = START + "".join(f" {WORDS[index]}" for index in inner)
    if spell(text) != [*ends[START], *chain.from_iterable(spelling[index] for index in inner)]:
        raise ValueError("The tokenizer joins words of the benchmarks' text; give a `--base` that splits at spaces.")
    return spelling


def write_row(
    rng: random.Random,
    length: int,
    held_out: Collection[Key] = (),
    spelling: Sequence[Sequence[int]] = WORD_BY_WORD,
) -> list[int]:
    """Write `length` token ids: questions with search and answer, the last one cut."""
    ids: list[int] = []
    while len(ids) < length:  # a word has one token or more
        question = draw_question(rng, held_out)
        words = [*(_IDS[word] for word in question.prompt.split()), *write_search(question, rng)]
        ids += chain.from_iterable(map(spelling.__getitem__, words))
    return ids[:length]


class Streams(IterableDataset[Tensor]):
    """Yields endless batches (rows, length) of text, int32, other ones from each worker.

    A row starts with a question, as a rollout does, and goes on across the end of answers: what a policy trained on it
    writes after an end token is the next question.

    Args:
        rows: Rows of a batch.
        length: Tokens of a row.
        held_out: Keys of questions that must not appear.
        seed: Makes the text reproducible, worker by worker.
        spelling: Tokens of each of `WORDS`.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        held_out: Collection[Key],
        seed: int,
        spelling: Sequence[Sequence[int]] = WORD_BY_WORD,
    ) -> None:
        self.rows, self.length, self.held_out, self.seed = rows, length, held_out, seed
        self.spelling = spelling

    @override
    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        rng = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        while True:
            batch = [write_row(rng, self.length, self.held_out, self.spelling) for _ in range(self.rows)]
            yield torch.tensor(batch, dtype=torch.int32)
