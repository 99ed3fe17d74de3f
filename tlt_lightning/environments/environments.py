"""Make environments of a class, and know what they offer."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

NOT_TOOLS = ("reset", "get_reward")


class Environments:
    """Makes environments of one class, each of which serves one conversation after the other.

    The class is as TRL's `environment_factory` takes it: `reset(**row)` begins anew and may return text that is put
    behind the prompt; every other public method with type hints and a docstring is a tool; `get_reward()`, if there is
    one, is asked at the end. Each may be a coroutine. A class whose `step` takes `text` alone is a game in words: every
    turn of the policy goes to it, and it returns what the policy reads next, None at the end. One whose `step` takes a
    `Turn` speaks in messages: its `reset` returns the whole prompt, `tools` are then those of the conversation, and
    `step` returns the messages that follow, none at the end.

    Args:
        made_by: The class, another callable without arguments, or an environment, of which copies are used.

    Raises:
        TypeError: It has no `reset`, cannot be copied, or a tool has no type hints or docstring.
    """

    def __init__(self, made_by: Any) -> None:
        is_factory = inspect.isclass(made_by) or inspect.isroutine(made_by) or isinstance(made_by, partial)
        self._make: Callable[[], Any] = made_by if is_factory else partial(deepcopy, made_by)
        first = self._make()
        methods = dict(inspect.getmembers(type(first), inspect.isfunction))  # of the class: no property is computed
        self.name = type(first).__name__
        if "reset" not in methods:
            raise TypeError(
                f"`environment` {first!r:.200} has no method `reset`; give a class that has one, as TRL's "
                "`environment_factory` takes it. In a recipe Python must find its `class_path` from here, and its "
                "constructor must take all `init_args`."
            )
        self.has_reward = "get_reward" in methods
        takes = [*inspect.signature(first.step).parameters] if "step" in methods else []
        self.plays_text, self.takes_turns = takes == ["text"], takes == ["turn"]
        """True for a game in words, which has no tools, and for one in messages."""
        is_game = self.plays_text or self.takes_turns
        tools = [name for name in methods if not (is_game or name in NOT_TOOLS or name.startswith("_"))]
        self.tools: dict[str, dict[str, Any]] = {name: _schema(getattr(first, name)) for name in tools}
        """JSON schemas of the tools, by name."""
        self._idle = [first]

    def check_reset(self, row: dict[str, Any]) -> None:
        """Raise TypeError unless `reset` takes the columns of a row."""
        try:
            inspect.signature(self._idle[-1].reset).bind(**row)
        except TypeError as error:
            raise TypeError(
                f"`environment.reset` is called with the columns of a row, {', '.join(row)}: {error}. Name those that "
                "you need, and let `**row` take the others."
            ) from error

    def take(self) -> Any:
        """Return an environment that nobody uses, to be reset."""
        return self._idle.pop() if self._idle else self._make()

    def give_back(self, environment: Any) -> None:
        """Take back an environment whose conversation has ended; one that failed is not to come back."""
        self._idle.append(environment)


def _schema(method: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(method)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise TypeError(
            f"`environment.{method.__name__}` is public, so a tool, and cannot be described to the policy: {error} "
            "Write its docstring with `Args:`, or begin its name with an underscore. A game in words has "
            "`step(self, text)`."
        ) from error
    return schema
