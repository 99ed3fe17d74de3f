"""The command line: LightningCLI over RLModule and RolloutDataModule, and the export of a checkpoint."""

from __future__ import annotations

import logging
import os
import sys

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningCLI


def main() -> None:
    """Run the command line of the process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when a reward forks a subprocess
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tlt_lightning").setLevel(logging.INFO)
    if sys.argv[1:2] == ["export"]:
        from jsonargparse import auto_cli

        from tlt_lightning.export import export_policy

        auto_cli(export_policy, args=sys.argv[2:], as_positional=False)
        return
    run_cli()


def run_cli(args: list[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse `args`, those of the process by default, and return the CLI with its trainer, module and data module.

    With `run`, `args` begin with a subcommand of the Trainer, which is executed.
    """
    # Short class names in YAML (`class_path: GRPO`) resolve for imported subclasses.
    import tlt_lightning.engine
    import tlt_lightning.objectives
    import tlt_lightning.speculation  # noqa: F401
    from tlt_lightning.data.module import RolloutDataModule
    from tlt_lightning.module import RLModule

    # `${trainer.default_root_dir}` in a recipe means the value after all overlays, below whichever subcommand.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    return LightningCLI(
        RLModule,
        RolloutDataModule,
        args=args,
        parser_kwargs={"parser_mode": "omegaconf+"},
        run=run,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 1},
        save_config_kwargs={"overwrite": True},  # a resumed run writes into the same folder
    )
