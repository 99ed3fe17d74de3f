"""An engine that is to serve a drafter trained here: does it fit, and what it loads before there is anything better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.speculation import arms_by_batch

_SELECTOR = (
    "for example `selector: {class_path: CostModelSelector, init_args: {drafters: [learned, sibling]}}` with "
    "`siblings: true`"
)


def check_engine(engine: RolloutEngine, drafter: DrafterModule, policy: str) -> tuple[VLLMEngine, Speculation]:
    """The engine and its speculation; raises MisconfigurationException unless it can serve `drafter` for `policy`."""
    if not isinstance(engine, VLLMEngine):
        raise MisconfigurationException(
            f"`LongTailIdleCallback` trains a drafter that {type(engine).__name__} cannot use; roll out with "
            "`VLLMEngine` or remove the callback."
        )
    speculation = engine.speculation
    if speculation is None:
        raise MisconfigurationException(
            "`LongTailIdleCallback` trains a drafter, but `engine.speculation` is not set, so nobody would use it; "
            f"set it, {_SELECTOR}."
        )
    if drafter.target != policy:
        raise MisconfigurationException(
            f"`drafter.target` is {drafter.target!r}, but the policy is {policy!r}; in YAML write "
            "`target: ${model.policy}`."
        )
    if drafter.needs_vocabulary:
        raise MisconfigurationException(
            "`drafter.draft_vocab_size` of a new head needs to know which tokens are common before the run: warm the "
            "head up with a DrafterDataModule and give it as `drafter.head`, or leave `draft_vocab_size` out."
        )
    by_batch = arms_by_batch(speculation.selector, engine.max_num_seqs)
    if not any(arm.is_learned for arms in by_batch.values() for arm in arms):
        raise MisconfigurationException(
            "`LongTailIdleCallback` trains the drafter 'learned', but `engine.speculation.selector` never asks for it; "
            f"name it, {_SELECTOR}."
        )
    return engine, speculation


def serve(engine: VLLMEngine, speculation: Speculation, drafter: DrafterModule, path: Path) -> None:
    """Let the engine, not loaded yet, start with the head that `drafter` starts from, by way of the directory `path`.

    A head of random weights is cold: the engine knows its shape and drafts nothing with it before the first push.
    """
    if speculation.head not in (None, drafter.head_path, str(path)):
        raise MisconfigurationException(
            f"`engine.speculation.head` is {speculation.head!r}, but the drafter that is trained starts from "
            f"{drafter.head_path or 'random weights'}; give the head as `drafter.head` alone, the engine gets it from "
            "there."
        )
    drafter.configure_model()
    if not (path / "config.json").exists():
        drafter.export(path)
    engine.speculation = replace(speculation, head=str(path), cold_head=drafter.head_path is None)
