"""Say what was perhaps meant by an option, a class or a value that the parser has refused."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator

import tlt_lightning
from tlt_lightning import objectives

_REMEDIES = {
    r"Import path (\S+) does not correspond to a subclass of RewardTerm": "Name a reward as `{{function: {}}}`.",
    r'Parser key "data\.(?:train|val)":.*Given value: ([^\s{{]+)$': "Name a file or a hub data set as `{{path: {}}}`.",
    r"required: (?:fit|validate|predict)\.model\.policy": (
        "Begin with a recipe, as in `fit -c recipes/base.yaml -c recipes/quickstart.yaml`; `recipes` lists all of them."
    ),
}
"""By a pattern of the parser's errors: what to write instead, with what the user wrote."""

_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':\s+Option '([^']+)' is not accepted")
_NO_CLASS_NAME = re.compile(r"(?i)true|false|yes|no|on|off|null|[-+]?[\d.][\d.e+-]*")


def advise(message: str, options: set[str]) -> list[str]:
    """Return sentences on an error of the parser.

    Args:
        message: The parser's own.
        options: All that it knows, without their dashes.
    """
    remedies = [remedy.format(*found.groups()) for found, remedy in _found(message)]
    sentences = [f"Did you mean `{known}`?" for known in get_close_options(message, options)]
    return [*sentences, *_on_arguments(message), *(remedies or _on_values(message))]


def get_close_options(message: str, options: set[str]) -> list[str]:
    """Return the known options closest to each unknown option in an error of the parser."""
    unknown = re.findall(r"does not accept option '([^']+)'", message)
    unknown += re.findall(r"Option '([^']+)' is not accepted", _CLASS.sub("", message))
    if rest := re.search(r"unrecognized arguments: (.*)", message, re.IGNORECASE):
        unknown += [word.removeprefix("--").partition("=")[0] for word in rest[1].split() if word.startswith("--")]
    return [f"--{known}" for option in unknown for known in _nearest(option, options)]


def _found(message: str) -> Iterator[tuple[re.Match[str], str]]:
    for pattern, remedy in _REMEDIES.items():
        if found := re.search(pattern, message, re.DOTALL):
            yield found, remedy


def _nearest(option: str, options: set[str]) -> list[str]:
    """Return the options that `option` may stand for, at most three, all of which fit equally well."""
    group, _, leaf = option.rpartition(".")
    siblings = {known.rpartition(".")[2]: known for known in sorted(options) if known.rpartition(".")[0] == group}
    if group and siblings:
        near = [name for name in siblings if name.startswith(leaf) or leaf.startswith(name)]
        return [siblings[name] for name in near[:3] or difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    if within := sorted(known for known in options if known.endswith(f".{option}")):  # its group is left out
        return within[:3]
    if near := difflib.get_close_matches(option, options, n=1, cutoff=0.8):
        return near
    groups = options | {known.rpartition(".")[0] for known in options}
    return [f"{near}.{leaf}" for near in difflib.get_close_matches(group, groups, n=1, cutoff=0.7) if group]


def _on_arguments(message: str) -> Iterator[str]:
    """Advise on an argument that a class has not."""
    for path, name in _CLASS.findall(message):
        if kind := _class_at(path):
            arguments = [each for each in inspect.signature(kind).parameters if each != "self"]
            near = difflib.get_close_matches(name.partition(".")[0], arguments, n=1)
            known = f"its arguments: {', '.join(arguments)}" if arguments else "it has no arguments"
            yield f"Did you mean `{near[0]}`?" if near else f"`{kind.__name__}` takes no `{name}`; {known}."


def _on_values(message: str) -> Iterator[str]:
    """Advise on a value that is neither of the type that an option wants nor a class."""
    refused = re.finditer(r"Expected a dot import path string: (\S+)$", message, re.MULTILINE)
    for value, place in {found[1]: found.start() for found in refused}.items():
        keys = re.findall(r'Parser key "([^"]+)"', message[:place])
        key = keys[-1] if len(keys) < 2 or keys[-1].startswith(keys[0]) else ".".join(keys)
        unions = re.findall(r"Subtypes: \[(.*)\]", message[:place])
        types = re.findall(r"<class '([\w.]+)'>", unions[-1]) if unions else []
        if {"float", "int"} & {*types}:
            yield f"`{key}` must be a number, got {value!r}."
        else:
            kind = next((known for path in types if (known := _class_at(path))), None)
            names_class = _NO_CLASS_NAME.fullmatch(value) is None
            yield advice_on_class(value, kind) if kind is None or names_class else advice_on_settings(key, kind)


def advice_on_settings(key: str, kind: type) -> str:
    """Say how option `key`, of class `kind`, is set."""
    if inspect.isabstract(kind):
        return f"`{key}` wants a class: {', '.join(_known_classes(kind))}."
    settings = [name for name in inspect.signature(kind).parameters if name != "self"]
    return (
        f"`{key}` holds the settings of {kind.__name__}: `--{key} '{{}}'` takes their defaults, and "
        f"`--{key}.{settings[0]}` sets one of {', '.join(settings)}."
    )


def advice_on_class(name: str, kind: type | None = None) -> str:
    """Return the known class closest to one that is none, or how a class of one's own is named.

    Args:
        name: That is no class.
        kind: Of which one is wanted, if known.
    """
    classes = _known_classes(kind)
    if near := difflib.get_close_matches(name, classes, n=1):
        return f"Did you mean `{near[0]}`?"
    known = f"none of {', '.join(classes)}" if kind and classes else "no class of this package"
    return f"`{name}` is {known}; name one of your own with its module, as in `my_module.{name}`."


def _known_classes(kind: type | None) -> list[str]:
    names = sorted({*tlt_lightning.__all__, *dir(objectives)})
    if kind is None:
        return names
    found = {name: getattr(tlt_lightning, name, None) or getattr(objectives, name, None) for name in names}
    return [
        name
        for name, each in found.items()
        if isinstance(each, type) and issubclass(each, kind) and not inspect.isabstract(each)
    ]


def _class_at(path: str) -> type | None:
    """Return the class of this package at a dotted path, None where there is none."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None) if module.startswith("tlt_lightning") else None
    return found if isinstance(found, type) else None
