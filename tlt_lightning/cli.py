"""The command line: LightningCLI over RLModule and RolloutDataModule, and the export of a checkpoint."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on `args`, those of the process by default."""
    arguments = list(sys.argv[1:] if args is None else args)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when a reward forks a subprocess
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tlt_lightning").setLevel(logging.INFO)
    if arguments[:1] == ["export"]:
        from jsonargparse import auto_cli

        from tlt_lightning.export import export

        auto_cli(export, args=arguments[1:], as_positional=False)
        return
    run_cli(arguments)


def run_cli(args: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse `args` and, with `run`, execute the subcommand they name; return the CLI with its trainer and module."""
    # Short class names in YAML (`class_path: GRPO`) resolve for imported subclasses.
    import tlt_lightning.engine
    import tlt_lightning.objectives
    import tlt_lightning.speculation  # noqa: F401
    from tlt_lightning.data.module import RolloutDataModule
    from tlt_lightning.module import RLModule

    return LightningCLI(
        RLModule,
        RolloutDataModule,
        args=None if args is None else list(args),
        run=run,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 1},
        save_config_kwargs={"overwrite": True},  # a resumed run writes into the same folder
    )
