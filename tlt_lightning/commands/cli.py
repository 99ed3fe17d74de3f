"""Parse recipes and options with LightningCLI, for policies and for drafters."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from typing import Any, NoReturn

import lightning as L
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import tlt_lightning
from tlt_lightning import objectives
from tlt_lightning.guard.checkpoint_io import check_readable


def run_cli(args: list[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse `args` and return the CLI with its trainer, module and data module.

    `args` are the process's by default. With `run` they begin with a subcommand of the Trainer, which is executed.
    """
    # Short class names in YAML (`class_path: GRPO`) resolve for imported subclasses.
    import tlt_lightning.engine
    import tlt_lightning.objectives
    import tlt_lightning.schedules
    import tlt_lightning.speculation  # noqa: F401
    from tlt_lightning.data.module import RolloutDataModule
    from tlt_lightning.module import RLModule

    return _run("python -m tlt_lightning", RLModule, RolloutDataModule, args, run)


def run_drafter_cli(args: list[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse `args`, which follow `drafter`, for DrafterModule and DrafterDataModule."""
    from tlt_lightning.drafter.data import DrafterDataModule
    from tlt_lightning.drafter.module import DrafterModule

    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # they are the command line's
    return _run("python -m tlt_lightning drafter", DrafterModule, DrafterDataModule, args, run)


def _run(
    prog: str, module: type[L.LightningModule], data: type[L.LightningDataModule], args: list[str] | None, run: bool
) -> LightningCLI:
    # `${trainer.default_root_dir}` in a recipe means the value after all overlays, below whichever subcommand.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    return _CLI(
        module,
        data,
        args=args,
        parser_class=_Parser,
        parser_kwargs={"parser_mode": "omegaconf+", "prog": prog, "allow_abbrev": False},
        run=run,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 1},
        save_config_kwargs={"overwrite": True},  # a resumed run writes into the same folder
    )


_REMEDIES = {
    r"Import path (\S+) does not correspond to a subclass of RewardTerm": "Name a reward as `{{function: {}}}`.",
    r'Parser key "data\.(?:train|val)":.*Given value: ([^\s{{]+)$': "Name a file or a hub data set as `{{path: {}}}`.",
}
"""By a pattern of the parser's errors: what to write instead, with what the user wrote."""


class _Parser(LightningArgumentParser):
    """Names an error and the way to help, without the usage of some 600 options; writes settings that can be moved."""

    @override
    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        # Run with another `--trainer.default_root_dir`, they must not write over the run that they came from.
        config, root = super().dump(namespace, *args, **kwargs), namespace.get("trainer.default_root_dir")
        return config if root is None else follow_root(config, str(root))

    _file: str | os.PathLike[str] = ""  # that is being parsed

    @override
    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        self._file = path
        return super().parse_path(path, *args, **kwargs)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = message.replace("Problems parsing config:", f"Problems parsing {str(self._file)!r}:")  # no YAML
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        for known in get_close_options(message, _options(self)):
            message += f"\n  Did you mean `{known}`?"
        for name in dict.fromkeys(re.findall(r"Expected a dot import path string: (\w+)$", message, re.MULTILINE)):
            message += f"\n  {advice_on_class(name)}"
        for pattern, remedy in _REMEDIES.items():
            if found := re.search(pattern, message, re.DOTALL):
                message += f"\n  {remedy.format(found[1])}"
        self.exit(2, f"error: {message}\nOptions are listed by: {parser.prog.replace(' [options]', '')} --help\n")


def get_close_options(message: str, options: set[str]) -> list[str]:
    """Return the known option closest to each unknown option in an error of the parser."""
    unknown = re.findall(r"does not accept option '([^']+)'", message)
    if rest := re.search(r"unrecognized arguments: (.*)", message, re.IGNORECASE):
        unknown += [word.removeprefix("--").partition("=")[0] for word in rest[1].split() if word.startswith("--")]
    found = (difflib.get_close_matches(option, options, n=1, cutoff=0.8) for option in unknown)
    return [f"--{option}" for match in found for option in match]


def advice_on_class(name: str) -> str:
    """Return the known class closest to one that is none, or how a class of one's own is named."""
    known = difflib.get_close_matches(name, [*tlt_lightning.__all__, *dir(objectives)], n=1)
    if known:
        return f"Did you mean `{known[0]}`?"
    return f"`{name}` is no class of this package; name one of your own with its module, as in `my_module.{name}`."


def _options(parser: LightningArgumentParser) -> set[str]:
    """Return the names of a parser's options and of its subcommands'."""
    options = set()
    for action in parser._actions:
        options |= {name.removeprefix("--") for name in action.option_strings if name.startswith("--")}
        for subparser in getattr(action, "_name_parser_map", None) or ():
            options |= _options(action._name_parser_map[subparser])  # type: ignore[attr-defined]
    return options


class _CLI(LightningCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands without `test`: `validate` measures held-out prompts."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "test"}

    @override
    def _parse_ckpt_path(self) -> None:
        # Lightning loads the whole file here, to take settings from it in place of those given.
        path = self.config.get(self.config.subcommand, {}).get("ckpt_path") if self.config.get("subcommand") else None
        if path in (None, "best", "last", "hpc"):
            return
        try:
            check_readable(path)
        except (OSError, ValueError) as error:
            self.parser.error(str(error))


def follow_root(config: str, root: str) -> str:
    """Write folders below `root` as `${trainer.default_root_dir}/...` in the YAML text `config`."""
    folder = rf"(?m)^([ -]*(?:dirpath|export_dir|save_dir): ['\"]?){re.escape(root)}(?=/|['\"]?$)"
    return re.sub(folder, lambda match: f"{match[1]}${{trainer.default_root_dir}}", config)
