"""Write one row per engine step, to show a rollout from inside."""

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
        path: File that is appended to; its directory is made. Rollouts are numbered on from those that it holds.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        rows = self.path.read_text().splitlines() if self.path.is_file() else []
        self._rollout, self._step = max((json.loads(row)["rollout"] for row in rows), default=-1), 0
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
