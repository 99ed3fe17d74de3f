"""Say what was perhaps meant by a name that the command line does not know."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from pydoc import locate
from types import ModuleType

import lightning.pytorch.callbacks

import tlt_lightning
from tlt_lightning import objectives

_NO_CLASS = "Expected a dot import path string: "  # begins jsonargparse's message about a short name of no class
_NOT_SAID = (
    "Does not|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Subclass types expect|a (class path|dict) "
)
_WORDS = {
    r"an? (?:typing\.)?Literal\[(.*?)\]": r"one of \1",
    "an? <class '(.*?)'>": r"`\1`",
    "a dot import path string: .*?(?=\\. Got|$)": "a class by its name, or its settings",
    r"Not a valid subclass of (\w+)": r"Expected a class of kind `\1`, or its settings",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean `...`?" with the known name closest to `name`, case aside; "" where none is close."""
    names = {each.lower(): each for each in known}
    return "".join(f" Did you mean `{names[near]}`?" for near in difflib.get_close_matches(name.lower(), names, n=1))


def lost_name(error: BaseException | None) -> str:
    """Return a sentence on the function, class or module whose name led to `error`; "" for errors of other kinds."""
    for cause in _causes(error):
        match cause:
            case AttributeError(obj=ModuleType() as module, name=str(name)):
                return f"`{module.__name__}` has no `{name}`.{did_you_mean(name, dir(module))}"
            case ModuleNotFoundError(name=str(name)):
                files = [path.stem for path in Path().glob("*.py")]
                return f"There is no module `{name}`, nor a file `{name}.py` here.{did_you_mean(name, files)}"
            case ValueError() if str(cause).startswith(_NO_CLASS):
                name = str(cause).removeprefix(_NO_CLASS)
                classes = {*tlt_lightning.__all__, *dir(objectives), *lightning.pytorch.callbacks.__all__}
                if name.isidentifier() and name.lower() not in ("true", "false", "null", "none"):
                    if name in classes:
                        return f"`{name}` is a class of another kind."
                    own = " Name one of your own with its module: `my_module.Name`."
                    return f"There is no class `{name}`.{did_you_mean(name, classes) or own}"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def in_short(message: str) -> str:
    """Return what a parser says of a value as one sentence, under the value's whole key; any other message as it is.

    Of a value that may have several types jsonargparse lists each type's complaint, and those about a class's arguments
    are nested. The deepest is about the type that was meant.
    """
    keys: dict[int, str] = {}  # by their depth
    said: dict[int, list[str]] = {}
    given = ""
    for line in message.splitlines():
        text = line.lstrip(" -")
        depth = len(line) - len(text)
        if key := re.fullmatch('Parser key "(.*)":', text):
            keys = {above: name for above, name in keys.items() if above < depth} | {depth: key[1]}
        elif kind := re.fullmatch("Problem with given class_path '(.*)':", text):
            given = kind[1]
        elif not re.match(_NOT_SAID, text):
            said.setdefault(depth, []).append(text)
    if not keys or not said:
        return message
    sentence = " or: ".join(said[max(said)])
    if option := re.search(r"Option '(.*?)' is not accepted(?:.*class_path='(.*?)')?", sentence):
        given = option[2] or given
        sentence = f"`{given}` has no argument `{option[1]}`."
        with suppress(TypeError, ValueError):  # it does not tell its arguments
            takes = [*inspect.signature(locate(given)).parameters]  # type: ignore[arg-type]
            sentence += did_you_mean(option[1], takes) or f" It takes {', '.join(takes)}."
    elif (value := re.search(r"Given value: (.{1,60})$", message, re.M)) and "Got value" not in sentence:
        sentence += f". Got value: {value[1]}"
    for long, short in _WORDS.items():
        sentence = re.sub(long, short, sentence)
    return f"`{'.'.join(keys.values())}`: {sentence}"


def close_options(message: str, options: set[str]) -> list[str]:
    """Return the known options closest to each unknown option in an error of the parser.

    Args:
        message: The parser's own.
        options: All that it knows, without their dashes.
    """
    unknown = re.findall(r"does not accept option '([^']+)'", message)
    if rest := re.search(r"unrecognized arguments: (.*)", message, re.IGNORECASE):
        unknown += [word.removeprefix("--").partition("=")[0] for word in rest[1].split() if word.startswith("--")]
    return [f"--{known}" for option in unknown for known in _nearest(option, options)]


def _nearest(option: str, options: set[str]) -> list[str]:
    """Return the options that `option` may stand for: at most three without its group, or else the closest one."""
    within = sorted(known for known in options if known.endswith(f".{option}"))[:3]
    return within or difflib.get_close_matches(option, options, n=1, cutoff=0.75)
