"""Run the command line: `python -m tlt_lightning fit|validate|predict|drafter|export|recipes|init`."""

import atexit
import difflib
import errno
import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import tlt_lightning

HELP = Path(__file__).with_name("commands").joinpath("help.txt").read_text()

COMMANDS = {
    **dict.fromkeys(("fit", "validate", "predict"), ("cli", "run_cli")),
    "drafter": ("cli", "run_drafter_cli"),
    "export": ("export", "run_export"),
    "recipes": ("starter", "run_recipes"),
    "init": ("starter", "run_init"),
}
"""Names, by command, the module of `commands/` and the function in it that run it."""
MEANT = {"train": "fit", "test": "validate", "evaluate": "validate", "generate": "predict"}
"""Commands of other programs, and ours that do the same."""

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EFBIG)
"""Errors of a place where nothing can be written or read."""

_SPEAKERS = ("tlt_lightning", "lightning", "jsonargparse", "omegaconf")
"""Packages whose errors are sentences for the user."""


def main() -> None:
    """Run the command line of the process."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # rewards and callbacks of one's own, as with `python -m`
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when a reward forks a subprocess
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tlt_lightning").setLevel(logging.INFO)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # it warns before it reads that itself
    for importing in ("torchao", "torch.utils._pytree"):  # of kernels and classes that no run here takes up
        logging.getLogger(importing).setLevel(logging.ERROR)
    for speaking in ("lightning", "huggingface_hub"):  # by handlers of their own
        logging.getLogger(speaking).propagate = False
    # Lightning recommends what to buy or install.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda each: "💡 Tip:" not in str(each.msg))
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:  # in loading, or the second one
        if os.environ.get("TLT_TRACEBACK"):
            raise
        print("error: interrupted by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sentence = None if os.environ.get("TLT_TRACEBACK") else sentence_of(error)
        if sentence is None:
            raise
        print(f"error: {sentence}\nTLT_TRACEBACK=1 in the environment shows where this comes from.", file=sys.stderr)
        sys.exit(2)


def _run(arguments: list[str]) -> None:
    match arguments:
        case [] | ["-h" | "--help"]:
            print(HELP, end="")
        case ["--version"]:
            print(f"tlt-lightning {tlt_lightning.__version__}")
        case [command, *_] if command not in COMMANDS and not command.startswith("-"):
            near = difflib.get_close_matches(command, [*COMMANDS, *MEANT], n=1)
            hint = "".join(f" Did you mean `{MEANT.get(name, name)}`?" for name in near)
            print(f"error: There is no command `{command}`.{hint}\n\n{HELP}", end="", file=sys.stderr)
            sys.exit(2)
        case [command, *rest]:
            module, function = COMMANDS.get(command, COMMANDS["fit"])
            with uncollected():
                run = getattr(import_module(f"tlt_lightning.commands.{module}"), function)
            run(arguments if function == "run_cli" else rest)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while modules are imported, nor look at what they hold until the process ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else extensions say what they take for leaks
        gc.enable()


def sentence_of(error: Exception) -> str | None:
    """Return the sentence of an error in what the user gave; None for what needs its traceback.

    Sentences of this package, of Lightning and of the parser name their argument in backticks.
    """
    if any(isinstance(each, OSError) and each.errno in _UNWRITABLE for each in (error, error.__cause__)):
        return str(error)
    said = _said(error)
    room = _room_of(said)
    if room == "omegaconf":  # a recipe's `${...}`
        return f"`{getattr(said, 'full_key', None)}` cannot be resolved: {str(said).splitlines()[0]}"
    is_setting = type(said).__name__ == "MisconfigurationException"
    is_users = is_setting or isinstance(said, ValueError | TypeError | OSError | ImportError | RuntimeError)
    is_sentence = "`" in str(said) or room == "jsonargparse" or (is_setting and room == "lightning")
    return str(said) if is_users and is_sentence and room in _SPEAKERS else None


def _said(error: BaseException) -> BaseException:
    """Return what a constructor has said, where the parser lists it in an error of its own."""
    cause = error.__cause__ or error.__context__
    if _room_of(error) != "jsonargparse" or cause is None:
        return error
    said = _said(cause)
    return said if _room_of(said) in _SPEAKERS else error


def _room_of(error: BaseException) -> str:
    """Return the name of the package that raised an error."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].partition(".")[0] if frames else ""


if __name__ == "__main__":
    main()
