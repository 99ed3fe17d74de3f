"""Say what was perhaps meant by a name that the command line does not know."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch.callbacks
from jsonargparse import _typehints

import tlt_lightning
from tlt_lightning import objectives

_import_object = _typehints.import_object


class NotFound(ValueError):
    """Says that nothing has a name, and what may have been meant."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean `...`?" with the known name closest to `name`, case aside; "" where none is close."""
    names = {each.lower(): each for each in known}
    return "".join(f" Did you mean `{names[near]}`?" for near in difflib.get_close_matches(name.lower(), names, n=1))


def import_object(name: Any, *args: Any) -> Any:
    """Import what a dotted path names, as jsonargparse does; raise NotFound where there is nothing of the name."""
    if isinstance(name, str) and name.isidentifier():  # of no class that the setting takes
        known = {*tlt_lightning.__all__, *dir(objectives), *lightning.pytorch.callbacks.__all__}
        if name in known:
            raise NotFound(f"`{name}` is of another kind than this setting takes.")
        own = " Name one of your own with its module: `my_module.Name`."
        raise NotFound(f"There is no class `{name}`.{did_you_mean(name, known) or own}")
    try:
        return _import_object(name, *args)
    except AttributeError as error:
        if not isinstance(error.obj, ModuleType):
            raise
        hint = did_you_mean(str(error.name), dir(error.obj))
        raise NotFound(f"`{error.obj.__name__}` has no `{error.name}`.{hint}") from None
    except ModuleNotFoundError as error:
        hint = did_you_mean(str(error.name), [path.stem for path in Path().glob("*.py")])
        raise NotFound(f"There is no module `{error.name}`, nor a file `{error.name}.py` here.{hint}") from None


def files_meant(words: Sequence[str]) -> list[str]:
    """Return `-c` with each file of settings in a command line that stands alone in it, or lies in `recipes/`."""
    files = [Path(word) for word in words if word.endswith((".yaml", ".yml")) and not word.startswith("-")]
    alone = [file for file in files if file.is_file() and words[words.index(str(file)) - 1] not in ("-c", "--config")]
    moved = [place for file in files if not file.exists() and (place := "recipes" / Path(file.name)).is_file()]
    return [f"-c {place}" for place in (*alone, *moved)]


def nearest(option: str, options: Collection[str]) -> list[str]:
    """Return the options that `option` may stand for: at most three without its group, or else the closest one."""
    if within := sorted(known for known in options if known.endswith(f".{option}"))[:3]:
        return within
    beginnings = accumulate(option.split("."), "{}.{}".format)  # `data.schedul.class_path` may be of `data.schedule`
    lost = next((each for each in beginnings if not any(f"{known}.".startswith(f"{each}.") for known in options)), "")
    close = (difflib.get_close_matches(name, options, n=1, cutoff=0.75) for name in (option, lost))
    return next(filter(None, close), [])
