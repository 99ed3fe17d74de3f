"""Score the answer to a multiple-choice question with up to five options."""

import re
from typing import Any

from tlt_lightning.rewards.answers import expected_answer, final_part, last_boxed

# "A" before a lower-case word is taken for the article, which reasoning is full of, but not where STATED_A matches.
LETTER = r"(?:[B-E]|A(?!\s+[a-z]))"
NUMBER = r"(?:(?<!\.)[1-5](?!\.\d))"
STATED_A = r"(?:\s+(?i:is)[ :=*$]*|[ *]*:[ *]*(?=A\s+(?:because|since)\b))(A)(?!\w)"
STATED = re.compile(
    rf"(?i:answer)(?:{STATED_A}|(?:\s+(?i:is))?[\s:=*$]*(?:\(([a-eA-E1-5])\)|({LETTER}|{NUMBER})(?!\w)))"
)
STANDALONE_LETTER = re.compile(rf"(?<!\w){LETTER}(?!\w)")
STANDALONE_LABEL = re.compile(rf"(?<!\w)(?:{LETTER}|{NUMBER})(?!\w)")


def multiple_choice(prompt: str, response: str, row: dict[str, Any]) -> float:
    r"""Return 1 if the response settles on the right option, else 0.

    In the last `<answer>` block, or everywhere without one, the last `\boxed{B}` counts, or else the last "answer is
    (B)" or "Answer: B", or else the last capital letter A to E that stands alone. The answer column holds a letter, or
    a number from 1 as in some rows of ARC; the response may then give the option's number or its letter.

    Example:
        >>> multiple_choice("...", "Iron rusts, so the answer is (B).", {"answer": "B"})
        1.0
    """
    answer = expected_answer(row).strip("().").upper()
    if not re.fullmatch(r"[A-E1-5]", answer):
        raise ValueError(
            f"`multiple_choice` needs an answer from A to E or from 1 to 5, got {row['answer']!r}; check the answer "
            "column."
        )
    choice = chosen_option(final_part(response)[0], numbered=answer.isdigit())
    return float(choice is not None and letter(choice) == letter(answer))


def chosen_option(response: str, *, numbered: bool) -> str | None:
    """Return the letter, or with `numbered` perhaps the number, that `response` settles on."""
    standalone = STANDALONE_LABEL if numbered else STANDALONE_LETTER
    boxed = last_boxed(response)
    if boxed is not None:
        found = standalone.search(re.sub(r"\\[a-zA-Z]+|[{}]", " ", boxed))
        return found.group() if found else None
    stated = [match[match.lastindex or 0] for match in STATED.finditer(response)]
    stated = [option for option in stated if numbered or option.isalpha()]
    return stated[-1] if stated else next(reversed(standalone.findall(response)), None)


def letter(option: str) -> str:
    """Return the letter of an option given as a letter or as a number from 1."""
    return "ABCDE"[int(option) - 1] if option.isdigit() else option.upper()
