"""Parse recipes and options with LightningCLI, for policies and for drafters."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import yaml
from jsonargparse import Namespace, _typehints, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from tlt_lightning.commands.advice import NotFound, did_you_mean, files_meant, import_object, nearest
from tlt_lightning.guard.checkpoint_io import check_readable
from tlt_lightning.replacing import replaced
from tlt_lightning.training.resume import iterations_of

yaml.SafeDumper.add_multi_representer(str, yaml.SafeDumper.represent_str)  # as `Timer`'s `interval`, an enum's member


def run_cli(args: list[str], *, run: bool = True) -> LightningCLI:
    """Parse `args` and return the CLI with its trainer, module and data module.

    With `run` they begin with a subcommand of the Trainer, which is executed.
    """
    # Short class names in YAML (`class_path: GRPO`) resolve for imported subclasses.
    import tlt_lightning.engine
    import tlt_lightning.objectives
    import tlt_lightning.schedules
    import tlt_lightning.speculation  # noqa: F401
    from tlt_lightning.data.module import RolloutDataModule
    from tlt_lightning.data.supervised import SupervisedDataModule  # noqa: F401 - named by recipes
    from tlt_lightning.module import RLModule

    return _run("python -m tlt_lightning", RLModule, RolloutDataModule, [*args], run, _CLI)


def run_drafter_cli(args: list[str], *, run: bool = True) -> LightningCLI:
    """Parse `args`, which follow `drafter`, for DrafterModule and DrafterDataModule."""
    from tlt_lightning.drafter.data import DrafterDataModule
    from tlt_lightning.drafter.module import DrafterModule

    return _run("python -m tlt_lightning drafter", DrafterModule, DrafterDataModule, [*args], run, _DrafterCLI)


def _run(
    prog: str,
    module: type[L.LightningModule],
    data: type[L.LightningDataModule],
    words: list[str],
    run: bool,
    cli: type[_CLI],
) -> LightningCLI:
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # they are the command line's
    module, data = named_class(words, "--model", module), named_class(words, "--data", data)
    is_named = any("class_path" in settings for settings in _settings_of(words, "data"))  # by a recipe
    # `${trainer.default_root_dir}` in a recipe means the value after all overlays, below whichever subcommand.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    known = cli.subcommands()
    # Each reads its options anew from all signatures: those of the one that is asked for suffice.
    asked = {name: skipped for name, skipped in known.items() if words[:1] == [name]} or known
    with replaced(cli, "subcommands", lambda *_: asked):
        return cli(
            module,
            L.LightningDataModule if is_named else data,
            subclass_mode_data=is_named,
            args=words,
            parser_class=_Parser,
            parser_kwargs={"parser_mode": "omegaconf+", "prog": prog, "allow_abbrev": False},
            run=run,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 1},
            save_config_kwargs={"overwrite": True},  # a resumed run writes into the same folder
        )


def named_class(words: list[str], option: str, base: type) -> type:
    """Return the class that `option` names, as in `--model my.MyRL`, and take both words out; else return `base`.

    A name without a module is one of this package's.
    """
    for place, word in enumerate(words):
        name, equals, path = word.partition("=")
        module, _, kind = (path or "".join(words[place + 1 : place + 2])).rpartition(".")
        if name == option and kind[:1].isupper():  # else it names a file of settings
            del words[place : place + (1 if equals else 2)]
            try:
                return import_object(f"{module or 'tlt_lightning'}.{kind}")
            except NotFound as error:
                sys.exit(f"error: `{option}`: {error}")
    return base


def _settings_of(words: Sequence[str], part: str) -> Iterator[Mapping[str, Any]]:
    """Yield what each readable file of settings on a command line says of `part`; the parser reports on the others."""
    for word, following in pairwise([*words, ""]):
        option, _, path = word.partition("=")
        if option in ("-c", "--config"):
            with suppress(OSError, yaml.YAMLError):
                whole = yaml.safe_load(Path(path or following).read_text())
                if isinstance(whole, dict) and isinstance(whole.get(part), dict):
                    yield whole[part]


class _Parser(LightningArgumentParser):
    """Names an error and the way to help, without the usage of some 600 options; writes settings that can be moved."""

    @override
    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        # Run with another `--trainer.default_root_dir`, they must not write over the run that they came from.
        config, root = super().dump(namespace, *args, **kwargs), namespace.get("trainer.default_root_dir")
        return config if root is None else follow_root(config, str(root))

    _file: str | os.PathLike[str] = ""  # that is being parsed
    _unknown: Sequence[str] = ()  # options, of a file, that nobody knows

    @override
    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        with replaced(self, "_file", path):
            return super().parse_path(path, *args, **kwargs)

    @override
    def validate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> None:
        try:
            super().validate(namespace, *args, **kwargs)
        except KeyError:
            known, prefix = _options(self), f"{namespace.get('subcommand')}."
            self._unknown = _unknown([key.removeprefix(prefix) for key, _ in namespace.items()], known)
            if self.exit_on_error or not self._unknown:
                raise
            hint = did_you_mean(self._unknown[0], known) or f" It takes {', '.join(sorted(known)) or 'none'}."
            raise NotFound(f"There is no `{self._unknown[0]}`.{hint}") from None

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        where, *_ = message.splitlines()
        lines = [f"error: {self._file and f'{str(self._file)!r}: '}{where}"]
        lines += [line for line in str(_first_cause(ex) or "").splitlines() if line not in where]
        options, words = _options(self), getattr(self, "args", [])
        given = [word.removeprefix("--").partition("=")[0].rstrip("+") for word in words if word.startswith("--")]
        close = [f"--{each}" for name in (*_unknown(given, options), *self._unknown) for each in nearest(name, options)]
        lines += [f"Did you mean `{each}`?" for each in (*close, *files_meant(words))]
        program = self.prog.replace(" [options]", "").removesuffix(" fit")
        self.exit(2, "\n  ".join(lines) + f"\nOptions are listed by: {program} fit --help\n")


def _unknown(names: Sequence[str], options: set[str]) -> list[str]:
    """Return the names of no option, nor of a part of one that has no options for its parts."""
    leaves = tuple(f"{each}." for each in options if not any(other.startswith(f"{each}.") for other in options))
    return [name for name in names if name not in options and not f"{name}.".startswith(leaves)]


def _first_cause(error: BaseException | None) -> BaseException | None:
    """Return what an error began with: the parser tells of a setting of several types all that each type has said."""
    while error is not None and (cause := error.__cause__ or (not error.__suppress_context__ and error.__context__)):
        error = cause
    return error


def _options(parser: LightningArgumentParser) -> set[str]:
    """Return the names of a parser's options and of its subcommands'."""
    options = set()
    for action in parser._actions:
        names = (name.removeprefix("--") for name in action.option_strings if name.startswith("--"))
        options |= {name for name in names if not name.endswith(("help", "+"))}
        for subparser in getattr(action, "_name_parser_map", None) or ():
            options |= _options(action._name_parser_map[subparser])  # type: ignore[attr-defined]
    return options


def settings_of_one_class() -> AbstractContextManager[None]:
    """Let a class take over what was set of one that it replaces, and not what that had by default.

    jsonargparse fills in defaults before it hears of the other class, and keeps all that this one takes, too: RLOO in
    the place of GRPO would be GRPO but for its name.
    """
    discard = _typehints.discard_init_args_on_class_path_change

    def discard_defaults(now_parser: Any, before: Any, now: Any) -> None:
        if isinstance(before, Namespace) and before.get("class_path") not in (None, now["class_path"]):
            _host(before, now, by_file=isinstance(now_parser, _typehints.ActionTypeHint))
        replaced = before.get("class_path") if isinstance(before, Namespace) and "init_args" in before else None
        if replaced is not None and replaced != now["class_path"]:
            defaults = _typehints.ActionTypeHint.get_class_parser(replaced, {}).get_defaults()
            for name, value in list(before.init_args.items(branches=True, nested=False)):
                if value == defaults.get(name):
                    before.init_args.pop(name)
        discard(now_parser, before, now)

    return replaced(_typehints, "discard_init_args_on_class_path_change", discard_defaults)


def _host(before: Namespace, now: Namespace, *, by_file: bool) -> None:
    """Let a `RayEngine` host the engine that it would replace, and one that a later file has in its place.

    An option that replaces it takes the engine out again.
    """
    from tlt_lightning.engine.ray.engine import RayEngine

    classes = [_typehints.import_object(each["class_path"]) for each in (before, now)]
    match [isinstance(each, type) and issubclass(each, RayEngine) for each in classes]:
        case [False, True]:
            before["init_args"], before["class_path"] = Namespace(engine=before.clone()), now["class_path"]
        case [True, False] if by_file:
            now["init_args"], now["class_path"] = Namespace(engine=now.clone()), before["class_path"]
        case [True, False] if hosted := before.get("init_args.engine"):
            before["init_args"], before["class_path"] = hosted.get("init_args", Namespace()), hosted["class_path"]


class _CLI(LightningCLI):
    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.default_config_files = [str(Path(__file__).with_name("defaults.yaml"))]

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        with settings_of_one_class(), replaced(_typehints, "import_object", import_object):
            super().parse_arguments(parser, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CLI:
        # A callback that averages weights copies the module, whose `optimizer` holds this, and with it the whole run.
        return self

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands without `test`: `validate` measures held-out prompts."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "test"}

    @override
    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            self.parser.error(f"`seed_everything` {error}")

    @override
    def _parse_ckpt_path(self) -> None:
        # Lightning loads the whole file here, to take settings from it in place of those given.
        command = self.config.get("subcommand")
        settings = self.config.get(command, {}) if command else {}
        if settings.get("ckpt_path") == "last":
            settings["ckpt_path"] = _latest_checkpoint(settings) or "last"
        path, last = settings.get("ckpt_path"), settings.get("trainer.max_epochs") or -1
        if path == "last" and command != "fit":
            self.parser.error("`ckpt_path` 'last' finds no checkpoint; leave it out to take what `model` names.")
        if path in (None, "best", "last", "hpc"):
            return
        try:
            check_readable(path)
        except (OSError, ValueError) as error:
            self.parser.error(str(error))
        if command == "fit" and -1 < last < (held := iterations_of(path) or 0):  # Lightning says so late
            self.parser.error(f"`ckpt_path` {str(path)!r} holds {held} epochs, more than `trainer.max_epochs`, {last}.")


def _latest_checkpoint(settings: Namespace | dict[str, Any]) -> str | None:
    """Return the latest checkpoint of the folders in which runs with these settings save; None without one.

    Lightning itself looks where the new run will save: not in an earlier `version_<n>`, nor where callbacks of the
    module save.
    """
    from tlt_lightning.callbacks.usual import folder_of_run

    root, callbacks = folder_of_run(settings.get("trainer.default_root_dir")), settings.get("trainer.callbacks") or []
    given = [each.get("init_args.dirpath") for each in (callbacks if isinstance(callbacks, list) else [callbacks])]
    folders = [root / "checkpoints", *root.glob("*/version_*/checkpoints"), *(Path(each) for each in given if each)]
    files = [file for folder in folders for file in folder.glob("*.ckpt") if file.exists()]
    # `last.ckpt` is as old as what it links to; a run that goes on from a file itself never removes that.
    return str(max(files, key=lambda file: (file.stat().st_mtime, file.name))) if files else None


class _DrafterCLI(_CLI):
    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add nothing: an epoch is no policy iteration."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands without `predict`: a head alone writes nothing."""
        return {name: skipped for name, skipped in _CLI.subcommands().items() if name != "predict"}


def follow_root(config: str, root: str) -> str:
    """Write folders below `root` as `${trainer.default_root_dir}/...` in the YAML text `config`."""
    folder = rf"(?m)^([ -]*(?:dirpath|export_dir|save_dir): ['\"]?){re.escape(root)}(?=/|['\"]?$)"
    return re.sub(folder, lambda match: f"{match[1]}${{trainer.default_root_dir}}", config)
