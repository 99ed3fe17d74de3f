"""Arguments are checked by their annotations, at their bounds."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest

import tlt_lightning
from tlt_lightning.arguments import (
    Bound,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Probability,
    Share,
    check_argument,
    checked,
)
from tlt_lightning.callbacks.completions_writer import CompletionsWriter
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.callbacks.run_report import RunReport


@pytest.mark.parametrize(
    ("hint", "accepted", "refused", "rule"),
    [
        (Count, [1, 2], [0, -1], "at least 1"),
        (CountOrZero, [0, 2], [-1], "at least 0"),
        (Positive, [1e-9, 1e9, 1], [0, -1, nan, inf], "positive and finite"),
        (NotNegative, [0, 1e9], [-1e-9, nan, inf], "at least 0 and finite"),
        (Probability, [0, 1], [-0.1, 1.1, nan], "in [0, 1]"),
        (Share, [0, 0.99], [-0.1, 1, nan], "in [0, 1)"),
        (Annotated[float, Bound(0, 1, excludes=(0,))], [1], [0, 1.1], "in (0, 1]"),
    ],
)
def test_a_bound_names_argument_value_and_rule(hint: Any, accepted: list[Any], refused: list[Any], rule: str) -> None:
    for value in accepted:
        check_argument("a", value, hint)
    for value in refused:
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared
            check_argument("a", value, hint)
        assert str(raised.value) == f"`a` must be {rule}, got {value}."


@pytest.mark.parametrize(
    ("hint", "fits", "wrong", "rule"),
    [
        (Count, 1, ["8", None, True, 4.0, [8]], "a whole number"),
        (Positive, 1, ["8", None, True], "a number"),
        (bool, False, ["no", 0, None], "True or False"),
        (str, "x", [3, None], "a string"),
        (Count | None, None, ["8", 1.5], "a whole number or None"),
        (Sequence[int], (1, 2), [3, "learned", {1}, [1, "2"], [True], (1, 2.0)], "a list of whole numbers"),
        (tuple[str, ...], ["a"], ["a", [1]], "a list of strings"),
        (dict[str, int], {}, [3, []], "a dict"),
        (str | list[str], ["a"], [3, [1]], "a string or a list of strings"),
    ],
)
def test_a_kind_names_argument_value_and_rule(hint: Any, fits: Any, wrong: list[Any], rule: str) -> None:
    check_argument("a", fits, hint)
    for value in wrong:
        with pytest.raises(TypeError) as raised:
            check_argument("a", value, hint)
        assert str(raised.value) == f"`a` must be {rule}, got {value!r}."


class Engine: ...


@checked("engine.")
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    count: Annotated[Count, "Drop it."] = 1
    mode: Literal["x", "y"] | None = None
    engine: Engine | None = None
    path: str = "here"
    score: Callable[[str], float] | None = None
    later: "Undefined" = None  # type: ignore[name-defined]  # noqa: F821


def test_a_dataclass_is_checked_where_it_is_made_and_where_it_is_replaced() -> None:
    settings = Settings(count=3, mode="y", engine=Engine(), path=Path("there"), score=len, later=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^`engine\.count` must be at least 1, got 0\. Drop it\.$"):
        replace(settings, count=0)
    with pytest.raises(ValueError, match=r"^`engine\.mode` must be one of 'x', 'y' or None, got 'z'\.$"):
        Settings(mode="z")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "shown"), [(Engine, "the class Engine itself"), (Settings(), "a Settings"), (3, "3")]
)
def test_an_object_of_another_class_is_named_by_its_own(given: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"^`engine\.engine` must be an Engine or None, got {shown}\.$"):
        Settings(engine=given)


def test_what_is_missing_or_too_much_is_python_s_to_say() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        Settings(wrong=1)  # type: ignore[call-arg]


def bounds_of(kind: type) -> dict[str, Any]:
    hints = inspect.get_annotations(inspect.unwrap(kind.__init__))
    return {name: hint for name, hint in hints.items() if "Bound" in repr([type(n) for n in _notes(hint)])}


def _notes(hint: Any) -> list[Any]:
    options = [hint, *get_args(hint)]
    return [note for option in options for note in getattr(option, "__metadata__", ())]


@pytest.mark.parametrize("name", [name for name in tlt_lightning.__all__ if name != "__version__"])
def test_a_public_class_that_declares_bounds_checks_them(name: str) -> None:
    """A check that was forgotten would leave the bound a word in `--help`."""
    kind = getattr(tlt_lightning, name)
    if not inspect.isclass(kind) or not (bounds := bounds_of(kind)):
        return
    is_checked = hasattr(kind.__init__, "__wrapped__") or hasattr(kind, "__post_init__")
    is_checked |= f"checked_attributes(self, {name})" in inspect.getsource(kind)
    assert is_checked, f"{name} declares {list(bounds)}"


def test_no_module_that_checks_arguments_has_annotations_as_texts() -> None:
    sources = (path.read_text() for path in Path(tlt_lightning.__file__).parent.rglob("*.py"))
    checking = [
        source for source in sources if re.search(r"^ *@checked\(|checked_attributes\(self", source, re.MULTILINE)
    ]
    assert len(checking) > 20
    assert not [
        source for source in checking if re.search(r"^from __future__ import annotations", source, re.MULTILINE)
    ]


def test_annotations_are_texts_only_where_they_name_what_is_not_there() -> None:
    """Texts are looked up anew by who reads them: the parser looks in the module of a researcher's subclass."""
    sources = {path: path.read_text() for path in Path(tlt_lightning.__file__).parent.rglob("*.py")}
    texts = [path for path, source in sources.items() if "\nfrom __future__ import annotations\n" in source]
    assert texts
    assert not [path.name for path in texts if not _names_what_is_not_there(sources[path])]


def _names_what_is_not_there(source: str) -> bool:
    """Return True if an annotation names what only a type checker imports, or a class before its end."""
    nodes = [*ast.walk(ast.parse(source))]
    ends = {node.name: node.end_lineno or 0 for node in nodes if isinstance(node, ast.ClassDef)}
    hints = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    names = [each for hint in hints if hint for each in ast.walk(hint) if isinstance(each, ast.Name)]
    is_early = any(each.lineno <= ends.get(each.id, 0) for each in names)
    return is_early or "TYPE_CHECKING" in source or "array[int]" in source  # which Python 3.11 cannot index


@pytest.mark.parametrize("kind", [CompletionsWriter, IterationCheckpoint, RunReport])
def test_a_folder_is_no_url(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"`dirpath` 'memory://run' is a URL.*`trainer\.default_root_dir`"):
        kind("memory://run")
