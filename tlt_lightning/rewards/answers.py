"""Find the expected answer in a row and the final answer in a response, and score one that is nothing else."""

from typing import Any

ANSWER = "<answer>"
"""Begins what counts of a response; `</answer>` may end it."""


def expected_answer(row: dict[str, Any]) -> str:
    """Return the answer of a row as stripped text; raise ValueError if the row has none."""
    answer = row.get("answer")
    if isinstance(answer, float) and answer.is_integer():  # a column of whole numbers with a gap becomes one of floats
        answer = int(answer)
    if isinstance(answer, dict | list) or answer is None or answer != answer or not str(answer).strip():
        raise ValueError(
            f"This reward compares with the text or number `row['answer']`, which is {answer!r} here; fill it in, "
            "write a reward that reads `row` itself, or set `answer_column` to another of the row's columns: "
            f"{', '.join(sorted(row.keys() - {'answer'})) or 'there is none'}."
        )
    return str(answer).strip()


def exact_match(prompt: str, response: str, row: dict[str, Any]) -> float:
    r"""Return 1 if the response is the answer, surrounding white space aside, else 0.

    Example:
        >>> exact_match("2 + 2 =", " 4\n", {"answer": 4})
        1.0
    """
    return float(response.strip() == expected_answer(row))


def final_part(response: str) -> tuple[str, bool]:
    """Return what follows `</think>`, thereof the last `<answer>` block, closed or not, and True if there is one."""
    said = response.rpartition("</think>")[2]
    return said.rpartition(ANSWER)[2].partition("</answer>")[0].strip(), ANSWER in said


def last_boxed(text: str) -> str | None:
    r"""Return the inside of the last complete `\boxed{...}`, braces balanced; None without one."""
    start, end = text.rfind(r"\boxed{"), len(text)
    while start >= 0:
        begin = start + len(r"\boxed{")
        depth = 1
        for position in range(begin, end):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                return text[begin:position].strip()
        # What is open here to the end keeps whatever is around it open, too.
        start, end = text.rfind(r"\boxed{", 0, start), start
    return None
