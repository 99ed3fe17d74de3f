"""Score the shape of a response, whatever it says."""

import re
from typing import Any

# Each dot refuses to run over a tag, so that a second answer does not match and matching takes linear time.
INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
THINK_THEN_ANSWER = rf"<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>"


class Format:
    """Gives 1 to a response that matches a regular expression from end to end, else 0.

    White space around the response is ignored and `.` matches line breaks too; write `.*` where anything may stand. A
    pattern that backtracks exponentially stops the process, past any time limit: `re` holds the interpreter's lock.

    Args:
        pattern: The regular expression. The default asks for one `<think>...</think>`, then one `<answer>...</answer>`,
            and nothing else; chat templates that open `<think>` themselves need a pattern without it.

    Example:
        >>> Format()("2 + 2?", "<think>Two and two.</think> <answer>4</answer>", {})
        1.0
    """

    def __init__(self, pattern: str = THINK_THEN_ANSWER) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"`pattern` must be a regular expression, got {pattern!r}: {error}.") from error

    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> float:
        """Return 1 if `response` has the format, else 0."""
        return float(self.pattern.fullmatch(response.strip()) is not None)
