"""Write one row per engine step, to show a rollout from inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

_MOST_BYTES = 4096  # of two rows


class StepTrace:
    """Appends one JSON object per engine step to a file.

    Keys: `rollout`, `step`, `time` (seconds since the rollout began), `seconds` (of the step), `batch`, `context`
    (mean tokens), `running`, `waiting`, `verifies` and `drafts` (strategies, such as `learned_5` or `off`), `k`
    (verified), `verifications` (requests that verified drafts), `drafted`, `accepted`, `emitted` (tokens), `decode`
    (no prompt was read).

    Args:
        path: File that is appended to; its directory is made. Rollouts are numbered on from those that it holds.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._rollout, self._step = _last_rollout(self.path), 0
        self._file: TextIO | None = None

    def begin_rollout(self) -> None:
        """Start counting steps anew."""
        self._rollout, self._step = self._rollout + 1, 0

    def write(self, row: dict[str, Any]) -> None:
        """Append the row of one step."""
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


def _last_rollout(path: Path) -> int:
    """Return the rollout of a file's last row, -1 without one, and cut off what a killed run has left of another."""
    if not path.is_file() or not path.stat().st_size:
        return -1
    with path.open("r+b") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES))  # a long run has millions of rows
        begin, (rows, newline, _) = file.tell(), file.read().rpartition(b"\n")
        last = json.loads(rows.rpartition(b"\n")[2])  # before anything is cut off: the file may be another
        file.truncate(begin + len(rows) + len(newline))
    return int(last["rollout"])
