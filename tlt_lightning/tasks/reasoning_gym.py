"""Take prompts from `reasoning-gym`, and score their answers by its verifiers (arXiv 2505.24760)."""

import difflib
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from itertools import islice
from typing import Annotated, Any

from typing_extensions import override

from tlt_lightning.arguments import Count, CountOrZero, checked
from tlt_lightning.data.rows import Row, RowSource
from tlt_lightning.rewards.answers import final_part

MAX_DRAWS = 20
"""Entries drawn for each row that is wanted, before the task is taken to have no more questions."""


class ReasoningGym(RowSource):
    """Holds distinct questions of a procedural task; the same for the same arguments.

    Rows have the columns `prompt`, `answer` and `metadata`. As no question comes twice, slices of one source are
    disjoint: train on `split: train[100:]` and validate on `train[:100]`. Score with `tlt_lightning.tasks.verify`.

    Args:
        task: Name of the task, for example `chain_sum` or `gsm_symbolic`.
        size: Number of questions.
        seed: Chooses the questions.
        config: Settings of the task, which make it easier or harder, for example `max_terms: 2` of `chain_sum`.

    Raises:
        ImportError: `reasoning-gym` is not installed, or in a version without what is used of it.
        ValueError: The task or a setting does not exist, or the task has fewer than `size` questions.
    """

    @checked()
    def __init__(
        self,
        task: Annotated[str, "Give for example 'chain_sum'."],
        size: Count = 500,
        seed: CountOrZero = 0,
        config: Annotated[dict[str, Any] | None, "Give names and values, such as max_terms: 2."] = None,
    ) -> None:
        rows: dict[str, Row] = {}
        for entry in islice(_dataset(task, size * MAX_DRAWS, seed, config or {}), size * MAX_DRAWS):
            row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
            rows.setdefault(entry["question"], row)
            if len(rows) == size:
                break
        else:
            raise ValueError(
                f"`size` {size} is more than task {task!r} has to ask: {len(rows)} distinct questions in "
                f"{size * MAX_DRAWS} draws; lower `size`, or widen `config`."
            )
        self._rows = list(rows.values())

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def verify(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Score a response by the verifier of the row's task; most give 1 for a right answer, a part for others.

    Args:
        prompt: Not read; the row says what the question is.
        response: The answer: the inside of the last `<answer>` block, without one all of it.
        row: A row of `ReasoningGym`.

    Raises:
        ValueError: The row is of no task.
    """
    metadata = row.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError(f"`verify` needs rows of `tlt_lightning.tasks.ReasoningGym`, got the columns {sorted(row)}.")
    answer = final_part(response)
    entry = {**row, "question": row["prompt"]}  # in the library's words
    return _verifier(metadata["source_dataset"])(response.strip() if answer is None else answer, entry)


def _dataset(task: str, size: int, seed: int, config: dict[str, Any]) -> Any:
    """Make the library's dataset; its errors name neither task nor what is allowed."""
    factory = _library()
    if task not in factory.DATASETS:
        close = difflib.get_close_matches(task, factory.DATASETS, n=3)
        tasks = f"near: {close}" if close else f"they are {', '.join(sorted(factory.DATASETS))}"
        raise ValueError(f"`task` {task!r} is none of the {len(factory.DATASETS)} tasks of reasoning-gym; {tasks}.")
    known = set(factory.DATASETS[task][1].__dataclass_fields__) - {"seed", "size"}
    if unknown := sorted(set(config) - known):
        raise ValueError(f"`config` {unknown} are no settings of task {task!r}; it has {sorted(known)}.")
    try:
        return factory.create_dataset(task, size=size, seed=seed, **config)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"`config` {config} is refused by task {task!r}: {error}.") from error


@cache
def _verifier(task: str) -> Callable[[str, Row], float]:
    return _library().get_score_answer_fn(task)


def _library() -> Any:
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ImportError(
            "`tlt_lightning.tasks` needs the package `reasoning-gym`: pip install 'tlt-lightning[tasks]'. Where no "
            "wheel of pycosat, on which it depends, fits the machine, this takes a C compiler."
        ) from error
    used = ("DATASETS", "create_dataset", "get_score_answer_fn")
    if missing := [name for name in used if not hasattr(factory, name)]:
        raise ImportError(
            f"`tlt_lightning.tasks` needs `reasoning_gym.factory.{missing[0]}`, which reasoning-gym "
            f"{version('reasoning-gym')} has not: pip install 'tlt-lightning[tasks]' installs a version that has it."
        )
    return factory
