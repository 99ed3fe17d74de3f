"""Parse recipes and options with LightningCLI, for policies and for drafters."""

from __future__ import annotations

from jsonargparse import set_parsing_settings
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI


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

    return _run(RLModule, RolloutDataModule, args, run)


def run_drafter_cli(args: list[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Do the same for DrafterModule and DrafterDataModule: `args` follow `drafter` on the command line."""
    from tlt_lightning.drafter.data import DrafterDataModule
    from tlt_lightning.drafter.module import DrafterModule

    return _run(DrafterModule, DrafterDataModule, args, run)


def _run(
    module: type[LightningModule], data: type[LightningDataModule], args: list[str] | None, run: bool
) -> LightningCLI:
    # `${trainer.default_root_dir}` in a recipe means the value after all overlays, below whichever subcommand.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    return LightningCLI(
        module,
        data,
        args=args,
        parser_kwargs={"parser_mode": "omegaconf+"},
        run=run,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 1},
        save_config_kwargs={"overwrite": True},  # a resumed run writes into the same folder
    )
