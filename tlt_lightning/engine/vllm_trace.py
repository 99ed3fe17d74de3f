"""One row a step, for those who want to see a rollout from inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO


class StepTrace:
    """Appends one JSON object per engine step to a file.

    Keys: `rollout`, `step`, `time` (seconds since the rollout began), `seconds` (of the step), `batch`, `context`
    (mean tokens), `running`, `waiting`, `verifies` and `drafts` (strategies, such as `learned_5` or `off`), `k`
    (verified), `verifications` (requests that verified drafts), `drafted`, `accepted`, `emitted` (tokens), `decode`
    (no prompt was read).

    Args:
        path: File that is appended to; its directory is made.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._rollout, self._step = -1, 0
        self._file: TextIO | None = None

    def begin_rollout(self) -> None:
        """Start counting steps anew."""
        self._rollout, self._step = self._rollout + 1, 0

    def write(self, row: dict[str, Any]) -> None:
        """Append one step."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
        self._file.write(json.dumps({"rollout": self._rollout, "step": self._step, **row}) + "\n")
        self._step += 1

    def flush(self) -> None:
        """Make all rows readable from outside."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file; a later row opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_trace(path: str | Path, rollout: int = -1) -> list[dict[str, Any]]:
    """The rows of one rollout of a trace file; -1 is the last one written."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    last = max((row["rollout"] for row in rows), default=0)
    wanted = last if rollout < 0 else rollout
    return [row for row in rows if row["rollout"] == wanted]
