"""List the recipes that a wheel holds, and write a folder to start a run of one's own from."""

import argparse
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

RECIPES = Path(__file__).parents[1] / "recipes"
CALLBACKS = Path(__file__).parents[1] / "gallery"
ENVIRONMENTS = Path(__file__).parents[1] / "recipes/environments.py"

REWARD = Path(__file__).parents[1] / "recipes/assets/my_reward.py"
MINE = """\
# Yours. It is read last, so what it says counts; every option: python -m tlt_lightning fit --help
{policy}data:
{train}"""
REWARDS = """\
  rewards+:                            # added to the recipe's; `rewards:` would replace them
    - {function: my_reward.brevity, weight: 0.0}   # 0 only logs it
"""
ENVIRONMENT = """\
  environment:                         # in the place of the recipe's; it is a copy of that, yours to change
    class_path: my_environment.{name}
    init_args: {arguments}
"""
TEXTS = """\
  init_args:
    batch_size: {batch_size:<23}# texts of an optimizer step
"""
YOURS = ("mine.yaml", "my_reward.py", "my_environment.py")
OVERLAYS = (
    *("speculation.yaml", "adaptive_drafter.yaml", "block_drafter.yaml", "fp8.yaml"),
    *("tail_batching.yaml", "partial_rollout.yaml", "async.yaml", "ray.yaml", "distillation.yaml"),
)
"""Files of recipes that go on top of any other, to be named before `mine.yaml`."""
OVERLAYS_OF_TEXTS = ("sft_drafter.yaml",)
AFTER_TEXTS = (
    "Put `-c recipes/sft_drafter.yaml` before `-c mine.yaml` for a draft head that learns along.\n"
    "docs/sft.md says how the run that follows begins with policy and head.\n"
    "callbacks/ holds callbacks to use or to change; its README says how."
)
LATER = (
    "For faster rollouts put `-c recipes/speculation.yaml` before `-c mine.yaml`, and on a GPU between the two\n"
    "`-c recipes/adaptive_drafter.yaml` for a draft head that learns while the policy does.\n"
    "callbacks/ holds callbacks to use or to change; its README says how."
)


@dataclass(frozen=True)
class Recipe:
    """Describes a recipe by the comment at the head of its file: its purpose and its commands.

    Args:
        name: Name of the file, without `.yaml`.
        sentence: First sentence of the comment.
        commands: The comment's command lines. They name all files of the recipe, as paths below `recipes/`.
    """

    name: str
    sentence: str
    commands: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        """List the YAML files of all commands, each once, in their order."""
        return list(dict.fromkeys(re.findall(r"recipes/(\S+\.yaml)", " ".join(self.commands))))


def read_recipes() -> dict[str, Recipe]:
    """Read all recipes; a file whose comment has no command is a part of others."""
    recipes = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        comment = re.match(r"(#.*\n)*", path.read_text())[0]  # type: ignore[index]  # matches, if only nothing
        text = re.sub(r"\\\n# *", "", comment)  # a command may go on in the next line
        commands = tuple(re.findall(r"(?m)^# +(python .*?)(?:  .*)?$", text))
        sentence = re.match(r"(.*?\.)(\s|$)", " ".join(line.lstrip("# ") for line in text.splitlines()))
        if commands and sentence:
            recipes[path.stem] = Recipe(path.stem, sentence[1], commands)
    return recipes


