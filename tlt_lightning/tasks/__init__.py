"""Procedural tasks, and those of other libraries: prompts in any number, and what scores their answers."""

from tlt_lightning.tasks.reasoning_gym import ReasoningGym, verify
from tlt_lightning.tasks.verifiers import VerifiersRows

__all__ = ["ReasoningGym", "VerifiersRows", "verify"]
