"""Attach the drafter that a run trains to the engine: before loading as its head, later by pushing weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.long_tail.publishing import DrafterPublisher
from tlt_lightning.speculation import arms_by_batch
from tlt_lightning.speculation.strategy import Strategy


class ServedHead:
    """Keeps track of the head that the engine drafts with.

    Args:
        drafter: Drafter whose head it is.
    """

    def __init__(self, drafter: DrafterModule) -> None:
        self.drafter = drafter
        self.version = 0
        """Publications that the engine has, 0 for the head that it was loaded with."""
        self._engine: RolloutEngine | None = None
        self._given: Speculation | None = None  # of the engine before
        self._start: Path | None = None

    @property
    def is_cold(self) -> bool:
        """True while the engine has a head of random weights, which drafts nothing."""
        return self.drafter.head_path is None and not self.version

    def attach(self, engine: RolloutEngine, policy: str, start: Path) -> None:
        """Set the drafter as the head that the engine loads, written to folder `start` at the first call.

        Raises:
            MisconfigurationException: It does not fit.
        """
        self.detach()
        speculation = check_engine(engine, self.drafter, policy)
        attach_to_engine(engine, speculation, self.drafter, start)
        if self._start != start:
            self._start = self.drafter.export(start)
        self._engine, self._given, self.version = engine, speculation, 0

    def detach(self) -> None:
        """Leave the engine with the speculation that it had, for other runs; safe to call twice."""
        if self._engine is not None:
            self._engine.speculation, self._engine = self._given, None

    def expected_speedup(self, quality: DraftQuality) -> float | None:
        """Return how many times as fast as plainly such a head makes decoding at best; None if nothing was timed."""
        assert self._given is not None, "used before `attach`"
        return self._given.selector.expected_speedup(quality.accepted)

    def push(self, publisher: DrafterPublisher) -> None:
        """Give the engine the published weights, with the tokens that they draft."""
        assert self._engine is not None, "used before `attach`"
        quality = publisher.quality if publisher.version > self.version else None
        accepted = None if quality is None else quality.accepted
        self.version = publisher.version
        d2t = None if self.drafter.head is None else self.drafter.head.d2t
        tokens = [] if d2t is None else [("d2t", d2t)]
        self._engine.update_drafter(chain(publisher.published(), tokens), self.version, accepted)


def check_engine(engine: RolloutEngine, drafter: DrafterModule, policy: str) -> Speculation:
    """Return how the engine speculates; MisconfigurationException if `drafter` does not fit."""
    speculation: Speculation | None = engine.speculation
    check_drafter(drafter, policy)
    if speculation is None or not _learned_arms(engine, speculation):
        raise MisconfigurationException(
            f"`LongTailIdleCallback` trains the drafter 'learned', and `engine`, a {type(engine).__name__}, never asks "
            "for it; set `speculation` of a `VLLMEngine`, for example `selector: {class_path: CostModelSelector, "
            "init_args: {drafters: [learned, sibling]}}` with `siblings: true`."
        )
    return speculation


def check_drafter(drafter: DrafterModule, policy: str) -> None:
    """Raise MisconfigurationException if `drafter` is for another policy, or has what a warm-up alone has."""
    if drafter.target != policy:
        raise MisconfigurationException(
            f"`drafter.target` is {drafter.target!r}, but the policy is {policy!r}; in YAML write "
            "`target: ${model.policy}`."
        )
    for name in ("lr_scheduler", "export_dir"):
        if getattr(drafter, name) is not None:
            raise MisconfigurationException(
                f"`drafter.{name}` is for `drafter fit`: leave it out. Beside a policy the learning rate rises and "
                "stays, and the head goes to `final` in the callback's `dirpath`."
            )


def attach_to_engine(engine: RolloutEngine, speculation: Speculation, drafter: DrafterModule, path: Path) -> None:
    """Build the drafter, and set it as `engine.speculation.head`, which will be at `path`.

    A head of random weights is cold: the engine knows its shape and drafts nothing with it before the first push. The
    drafter is trained and judged as the engine drafts.
    """
    if speculation.head not in (None, drafter.head_path):
        raise MisconfigurationException(
            f"`engine.speculation.head` is {speculation.head!r}, but the drafter that is trained starts from "
            f"{drafter.head_path or 'random weights'}; give the head as `drafter.head` alone, the engine gets it from "
            "there."
        )
    if drafter.head is None:
        drafter.follow_selector(max(arm.num_draft_tokens for arm in _learned_arms(engine, speculation)))
    drafter.configure_model()
    is_cold = drafter.head_path is None
    engine.speculation = speculation = replace(speculation, head=str(path), cold_head=is_cold)
    drafter.acceptance = replace(
        drafter.acceptance,
        samples_drafts=speculation.draft_sampling == "probabilistic",
        shares_noise=speculation.couples_drafts(is_v2=internals.runs_v2()),
    )
    new = "A new draft head is trained along with the policy; until its first training it drafts nothing."
    rank_zero_info(new if is_cold else f"The draft head {drafter.head_path!r} is trained along with the policy.")


def _learned_arms(engine: RolloutEngine, speculation: Speculation) -> list[Strategy]:
    by_batch = arms_by_batch(speculation.selector, engine.max_num_seqs or 1)
    return [arm for arms in by_batch.values() for arm in arms if arm.is_learned]