def write_start(folder: Path, recipe: Recipe) -> tuple[str, ...]:
    """Write a recipe, what it reads, callbacks, `mine.yaml` and `my_reward.py`; return the commands that run it.

    Of a recipe with an environment `my_environment.py` has the class, which `mine.yaml` takes from there. Paths in the
    folder are as in the repository. A file `data/<task>_<split>.jsonl` that a recipe wants holds a few rows of the
    right format, to be replaced. Overlays that any run may take next lie beside the recipe.
    """
    texts = [(RECIPES / name).read_text() for name in recipe.files]
    mine, text = _mine(OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.create, texts)))), "".join(texts)
    has_rewards, assets = "my_reward" in mine, re.findall(r"recipes/(assets/[\w./-]+)", text)
    beside = (*recipe.files, *assets, *(OVERLAYS if has_rewards else OVERLAYS_OF_TEXTS))
    sources = {"callbacks": CALLBACKS, **{f"recipes/{name}": RECIPES / name for name in beside}}
    wanted = re.findall(r"(data/([a-z0-9]+)_\w+\.jsonl)", text)
    sources |= {file: RECIPES / f"assets/formats/{task}.jsonl" for file, task in wanted}
    sources |= {"my_reward.py": REWARD} if has_rewards else {}
    sources |= {"my_environment.py": ENVIRONMENTS} if "my_environment" in mine else {}
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    (folder / "mine.yaml").write_text(mine)
    takes = re.compile("python -m tlt_lightning (?:fit|validate|predict)")  # others take no prompts and rewards
    return tuple(f"{command} -c mine.yaml" if takes.match(command) else command for command in recipe.commands)


def _mine(settings: Any) -> str:
    """Return `mine.yaml` for a recipe of these settings."""
    data = settings.get("data") or {}
    has_rewards = "class_path" not in data  # of texts that are imitated
    sources = {part: data.get("init_args", data).get(part) or {} for part in ("train", "val")}
    lines = ["# train: {rows: null, path: my_prompts.jsonl, split: train}   # in the place of the recipe's"]
    if "path" in sources["train"]:
        shown = {part: {key: of[key] for key in ("path", "split") if key in of} for part, of in sources.items()}
        lines = [
            f"{part}: {_in_a_line(of)}   # a file like it, or a name on the hub" for part, of in shown.items() if of
        ]
    own = "".join(f"{' ' * (2 if has_rewards else 4)}{line}\n" for line in lines)
    given = data.get("environment") or {"class_path": ""}
    module, _, name = given["class_path"].rpartition(".")
    if module == "tlt_lightning.recipes.environments":
        own += ENVIRONMENT.format(name=name, arguments=json.dumps(given.get("init_args", {})))
    model = f"model: {{policy: {settings['model'].get('policy', '')}}}   # a folder, or a name on the hub\n"
    return MINE.format(policy=model, train=own + REWARDS if has_rewards else TEXTS.format(**data["init_args"]) + own)


def _in_a_line(settings: dict[str, object]) -> str:
    return yaml.safe_dump(settings, default_flow_style=True, sort_keys=False, width=1000).strip()


def run_recipes(args: list[str]) -> None:
    """Print the name and the purpose of each recipe; `args` may ask for help alone."""
    argparse.ArgumentParser("python -m tlt_lightning recipes", description="List the recipes.").parse_args(args)
    recipes = read_recipes()
    width = max(map(len, recipes))
    for recipe in recipes.values():
        print(f"{recipe.name:{width}}  {recipe.sentence}")
    print("\nStart from one: python -m tlt_lightning init my-run --recipe NAME")


def run_init(args: list[str]) -> None:
    """Write a folder as the command line's `args` say, and print the next commands."""
    parser = argparse.ArgumentParser("python -m tlt_lightning init", description="Write a folder to start a run from.")
    parser.add_argument("folder", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--recipe", default="quickstart", help="a name that `recipes` lists; quickstart by default")
    options = parser.parse_args(args)
    recipes, name = read_recipes(), Path(options.recipe).name.removesuffix(".yaml")
    if name not in recipes:
        parser.error(f"`--recipe` must be one of {', '.join(recipes)}; got {options.recipe!r}.")
    if options.folder.exists():
        parser.error(f"`folder` {str(options.folder)!r} exists already; name a new one.")
    commands = write_start(options.folder, recipes[name])
    yours = [name for name in YOURS if (options.folder / name).is_file()]
    print(f"{options.folder}/ holds the recipe, the files it reads, and yours: {' and '.join(yours)}. Next:\n")
    print(*(f"    {line}" for line in (f"cd {shlex.quote(str(options.folder))}", *commands)), sep="\n")
    if commands[-1].endswith(" mine.yaml") and not {*OVERLAYS, *OVERLAYS_OF_TEXTS} & {*recipes[name].files}:
        print(f"\n{LATER if 'my_reward.py' in yours else AFTER_TEXTS}")
