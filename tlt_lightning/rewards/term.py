"""Name a reward function and weigh it."""

import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tlt_lightning.arguments import checked
from tlt_lightning.rewards.choice import multiple_choice
from tlt_lightning.rewards.countdown import countdown
from tlt_lightning.rewards.exact import exact_match
from tlt_lightning.rewards.math import math_equivalence

RewardFunction = Callable[[str, str, dict[str, Any]], float | Awaitable[float]]

RESERVED_NAMES = frozenset({"mean", "std", "zero_std_groups"})
"""Names under `reward/` that the statistics of the weighted sum have taken."""


@checked()
@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """Gives a reward function its name and its weight.

    Args:
        function: Called as `function(prompt, response, row)`; plain or async. In YAML either a dotted path
            (`tlt_lightning.rewards.exact_match`) or a class with `class_path` and `init_args`. One with an argument
            `completions`, as TRL's have, is called with lists of one: `prompts`, `completions`, the row's columns.
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
        if not callable(self.function):
            raise TypeError(f"`function` must be callable as (prompt, response, row), got {self.function!r}.")
        if not math.isfinite(self.weight):
            raise ValueError(f"`weight` must be a finite number, got {self.weight}.")
        if not self.name:
            object.__setattr__(self, "name", default_name(self.function))
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(
                f"`name` becomes part of the metric `reward/<name>` and may hold letters, digits, '_', '-' and '.', "
                f"got {self.name!r}; set `name`."
            )
        if self.name in RESERVED_NAMES:
            raise ValueError(f"`name` {self.name!r} is taken by the metric `reward/{self.name}`; set another `name`.")
        if takes_lists(self.function, self.name):
            object.__setattr__(self, "function", functools.partial(score_like_trl, self.function, taken(self.function)))


PLACES = {"prompt": 0, "question": 0, "response": 1, "completion": 1, "row": 2}
"""Places of arguments that are named so; a call names none."""

OF_ROW = ("answer", "ground_truth", "label", "solution", "target")
"""Names of what a row holds, which a third argument named so would be taken for."""

OF_TRL = ("completion_ids", "completions_ids", "trainer_state")
"""Arguments that TRL gives to rewards beside prompts, completions and columns."""


def taken(function: Any) -> frozenset[str] | None:
    """Return the arguments that a function takes by name, None if any."""
    parameters = inspect.signature(function).parameters
    return None if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else frozenset(parameters)


def score_like_trl(function: Any, names: frozenset[str] | None, prompt: str, response: str, row: dict[str, Any]) -> Any:
    """Score one response by a function of lists; a score of None is no part of the sum.

    As in TRL, prompt and completion are messages where the prompt is a conversation, in whichever column of the row.
    Of `prompts` and the row's columns it gets those in `names`, None being all.
    """
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "prompts", "completions")}
    asked = next((value for value in row.values() if ends_in(value, prompt)), None)
    completion = response if asked is None else [{"role": "assistant", "content": response}]
    given = {**columns, "prompts": [prompt if asked is None else asked], "completions": [completion]}
    scores = function(**given if names is None else {name: given[name] for name in given.keys() & names})

    async def wait() -> float | None:
        return first(await scores)

    return wait() if inspect.isawaitable(scores) else first(scores)


def ends_in(value: Any, prompt: str) -> bool:
    """Return True for a conversation whose last message is `prompt`."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and "role" in last and last.get("content") == prompt


def first(scores: Any) -> Any:
    """Return the score of the only response, None being 0; raise TypeError unless it is in a list of one."""
    if not hasattr(scores, "__getitem__") or isinstance(scores, str) or len(scores) != 1:
        raise TypeError(
            f"returned {scores!r:.200} for one completion; as its argument is `completions`, it has to return a list "
            "with one score of each"
        )
    return 0.0 if scores[0] is None else scores[0]


