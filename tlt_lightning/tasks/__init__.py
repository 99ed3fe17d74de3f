"""Procedural tasks: prompts in any number, and the verifier that scores their answers."""

from tlt_lightning.tasks.reasoning_gym import ReasoningGym, verify

__all__ = ["ReasoningGym", "verify"]
