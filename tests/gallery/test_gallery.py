"""What holds for every callback of the gallery."""

import importlib
import inspect
from pathlib import Path

import lightning as L
import pytest
import yaml
from jsonargparse import ArgumentParser

from tlt_lightning.hooks import RolloutCallback

GALLERY = Path(__file__).parents[2] / "callbacks"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "__init__")


def callback_class(name: str) -> type[RolloutCallback]:
    module = importlib.import_module(f"tlt_lightning.gallery.{name}")
    members = [member for _, member in inspect.getmembers(module, inspect.isclass)]
    (found,) = [m for m in members if issubclass(m, RolloutCallback) and m.__module__ == module.__name__]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_documented_yaml_makes_the_callback(name: str) -> None:
    example = yaml.safe_load(inspect.cleandoc(callback_class(name).__doc__ or "").split("Example:\n")[1])
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[L.Callback])
    made = parser.instantiate_classes(parser.parse_object({"callbacks": example["callbacks+"]}))
    assert type(made.callbacks[0]) is callback_class(name)


@pytest.mark.parametrize("name", NAMES)
def test_one_short_file_each_and_listed(name: str) -> None:
    assert len((GALLERY / f"{name}.py").read_text().splitlines()) <= 170
    assert f"`{name}.{callback_class(name).__name__}`" in (GALLERY / "README.md").read_text()
