"""Take prompts from `reasoning-gym`, and score their answers by its verifiers (arXiv 2505.24760)."""

from collections import UserList
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from tlt_lightning.arguments import Count, CountOrZero, checked
from tlt_lightning.data.rows import Row, RowSource
from tlt_lightning.rewards.answers import final_part
from tlt_lightning.rewards.children import Children

MAX_DRAWS = 20
"""Entries drawn for each row that is wanted, before the task is taken to have no more questions."""

CHILDREN = Children(Path(__file__).with_name("_verifier.py"))


class ReasoningGym(UserList[Row], RowSource):
    """Holds distinct questions of a procedural task; the same for the same arguments.

    Rows have the columns `prompt`, `answer` and `metadata`. As no question comes twice, slices of one source are
    disjoint: train on `split: train[100:]` and validate on `train[:100]`. Score with `tlt_lightning.tasks.verify`.

    Args:
        task: Name of the task, for example `chain_sum` or `gsm_symbolic`.
        size: Number of questions.
        seed: Chooses the questions.
        config: Settings of the task, which make it easier or harder, for example `max_terms: 2` of `chain_sum`.

    Raises:
        ImportError: `reasoning-gym` is not installed.
        ValueError: The task does not exist, or has fewer than `size` questions.
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
        num_draws = size * MAX_DRAWS
        entries = _library().create_dataset(task, size=num_draws, seed=seed, **(config or {}))
        for entry in islice(entries, num_draws):
            row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
            rows.setdefault(entry["question"], row)
            if len(rows) == size:
                break
        else:
            raise ValueError(
                f"`size` {size} is more than task {task!r} has to ask: {len(rows)} distinct questions in "
                f"{num_draws} draws; lower `size`, or widen `config`."
            )
        super().__init__(rows.values())


def verify(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Score a response by the verifier of the row's task; most give 1 for a right answer, a part for others.

    Some verifiers run the answer as Python, so all run in child processes, with limits on time and memory. What the
    answer runs can neither write files nor start programs nor use the network, unless it gets around the audit events
    of the interpreter, and no other answer sees what it changed. It can read your files and forge its own score: train
    policies you do not trust in a container. A pool starts the children when it is made.

    Args:
        prompt: Not read; the row says what the question is.
        response: The answer: what follows `</think>`, and within it the last `<answer>` block if there is one.
        row: A row of `ReasoningGym`.

    Raises:
        ValueError: The row is of no task.
        TimeoutError: The verifier takes too long.
        RuntimeError: The verifier fails.
    """
    metadata = row.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError(f"`verify` needs rows of `tlt_lightning.tasks.ReasoningGym`, got the columns {sorted(row)}.")
    entry = {**row, "question": row["prompt"]}  # in the library's words
    return CHILDREN.ask(metadata["source_dataset"], final_part(response)[0], entry)


verify.load = CHILDREN.load  # type: ignore[attr-defined]


def _library() -> Any:
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ImportError(
            "`tlt_lightning.tasks` needs the package `reasoning-gym`: pip install 'tlt-lightning[tasks]'. Where no "
            "wheel of pycosat, on which it depends, fits the machine, this takes a C compiler."
        ) from error
    return factory
