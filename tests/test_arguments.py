"""Checks of arguments, at their bounds."""

from collections.abc import Callable
from math import inf, nan
from numbers import Integral
from typing import Any

import pytest

from tlt_lightning.arguments import (
    check_at_least,
    check_count,
    check_distinct,
    check_list,
    check_method,
    check_positive,
    check_share,
    check_type,
    check_within,
)
from tlt_lightning.callbacks.completions_writer import CompletionsWriter
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.callbacks.run_report import RunReport


@pytest.mark.parametrize(
    ("check", "accepted", "refused", "match"),
    [
        (lambda x: check_at_least("a", x, 1), [1, 2], [0, 0.99, nan], "`a` must be at least 1, got"),
        (lambda x: check_positive("a", x), [1e-9], [0, -1, nan], "`a` must be positive, got"),
        (lambda x: check_positive("a", x), [1e9], [inf], "`a` must be finite, got inf"),
        (lambda x: check_within("a", x, 0, 1), [0, 1], [-0.1, 1.1, nan], r"`a` must be in \[0, 1\], got"),
        (lambda x: check_share("a", x), [0, 0.99], [-0.1, 1, nan], r"`a` is a share in \[0, 1\), got"),
        (lambda x: check_distinct("a", x), [[1], [1, 2]], [[1, 1]], "`a` must not repeat a value, got"),
        (lambda x: check_distinct("a", x), [], [[]], "`a` is empty"),
    ],
)
def test_a_check_names_argument_value_and_rule(
    check: Callable[[Any], None], accepted: list[Any], refused: list[Any], match: str
) -> None:
    for value in accepted:
        check(value)
    for value in refused:
        with pytest.raises(ValueError, match=match):
            check(value)


@pytest.mark.parametrize("value", ["8", None, [8], True])
def test_what_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`a` must be a number of at least 1, got ") as raised:
        check_at_least("a", value, 1)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    "check", [lambda x: check_positive("a", x), lambda x: check_within("a", x, 0, 1), lambda x: check_share("a", x)]
)
def test_what_has_bounds_must_be_a_number(check: Callable[[Any], None]) -> None:
    for value in ("8", None, True):
        with pytest.raises(TypeError, match=f"`a` must be a number, got {value!r}"):
            check(value)


@pytest.mark.parametrize("value", [3, "learned", None])
def test_what_is_no_list_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`a` lists values, as in `\(") as raised:
        check_distinct("a", value)
    assert str(raised.value).endswith(f"`({value!r},)`, got {value!r}.")


@pytest.mark.parametrize("value", [3, None, "learned", {1}, [1, "2"], [True], (1, 2.0)])
def test_what_is_no_list_of_numbers_is_named(value: Any) -> None:
    check_list("a", (1, 2), Integral, "whole numbers")
    check_list("a", [], Integral, "whole numbers")
    with pytest.raises(TypeError, match="`a` must be a list of whole numbers, got ") as raised:
        check_list("a", value, Integral, "whole numbers")
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", [4.0, 8 / 2, nan, "8", None, True])
def test_what_is_no_whole_number_is_named(value: Any) -> None:
    check_count("a", 1)
    with pytest.raises(TypeError, match=r"`a` must be a whole number of at least 1, got ") as raised:
        check_count("a", value)
    assert repr(value) in str(raised.value)
    with pytest.raises(ValueError, match="`a` must be at least 2, got 1"):
        check_count("a", 1, 2)


@pytest.mark.parametrize("check", [lambda r: check_at_least("a", 0, 1, r), lambda r: check_positive("a", 0, r)])
def test_the_remedy_ends_the_message(check: Callable[[str], None]) -> None:
    with pytest.raises(ValueError, match=r"got 0\. Drop it\.$"):
        check("Drop it.")
    with pytest.raises(ValueError, match=r"got 0\.$"):
        check("")


def test_a_type_is_asked_of_objects_and_not_of_classes() -> None:
    check_type("a", 1, int, "Give 1.")
    with pytest.raises(TypeError, match=r"`a` must be a int, got a str\. Give 1\."):
        check_type("a", "1", int, "Give 1.")
    with pytest.raises(TypeError, match=r"`a` must be a int, got the class int itself\."):
        check_type("a", int, int, "Give 1.")


def test_a_builtin_that_tells_no_signature_is_taken_as_a_method() -> None:
    class Plugin:
        largest = staticmethod(max)

    def largest(self: Plugin, one: float, other: float) -> float: ...

    check_method(Plugin(), "largest", largest)


@pytest.mark.parametrize("kind", [CompletionsWriter, IterationCheckpoint, RunReport])
def test_a_folder_is_no_url(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"`dirpath` 'memory://run' is a URL.*`trainer\.default_root_dir`"):
        kind("memory://run")
