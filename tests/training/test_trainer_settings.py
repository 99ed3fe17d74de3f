"""What a Trainer cannot have is refused by two tables, which make a page of the docs, with what is replaced in it.

`python -m tests.training.test_trainer_settings` writes the page.
"""

from pathlib import Path
from unittest.mock import Mock

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.guard.lightning_patches import PATCHES
from tlt_lightning.training.trainer_settings import RULES, UNFIT, Rule, check_settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "trainer.md"
TEXT = """# Settings of the Trainer

A run takes Lightning's `Trainer` as it is, but for these arguments and callbacks. Others are refused before anything
loads. Its strategy is `auto`, `ddp` or `fsdp2`. One epoch is one policy iteration, and `max_epochs` counts iterations.

"""
PATCHED = """## What is replaced inside Lightning

While a run lasts, and put back at its end (`guard/lightning_patches.py`). Two things stay, so that
`Trainer.save_checkpoint` behind a run writes what a run writes: `Strategy.checkpoint_io`, unless the Trainer has
a plugin for it, and `Strategy.save_checkpoint`.
"""
WRONG = {
    "max_steps": 5,
    "precision": "bf16-true",
    "limit_train_batches": 1,
    "accumulate_grad_batches": 3,
    "gradient_clip_val": float("nan"),
    "check_val_every_n_epoch": 0,
}


def page() -> str:
    rows = ["| argument | allowed | what another value does | instead |", "|---|---|---|---|"]
    rows += [f"| `{rule.argument}` | {rule.allowed} | {rule.why} | {rule.instead} |" for rule in RULES]
    rows += ["", "| callback | why a run cannot have it |", "|---|---|"]
    rows += [f"| `{kind.__name__}` | {reason} |" for kind, reason in UNFIT.items()]
    rows += ["", PATCHED, "| replaced | Lightning's own |", "|---|---|"]
    rows += [f"| `{patch.attribute}` | {patch.why} |" for patch in PATCHES]
    return TEXT + "\n".join(rows) + "\n"


def test_the_page_is_made_of_the_tables() -> None:
    assert DOCUMENT.read_text() == page(), "python -m tests.training.test_trainer_settings"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.argument)
def test_a_value_that_is_not_allowed_is_refused_and_the_default_is_not(rule: Rule) -> None:
    usual = L.Trainer(accelerator="cpu", logger=False, max_epochs=1)
    trainer = Mock(**{each.argument: getattr(usual, each.argument) for each in RULES}, callbacks=[])
    wrong = WRONG[rule.argument]
    check_settings(trainer)
    setattr(trainer, rule.argument, wrong)
    with pytest.raises(MisconfigurationException, match=rf"`Trainer\({rule.argument}={wrong!r}\)`"):
        check_settings(trainer)


if __name__ == "__main__":
    DOCUMENT.write_text(page())
