"""Run the command line: `python -m tlt_lightning fit|validate|predict|drafter|export|recipes|init`."""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import tlt_lightning

HELP = """\
usage: python -m tlt_lightning COMMAND [options]

commands:
  fit        train a policy:     fit -c recipes/base.yaml -c recipes/quickstart.yaml
  validate   measure accuracy on held-out prompts, with `--ckpt_path` that of a checkpoint
  predict    write responses to the held-out prompts into a file
  drafter    train a draft head: drafter fit -c recipes/drafter_warmup.yaml
  export     write the policy of a checkpoint as a Hugging Face directory
  recipes    list the recipes that come with the package
  init       write a folder to start from: init my-run --recipe quickstart

Options of a command: `fit --help`; of a class: `fit --model.objective.help GRPO`. This version: `--version`.
Environment: TLT_TRACEBACK=1 shows where errors come from, VLLM_LOGGING_LEVEL=WARNING what vLLM warns of.
"""

COMMANDS = ("fit", "validate", "predict", "drafter", "export", "recipes", "init")

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EFBIG)
"""Errors of a place where nothing can be written or read."""


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
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_no_tip)
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
        case ["export", *arguments]:
            with uncollected():
                from tlt_lightning.commands.export import run_export

            run_export(arguments)
        case [command, *_] if command not in COMMANDS and not command.startswith("-"):
            near = "".join(f" Did you mean `{known}`?" for known in difflib.get_close_matches(command, COMMANDS, n=1))
            print(f"error: {command!r} is no command.{near}\n\n{HELP}", end="", file=sys.stderr)
            sys.exit(2)
        case ["recipes", *arguments]:
            from tlt_lightning.commands.starter import run_recipes

            run_recipes(arguments)
        case ["init", *arguments]:
            from tlt_lightning.commands.starter import run_init

            run_init(arguments)
        case ["drafter", *arguments]:
            with uncollected():
                from tlt_lightning.commands.cli import run_drafter_cli

            run_drafter_cli(arguments)
        case _:
            with uncollected():
                from tlt_lightning.commands.cli import run_cli

            run_cli()


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


def is_no_tip(record: logging.LogRecord) -> bool:
    """Return False for what Lightning's log recommends to buy or install."""
    return not record.getMessage().startswith("💡 Tip:")


def sentence_of(error: Exception) -> str | None:
    """Return the sentence of an error in what the user gave; None for what needs its traceback.

    Sentences of this package and of Lightning name their argument in backticks. jsonargparse wraps those of a
    constructor into a list, one a type that the argument may have, and puts what a package asks for, which is not
    installed, below its class.
    """
    if any(isinstance(each, OSError) and each.errno in _UNWRITABLE for each in (error, error.__cause__)):
        return str(error)
    is_about_settings = type(error).__name__ == "MisconfigurationException"
    is_users = is_about_settings or isinstance(error, ValueError | TypeError | OSError | ImportError)
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    room = frames[-1].partition(".")[0] if frames else ""
    if room == "omegaconf" and any(frame.startswith("jsonargparse") for frame in frames):  # a recipe's `${...}`
        reason, *_ = str(error).splitlines()
        return f"`{getattr(error, 'full_key', None)}` cannot be resolved: {reason}"
    is_users |= isinstance(error, RuntimeError) and room in ("tlt_lightning", "lightning")  # of rewards, metrics
    is_sentence = "`" in str(error) or (is_about_settings and room == "lightning")
    if not (is_users and is_sentence and room in ("tlt_lightning", "jsonargparse", "lightning")):
        return None
    lines = r"^\s*- (.*`.*|Problem with .*:\n +[^- ].*`.*)$"
    listed = re.findall(lines, str(error), re.MULTILINE) if room == "jsonargparse" else []
    return "\n".join(" ".join(each.split()) for each in listed) or str(error)


if __name__ == "__main__":
    main()