def as_terms(rewards: Any) -> list[RewardTerm]:
    """Return rewards as terms; raise TypeError unless they are a list, ValueError if empty or two have one name."""
    if not isinstance(rewards, list | tuple):
        raise TypeError(f"`rewards` must be a list of functions or `RewardTerm`s, got {rewards!r}; put it into a list.")
    if not rewards:
        raise ValueError("`rewards` is empty; give at least one reward function.")
    terms = [reward if isinstance(reward, RewardTerm) else RewardTerm(function=reward) for reward in rewards]
    name, count = Counter(term.name for term in terms).most_common(1)[0]
    if count > 1:
        raise ValueError(f"`rewards` holds {count} of the name {name!r}, under which each is logged; set `name`.")
    return terms


COMPARING = (countdown, exact_match, math_equivalence, multiple_choice)
"""Rewards of this package that compare with the row, which they read before the response."""


def check_rows(
    terms: Sequence[RewardTerm], rows: Mapping[int, dict[str, Any]], source: str, *, are_scored: bool = True
) -> None:
    """Raise TypeError if a column is missing, ValueError if a row has nothing that a reward could compare with.

    Args:
        terms: The rewards; those of the user's own are not asked what they compare with.
        rows: By their numbers in the data, at least one.
        source: Names the data.
        are_scored: A prediction is written without scores where there are none.
    """
    check_columns(terms, next(iter(rows.values())))
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


def check_columns(terms: Sequence[RewardTerm], row: Mapping[str, Any]) -> None:
    """Raise TypeError if a reward of TRL's signature needs a column that a row of the data does not have."""
    known = {*row, "prompts", "completions"}
    for term in terms:
        if isinstance(term.function, functools.partial) and term.function.func is score_like_trl:
            parameters = inspect.signature(term.function.args[0]).parameters
            if missing := [name for name, each in parameters.items() if _is_required(each) and name not in known]:
                raise TypeError(
                    f"Reward `{term.name}` needs {', '.join(f'`{name}`' for name in missing)}, and gets `prompts`, "
                    f"`completions` and the data's columns: {', '.join(sorted(known - {'prompts', 'completions'}))}. "
                    "Give the argument a default, or the data the column."
                )


def default_name(function: RewardFunction) -> str:
    """Return the name of a function, or of the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def takes_lists(function: RewardFunction, name: str) -> bool:
    """Return True if `function` has TRL's signature; raise TypeError if it has neither TRL's nor ours."""
    if inspect.isclass(function):
        raise TypeError(
            f"Reward `{name}` is a class, not a function: pass an instance, in YAML `class_path: {function.__module__}."
            f"{function.__qualname__}` with `init_args`."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none to look at
        return False
    if "completions" in signature.parameters:
        if unknown := [each for each in OF_TRL if _is_required(signature.parameters.get(each))]:
            raise TypeError(
                f"Reward `{name}` needs `{unknown[0]}`, which only TRL's trainer has; here it gets `prompts`, "
                f"`completions` and the row's columns. Give `{unknown[0]}` a default and do without it."
            )
        return True
    if "solution_str" in signature.parameters:  # three values bind, but to other meanings
        raise TypeError(
            f"Reward `{name}` has verl's signature {signature}; here it is (prompt, response, row). Wrap it: `def "
            "reward(prompt, response, row): return f(data_source=row.get('data_source'), solution_str=response, "
            "ground_truth=row['answer'])`, in verl's own files `row['reward_model']['ground_truth']`."
        )
    try:
        signature.bind("", "", {})
    except TypeError as error:
        raise TypeError(
            f"Reward `{name}` must be callable as (prompt, response, row), but its signature is {signature}: {error}."
        ) from error
    _check_places([*signature.parameters][:3], name)
    return False


def _check_places(arguments: list[str], name: str) -> None:
    """Raise TypeError if an argument is named for another value than it gets: the response, or a value of the row."""
    for place, argument in enumerate(arguments):
        if PLACES.get(argument, place) != place or (argument in OF_ROW and place == 2):
            given = ("prompt", "response", "row")[place]
            where = f"read `row[{argument!r}]`" if argument in OF_ROW else "put them into that order"
            raise TypeError(
                f"Reward `{name}` is called as (prompt, response, row), by place: its argument `{argument}` would "
                f"be the {given}: {where}."
            )


def _is_required(parameter: inspect.Parameter | None) -> bool:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter is not None and parameter.default is parameter.empty and parameter.kind not in variadic
