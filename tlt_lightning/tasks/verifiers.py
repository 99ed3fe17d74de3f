"""Take the rows of an environment of the library `verifiers`."""

from collections import UserList
from typing import Any, Literal

from tlt_lightning.arguments import checked
from tlt_lightning.data.rows import Row, RowSource
from tlt_lightning.environments.verifiers import VerifiersEnvironment


class VerifiersRows(UserList[Row], RowSource):
    """Holds the rows of an environment of `verifiers`, for `tlt_lightning.VerifiersEnvironment`.

    Rows have the columns `prompt`, `answer`, `split` and `index`; by the last two the environment finds its own.

    Args:
        id: As in `VerifiersEnvironment`.
        args: The same.
        python: The same.
        split: The environment's data set to read.
    """

    @checked()
    def __init__(
        self,
        id: str,
        args: dict[str, Any] | None = None,
        python: str | None = None,
        split: Literal["train", "eval"] = "train",
    ) -> None:
        super().__init__(VerifiersEnvironment(id, args, python).rows(split))
