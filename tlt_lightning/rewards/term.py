"""Name a reward function and weigh it."""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tlt_lightning.arguments import checked
from tlt_lightning.rewards.answers import exact_match
from tlt_lightning.rewards.choice import multiple_choice
from tlt_lightning.rewards.countdown import countdown
from tlt_lightning.rewards.math import math_equivalence

RewardFunction = Callable[[str, str, dict[str, Any]], float | Awaitable[float]]

RESERVED_NAMES = frozenset({"mean", "std", "zero_std_groups"})
"""Names under `reward/` that the statistics of the weighted sum have taken."""

PLACES = {"prompt": 0, "response": 1, "completion": 1, "answer": 1, "row": 2, "ground_truth": -1}
"""Gives the place of a reward's argument by its name; -1 for what is part of a row, and has no place."""


@checked()
@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """Gives a reward function its name and its weight.

    Args:
        function: Called as `function(prompt, response, row)`; plain or async. In YAML either a dotted path
            (`tlt_lightning.rewards.exact_match`) or a class with `class_path` and `init_args`. One with an argument
            `completions`, as TRL's have, is called with lists of one: `prompts`, `completions`, the row's columns. A
            score of None says that it does not apply, and is part of neither sum nor mean.
        weight: Factor of this reward in the sum that the objective sees; 0 only logs it.
        name: Logged as `reward/<name>`; empty takes the name of the function or class.

    Example:
        >>> from tlt_lightning.rewards import exact_match
        >>> RewardTerm(function=exact_match, weight=0.5).name
        'exact_match'
    """

    function: RewardFunction
    weight: float = 1.0
    name: Annotated[str, "It is logged as `reward/<name>`."] = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"`weight` must be a finite number, got {self.weight}.")
        if not self.name:
            object.__setattr__(self, "name", default_name(self.function))
        if not (self.takes_lists or self.takes_places()):
            raise TypeError(
                f"`function` {self.name} takes {inspect.signature(self.function)}, and is called by place with "
                "(prompt, response, row): let it take these, in this order."
            )
        if self.name in RESERVED_NAMES:
            raise ValueError(f"`name` {self.name!r} is taken by the metric `reward/{self.name}`; set another `name`.")

    @property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """Arguments of the function by name; none where Python does not know them, as of some builtins."""
        try:
            return inspect.signature(self.function).parameters
        except ValueError:
            return {}

    @property
    def takes_lists(self) -> bool:
        """True if the function has TRL's signature."""
        return "completions" in self.arguments

    def takes_places(self) -> bool:
        """Return False if prompt, response and row cannot be given by place, or would go by each other's names."""
        try:
            given = inspect.signature(self.function).bind("", "", {}).arguments
        except (TypeError, ValueError) as error:
            return isinstance(error, ValueError)  # of some builtins Python knows no arguments
        return all(PLACES.get(name, place) == place for place, name in enumerate(given))

    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> Any:
        """Return what the function returns of a response; `score_of` reads it.

        As in TRL, prompt and completion are messages where the prompt is a conversation, in whichever column of the
        row. Of `prompts` and the row's columns a function gets those that it takes.
        """
        if not self.takes_lists:
            return self.function(prompt, response, row)
        columns = {name: [value] for name, value in row.items() if name not in ("prompt", "prompts", "completions")}
        asked = next((value for value in row.values() if ends_in(value, prompt)), None)
        completion = response if asked is None else [{"role": "assistant", "content": response}]
        given = {**columns, "prompts": [prompt if asked is None else asked], "completions": [completion]}
        if not any(each.kind is each.VAR_KEYWORD for each in self.arguments.values()):
            given = {name: given[name] for name in given.keys() & self.arguments.keys()}
        function: Any = self.function
        return function(**given)

    def score_of(self, returned: Any) -> Any:
        """Return the score in what the function has returned; None where one of TRL's does not apply.

        Raises:
            TypeError: It is None, or no list of one score from a function of TRL's.
        """
        if not self.takes_lists:
            if returned is None:
                raise TypeError("returned None; return 0.0 where a reward does not apply")
            return returned
        if not hasattr(returned, "__getitem__") or isinstance(returned, str) or len(returned) != 1:
            raise TypeError(
                f"returned {returned!r:.200} for one completion; as its argument is `completions`, it has to return a "
                "list with one score of each"
            )
        return returned[0]


def ends_in(value: Any, prompt: str) -> bool:
    """Return True for a conversation whose last message is `prompt`."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and "role" in last and last.get("content") == prompt


def as_terms(rewards: Any) -> list[RewardTerm]:
    """Return rewards, or the only one, as terms; raise ValueError if two have one name."""
    given = [rewards] if callable(rewards) else rewards or ()
    terms = [reward if isinstance(reward, RewardTerm) else RewardTerm(function=reward) for reward in given]
    for name, count in Counter(term.name for term in terms).most_common(1):
        if count > 1:
            raise ValueError(f"`rewards` holds {count} of the name {name!r}, under which each is logged; set `name`.")
    return terms


COMPARING = (countdown, exact_match, math_equivalence, multiple_choice)
"""Rewards of this package that compare with the row, which they read before the response."""


def check_rows(
    terms: Sequence[RewardTerm], rows: Mapping[int, dict[str, Any]], source: str, *, are_scored: bool = True
) -> None:
    """Raise ValueError if a row has nothing that a reward of this package could compare with.

    Args:
        terms: The rewards; those of the user's own are not asked what they compare with.
        rows: Rows by their numbers in the data, at least one.
        source: Names the data.
        are_scored: A prediction is written without scores where there are none.
    """
    for term in terms if are_scored else ():
        if term.function not in COMPARING:
            continue
        for number, row in rows.items():
            try:
                term.function("", "", row)
            except ValueError as error:
                raise ValueError(
                    f"Row {number} of {source} (from 0) cannot be scored by reward `{term.name}`: {error} Mend the "
                    "row, or leave it out of the data."
                ) from error


def default_name(function: RewardFunction) -> str:
    """Return the name of a function, or of the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
