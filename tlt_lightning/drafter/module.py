"""The drafter as a LightningModule: trained by a Trainer offline, or by a callback while a policy learns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from typing_extensions import override

from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter import head as heads
from tlt_lightning.drafter.export import write_head
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.drafter.quality import DraftQuality, count_accepted, quality_of
from tlt_lightning.drafter.target import live_weights, read_target, read_weights
from tlt_lightning.drafter.teaching import EAGLE3, DraftStrategy
from tlt_lightning.drafter.training_time_test import regress, shifted, step_masks, unroll

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

_LOSSES = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
POLICY_ROWS = "lm_head.weight"
"""Travels to the engine with the trained weights where a head has rows of the policy's output head; never trained."""


class DrafterModule(L.LightningModule):
    """An EAGLE-3 head that drafts for a target policy, and learns to.

    Precision is the caller's: `bf16-mixed` on a GPU. The head's weights are float32; what it shares with the target
    is kept in the type of the target's checkpoint. Never make it a submodule of the policy's module.

    Args:
        target: Path or hub name of the policy it drafts for, of the Llama, Qwen2 or Qwen3 family.
        head: Path or hub name of an EAGLE-3 head to go on from; None starts from random weights.
        strategy: How drafting several tokens is taught: `EAGLE`, `HASS` or `EAGLE3`.
        loss: What is minimised between the target's and the head's distribution: `kl_div` (soft cross-entropy), `rkl`,
            `jsd`, `ce` (the target's likeliest token), `tv` (total variation: the rate of rejection), `nla` (negative
            log-acceptance) or `lk_hybrid` (KL that turns into TV); or several of them with their weights.
        optimizer: Builds the optimizer from the head's parameters.
        layer_ids: The three layers of the target that the head reads, ascending; None takes what the head was made
            with, or vLLM's choice for a new one.
        draft_vocab_size: Let a new head draft only so many of the target's tokens, the commonest in the training data;
            None drafts all. Less work per draft, but other tokens are never drafted.
        num_draft_tokens: Drafted tokens per engine step that quality is measured at and an exported head asks for.
        seed: Of the random weights.
        export_dir: Where `Trainer.fit` leaves the finished head for vLLM; None leaves only checkpoints.

    Example:
        >>> from tlt_lightning.drafter.module import DrafterModule
        >>> drafter = DrafterModule("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
        >>> drafter.layer_ids  # doctest: +SKIP
        (2, 12, 21)
    """

    def __init__(
        self,
        target: str,
        head: str | None = None,
        strategy: DraftStrategy = EAGLE3(),  # noqa: B008 - frozen
        loss: str | dict[str, float] = "kl_div",
        optimizer: OptimizerCallable = torch.optim.AdamW,
        layer_ids: tuple[int, int, int] | None = None,
        draft_vocab_size: int | None = None,
        num_draft_tokens: int = 3,
        seed: int = 0,
        export_dir: str | None = None,
    ) -> None:
        super().__init__()
        names = [loss] if isinstance(loss, str) else list(loss)
        if not names or set(names) - set(_LOSSES):
            raise ValueError(f"`loss` names {', '.join(names) or 'nothing'}; choose from {', '.join(_LOSSES)}.")
        self.target = target
        self.strategy = strategy
        self.loss_spec = loss if isinstance(loss, str) else json.dumps(loss)
        self.optimizer = optimizer
        self.seed = seed
        self.export_dir = export_dir
        self.target_config = read_target(target)
        self.head_path = None if head is None else heads.find_head(head)
        self._settings = heads.choose_settings(
            target, self.target_config, self.head_path, layer_ids, draft_vocab_size, num_draft_tokens
        )
        self.head: Eagle3DraftModel | None = None
        self.follows_target = True
        self.quality: DraftQuality | None = None
        self.strict_loading = False  # checkpoints hold what is trained; `on_load_checkpoint` checks that it is all
        self._counts: Tensor | None = None
        self._sums: list[Tensor] = []

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers of the target whose states the head reads: `i` is the input of decoder layer `i`."""
        return self._settings.layer_ids

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens per engine step that quality is measured at."""
        return self._settings.num_draft_tokens

    # Building

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Say how often each of the target's tokens was seen, (V,), before a head of `draft_vocab_size` is built."""
        self._counts = counts

    @property
    def needs_vocabulary(self) -> bool:
        """True while a new head of fewer tokens waits for `choose_vocabulary`."""
        is_reduced = self._settings.draft_vocab_size < self.target_config.vocab_size
        return self.head is None and self.head_path is None and is_reduced and self._counts is None

    @override
    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.needs_vocabulary and hasattr(data, "token_counts"):
            self.choose_vocabulary(data.token_counts())

    @override
    def configure_model(self) -> None:
        if self.head is not None:
            return
        if self.needs_vocabulary:
            raise RuntimeError(
                "`draft_vocab_size` needs to know which tokens are common: call `choose_vocabulary` first, or train "
                "with a DrafterDataModule."
            )
        with torch.device("cpu"):  # random numbers are those of the CPU wherever the head will live
            if self.head_path is not None:
                head = heads.load_head(self.head_path, self._settings)
            else:
                head = heads.build_head(self._settings, self.target_config, self.seed)
                if head.use_draft_vocab and self._counts is not None:
                    heads.choose_vocabulary(head, self._counts)
            self.follows_target = heads.attach_target(head, read_weights(self.target, self.target_config))
        self.head = head

    @property
    def _built(self) -> Eagle3DraftModel:
        if self.head is None:
            raise RuntimeError("The drafter is not built: call `configure_model` first.")
        return self.head

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([parameter for _, parameter in heads.trainable(self._built)])

    # Learning

    def loss(self, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a pack, and `drafter/` metrics as tensors on the device; nothing here waits for the device.

        Works without a Trainer.
        """
        head, strategy = self._built, self.strategy
        features, fused = unroll(head, batch, strategy.num_steps)
        masks = step_masks(batch, strategy.num_steps, head.t2d)
        positions = masks.sum(-1).clamp(min=1)
        decay = strategy.decay ** torch.arange(strategy.num_steps, device=masks.device)
        weights = masks * (decay / positions)[:, None]
        predictions, loss = chunked_loss.predict(head, features, batch.last_states[0], self._terms(batch), weights)
        metrics = {}
        if strategy.regression_weight:
            regression = regress(features, fused, batch.document_ids[0], masks, decay)
            metrics["drafter/regression"] = regression.detach()
            loss = loss + strategy.regression_weight * regression
        metrics["drafter/loss"] = loss.detach()
        agreement = (predictions.top1 & masks).sum(-1) / positions
        metrics |= {f"drafter/top1_pos_{k}": value for k, value in enumerate(agreement, start=1)}
        return loss, metrics

    def _terms(self, batch: PackedBatch) -> chunked_loss.LossTerms:
        from speculators.losses import resolve_loss_config

        return resolve_loss_config(self.loss_spec, "fused" if batch.states.is_cuda else "eager")

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        loss, metrics = self.loss(batch)
        self.log("drafter/loss", metrics.pop("drafter/loss"), prog_bar=True, batch_size=1, sync_dist=True)
        self.log_dict(metrics, batch_size=1, sync_dist=True)
        return loss

    # Measuring

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> Tensor:
        """What `quality_of` turns into a quality, (6, K): sums over a pack, which add up over packs and ranks."""
        head, num_steps = self._built, self.num_draft_tokens
        features, _ = unroll(head, batch, num_steps)
        masks = step_masks(batch, num_steps, head.t2d)
        weights = masks.float()
        predictions, _ = chunked_loss.predict(head, features, batch.last_states[0], self._terms(batch), weights)
        text = torch.stack([shifted(batch.next_ids[0], step) for step in range(num_steps)])
        walk = count_accepted(predictions.drafts == text, batch.document_ids[0], batch.loss_mask[0])
        sums = [predictions.top1 & masks, predictions.top3 & masks, predictions.losses * weights, masks]
        return torch.cat([walk, torch.stack([values.sum(-1).double().cpu() for values in sums])])

    def evaluate(self, batches: Sequence[PackedBatch]) -> DraftQuality:
        """How well the head drafts `num_draft_tokens` tokens on text that the target wrote.

        Acceptance is counted, not estimated from distributions: an engine that drafts greedily accepts a draft with
        the probability that the target writes that token, so on the target's own samples it accepts exactly the drafts
        that the text contains, at any temperature. The engine's steps are retraced over the text. Text of an older
        policy measures acceptance by that one.
        """
        if not batches:
            raise ValueError("`batches` is empty: there is nothing to measure the drafter on.")
        return quality_of(torch.stack([self.measure(batch) for batch in batches]).sum(0))

    @override
    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._sums.append(self.measure(batch))

    @override
    def on_validation_epoch_end(self) -> None:
        empty = torch.zeros(6, self.num_draft_tokens)  # a rank may have had no pack
        sums = torch.stack([empty, *self._sums]).sum(0).float().to(self.device)
        self._sums.clear()
        self.quality = quality_of(self.trainer.strategy.reduce(sums, reduce_op="sum"))
        metrics = self.quality.metrics("val/")
        self.log("val/acceptance_length", metrics.pop("val/acceptance_length"), prog_bar=True)
        self.log_dict(metrics)

    # What travels

    @property
    def has_policy_rows(self) -> bool:
        """True if it drafts with some rows of the policy's output head, of which the engine keeps a copy.

        That is so for a head of a reduced vocabulary without an output head of its own.
        """
        return bool(self._built.use_draft_vocab) and self.follows_target

    def trainable_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that an engine takes and a snapshot holds, live and detached.

        These are the trained ones and, if it `has_policy_rows`, those, which must follow the policy. The embedding and
        a whole output head are shared with the policy in the engine and never travel.
        """
        yield from ((name, parameter.detach()) for name, parameter in heads.trainable(self._built))
        if self.has_policy_rows:
            yield POLICY_ROWS, self._built.lm_head.weight.detach()

    @torch.no_grad()
    def load_trainable(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `trainable_tensors` yielded; raises ValueError and changes nothing if the names differ."""
        held = dict(self.trainable_tensors())
        if wrong := sorted(set(held) ^ set(tensors)):
            raise ValueError(f"`tensors` are not this drafter's trainable ones; they differ in {wrong}.")
        for name, tensor in held.items():
            tensor.copy_(tensors[name])

    def refresh_target(self, policy: nn.Module) -> None:
        """Copy embedding, final norm and output head of the live policy into the frozen parts, adapters merged.

        Without it the head would learn to draft for the policy as it was.
        """
        heads.refresh_target(self._built, live_weights(policy))

    def export(self, path: str | Path, quality: DraftQuality | None = None) -> Path:
        """Write a directory that vLLM serves as it is, with a README that says how well it drafts.

        Args:
            path: The directory; files of an earlier export are overwritten.
            quality: For the README, from `evaluate`.
        """
        tensors = dict(self.trainable_tensors())
        if not self.follows_target:
            tensors[POLICY_ROWS] = self._built.lm_head.weight.detach()
        return write_head(self._built, tensors.items(), path, quality)

    @override
    def on_fit_end(self) -> None:
        if self.export_dir is not None and self.trainer.is_global_zero:
            self.export(self.export_dir, self.quality)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = dict(self.trainable_tensors())
        checkpoint["d2t"] = self._built.d2t

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine, saved = self._built.d2t, checkpoint["d2t"]
        if (mine is None) != (saved is None) or (mine is not None and not torch.equal(mine.cpu(), saved.cpu())):
            raise ValueError("The checkpoint's head drafts other tokens than this one; resume with the same data.")
        self.load_trainable(checkpoint["state_dict"])
        checkpoint["state_dict"] = {}
