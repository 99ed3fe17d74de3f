"""What the command line sets where neither a recipe nor an option does."""

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tlt_lightning.commands.cli import run_cli
from tlt_lightning.objectives import GRPO


def test_a_run_without_a_recipe_has_settings_that_suit_iterations(policy_path: str, prompts_path: str) -> None:
    words = [f"--model.policy={policy_path}", f"--data.train={prompts_path}", "--data.engine=TransformersEngine"]
    words += ["--data.rewards=[tlt_lightning.rewards.exact_match]", "--model.objective.entropy_coef=0.25"]
    cli = run_cli([*words, "--trainer.accelerator=cpu", "--trainer.default_root_dir=first"], run=False)
    trainer = cli.trainer
    assert (trainer.max_epochs, trainer.gradient_clip_val, trainer.check_val_every_n_epoch) == (100, 1.0, 10)
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger, TensorBoardLogger]
    assert {logger.save_dir for logger in trainer.loggers} == {"first"}  # the root that was given after them
    assert isinstance(cli.model.objective, GRPO)
    assert cli.model.objective.entropy_coef == 0.25
