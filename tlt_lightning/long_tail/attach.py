"""Attach the drafter that a run trains to the engine: before loading as its head, later by pushing weights."""

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
        self._given: Speculation | None = None  # the engine's own
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
        check_drafter(self.drafter, policy)
        given, longest = _checked_speculation(engine, self.drafter)
        if self.drafter.head is None:
            self.drafter.follow_selector(longest)
        self.drafter.configure_model()
        is_cold = self.drafter.head_path is None
        engine.speculation = replace(given, head=str(start), cold_head=is_cold)
        self.drafter.acceptance = replace(  # trained and judged as the engine drafts
            self.drafter.acceptance,
            samples_drafts=given.draft_sampling == "probabilistic",
            shares_noise=engine.speculation.couples_drafts(is_v2=internals.runs_v2()),
        )
        new = "A new draft head is trained along with the policy; until its first training it drafts nothing."
        old = f"The draft head {self.drafter.head_path!r} is trained along with the policy."
        rank_zero_info(new if is_cold else old)
        if self._start != start:
            self._start = self.drafter.export(start)
        self._engine, self._given, self.version = engine, given, 0

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


def _checked_speculation(engine: RolloutEngine, drafter: DrafterModule) -> tuple[Speculation, int]:
    """Return how the engine speculates, and its longest draft by a head; raise MisconfigurationException for none."""
    given: Speculation | None = engine.speculation
    by_batch = {} if given is None else arms_by_batch(given.selector, engine.max_num_seqs or 1)
    lengths = [arm.num_draft_tokens for arms in by_batch.values() for arm in arms if arm.is_learned]
    if given is None or not lengths:
        raise MisconfigurationException(
            f"`LongTailIdleCallback` trains the drafter 'learned', and `engine`, a {type(engine).__name__}, never asks "
            "for it; set `speculation` of a `VLLMEngine`, for example `selector: {class_path: CostModelSelector, "
            "init_args: {drafters: [learned, sibling]}}` with `siblings: true`."
        )
    if given.head not in (None, drafter.head_path):
        raise MisconfigurationException(
            f"`engine.speculation.head` is {given.head!r}, but the drafter that is trained starts from "
            f"{drafter.head_path or 'random weights'}; give the head as `drafter.head` alone, the engine gets it from "
            "there."
        )
    return given, max(lengths)


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
