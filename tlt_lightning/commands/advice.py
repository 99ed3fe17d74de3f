"""Say what was perhaps meant by a name that the command line does not know."""

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc import locate
from types import ModuleType
from typing import Any

import lightning.pytorch.callbacks
from jsonargparse._parameter_resolvers import get_signature_parameters

import tlt_lightning
from tlt_lightning import objectives

_NO_CLASS = "Expected a dot import path string: "  # begins jsonargparse's message about a short name of no class


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
                known = {*tlt_lightning.__all__, *dir(objectives), *lightning.pytorch.callbacks.__all__}
                if name in known:
                    return f"`{name}` is of another kind than this setting takes."
                if name.isidentifier() and name.lower() not in ("true", "false", "null", "none"):
                    own = " Name one of your own with its module: `my_module.Name`."
                    return f"There is no class `{name}`.{did_you_mean(name, known) or own}"
    return ""


def refused_argument(message: str) -> str:
    """Return a sentence on the argument that a class does not take, of which the parser's message tells; else ""."""
    found = re.search(r"(?:class_path '(.+?)':\s+)?Option '(.+?)' is not accepted(?:.*?class_path='(.+?)')?", message)
    if found is None or not (path := found[1] or found[3]):
        return ""
    kind: Any = locate(path)
    known = [each.name for each in get_signature_parameters(kind)]  # those behind `**kwargs`, too
    hint = did_you_mean(found[2], known) or f" It takes {', '.join(known) or 'none'}."
    return f"`{path.rpartition('.')[2]}` takes no `{found[2]}`.{hint}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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


def files_meant(message: str) -> list[str]:
    """Return `-c` with each file of settings that stands alone in an error of the parser, or lies in `recipes/`."""
    found = re.search(r"(?:unrecognized arguments: |File does not exist: ')([^'\n]*)", message, re.IGNORECASE)
    words = [Path(word) for word in (found[1].split() if found else ()) if word.endswith((".yaml", ".yml"))]
    return [f"-c {place}" for word in words for place in (word, "recipes" / Path(word.name)) if place.is_file()]


def _nearest(option: str, options: set[str]) -> list[str]:
    """Return the options that `option` may stand for: at most three without its group, or else the closest one."""
    within = sorted(known for known in options if known.endswith(f".{option}"))[:3]
    return within or difflib.get_close_matches(option, options, n=1, cutoff=0.75)
