"""Run the command line: `python -m tlt_lightning fit|validate|predict|drafter|export|recipes|init`."""

from __future__ import annotations

import logging
import os
import sys

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

Options of a command: `fit --help`; of a class: `fit --model.objective.help GRPO`.
"""


def main() -> None:
    """Run the command line of the process."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # rewards and callbacks of one's own, as with `python -m`
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when a reward forks a subprocess
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tlt_lightning").setLevel(logging.INFO)
    match sys.argv[1:]:
        case [] | ["-h" | "--help"]:
            print(HELP, end="")
        case ["export", *arguments]:
            from tlt_lightning.export import run_export

            run_export(arguments)
        case ["recipes"]:
            from tlt_lightning.starter import run_recipes

            run_recipes()
        case ["init", *arguments]:
            from tlt_lightning.starter import run_init

            run_init(arguments)
        case ["drafter", *arguments]:
            from tlt_lightning.cli import run_drafter_cli

            run_drafter_cli(arguments)
        case _:
            from tlt_lightning.cli import run_cli

            run_cli()


if __name__ == "__main__":
    main()
