"""Train a head as a LightningModule, by a Trainer offline or by a callback beside a policy."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from typing_extensions import override

from tlt_lightning.arguments import CountOrZero, checked, text_of
from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter import head as heads
from tlt_lightning.drafter.architectures.base import DraftArchitecture, Drafting, Head
from tlt_lightning.drafter.architectures.eagle3 import Eagle3
from tlt_lightning.drafter.architectures.training_time_test import shifted, step_masks
from tlt_lightning.drafter.export import FILES, write_head
from tlt_lightning.drafter.muon import MuonWithAuxAdam
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.drafter.quality import AcceptanceRule, DraftQuality, expect_acceptance, quality_of
from tlt_lightning.drafter.target import frozen_dtype, live_weights, read_target, read_weights
from tlt_lightning.drafter.teaching import Teaching
from tlt_lightning.drafter.vocabulary import check_as_many, choose_vocabulary, draft_ids, with_ends
from tlt_lightning.guard.callback import lifecycle_callbacks
from tlt_lightning.guard.files import set_aside
from tlt_lightning.model_files import checksum_of_weights
from tlt_lightning.policy import end_token_ids, load_tokenizer
from tlt_lightning.ranks.reduce import sum_over_ranks
from tlt_lightning.training.described import describe
from tlt_lightning.training.lr_schedule import with_schedule
from tlt_lightning.training.optimization import ResumedOptimizer

log = logging.getLogger(__name__)

_FOLLOWING = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.0)  # of a head that drafts, and goes on
_NO_TEXTS = "`draft_vocab_size` {} needs texts to choose by: train with a DrafterDataModule, or set it to {}."
POLICY_ROWS = "lm_head.weight"
"""Name of a head's rows of the policy's output head, sent to the engine but never trained."""


class DrafterModule(L.LightningModule):
    """Trains and measures a head that drafts for a target policy.

    The caller sets the precision: `bf16-mixed` on a GPU. The head's weights are float32; the target's keep the type of
    its checkpoint, but on a CPU (`frozen_dtype`). Never make it a submodule of the policy's module.

    Args:
        target: Path or hub name of the policy to draft for, of the Llama, Qwen2 or Qwen3 family.
        head: Path or hub name of a head to go on from; None starts from random weights.
        teaching: Settings of how a head learns to draft several tokens.
        loss: Distance of the head's distribution from the target's: `kl_div` (soft cross-entropy), `rkl`, `jsd`, `ce`
            (the target's likeliest token), `tv` (total variation: the rate of rejection), `nla` (negative
            log-acceptance) or `lk_hybrid` (KL that turns into TV); or several of them with their weights.
        optimizer: Builds the optimizer from the head's parameters. None is `MuonWithAuxAdam` for a new head, AdamW at a
            learning rate of 1e-4 for one that drafts.
        lr_scheduler: Builds a scheduler from the optimizer, stepped once per optimizer step; of `Trainer.fit` alone.
        layer_ids: The three layers of the target that the head reads, ascending; None takes what the head was made
            with, or vLLM's choice for a new one.
        draft_vocab_size: Tokens of the target that a new head drafts: those that end texts, and the commonest in the
            training data, or in a policy's first iteration. None is 32,000 if the target has more than 64,000, else
            all. Fewer are less work per draft and training step, but other tokens are never drafted.
        num_draft_tokens: Draft length to train, measure, export. None is 3, or a block's, or beside a policy the
            selector's longest.
        seed: Seed of the random weights.
        export_dir: Directory in which `Trainer.fit` leaves the head, an earlier one in its `earlier_0`; None: no head.
        architecture: What a new head is: `Eagle3`, which is the default, or `DSpark`.

    Example:
        >>> from tlt_lightning.drafter.module import DrafterModule
        >>> drafter = DrafterModule("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
    """

    @checked()
    def __init__(
        self,
        target: str,
        head: str | None = None,
        teaching: Teaching = Teaching(),  # noqa: B008 - frozen
        loss: str | dict[str, float] = "kl_div",
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        layer_ids: tuple[int, int, int] | None = None,
        draft_vocab_size: int | None = None,
        num_draft_tokens: int | None = None,
        seed: CountOrZero = 0,
        export_dir: str | None = None,
        architecture: DraftArchitecture | None = None,
    ) -> None:
        super().__init__()
        heads.check_library()
        self.target = target = text_of("target", target, "Give a folder or hub name.")
        chunked_loss.check_names(loss)
        self.optimizer = optimizer if optimizer is not None else MuonWithAuxAdam if head is None else _FOLLOWING
        self.lr_scheduler = lr_scheduler
        self.teaching = teaching
        self.acceptance = AcceptanceRule()
        """Rule of the engine that quality is measured for; `LongTailIdleCallback` sets that of its engine."""
        self.loss_spec = loss if isinstance(loss, str) else json.dumps(loss)
        self.seed = seed
        self.export_dir = None if export_dir is None else text_of("export_dir", export_dir, "Give a folder.")
        self.most_steps: int | None = None
        """Draft length that is trained for the time being, at most `num_steps`; None is that."""
        self.target_config = read_target(target)
        self.head_path = None if head is None else heads.find_head(head)
        self.origin = (head or "random weights", None if head is None else checksum_of_weights(str(self.head_path)))
        """Tells what training begins from, by name and by a checksum of the weights."""
        if head is not None and architecture is not None:
            raise ValueError("`architecture` is for a new head: leave it out, for `head` says what it is.")
        self.architecture = heads.architecture_of(self.head_path) if self.head_path else architecture or Eagle3()
        self._settings = heads.choose_settings(
            self.architecture, target, self.target_config, self.head_path, layer_ids, draft_vocab_size, num_draft_tokens
        )
        self._follows_selector = num_draft_tokens is None
        self.head: Head | None = None
        self.follows_target = True
        self.quality: DraftQuality | None = None
        self.strict_loading = False  # checkpoints hold what is trained; `on_load_checkpoint` checks that it is all
        self._counts: Tensor | None = None
        self._sums: list[Tensor] = []
        self._resumed_optimizer = ResumedOptimizer()

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers of the target that the head reads: `i` is the input of decoder layer `i`."""
        return self._settings.layer_ids

    @property
    def num_draft_tokens(self) -> int:
        """Draft length that quality is measured at."""
        return self._settings.num_draft_tokens

    @property
    def num_steps(self) -> int:
        """Draft length that is trained."""
        num_steps = self.teaching.num_steps or self.num_draft_tokens
        return min(num_steps, self.architecture.most_drafts or num_steps)

    def follow_selector(self, longest: int) -> None:
        """Set the draft length to `longest`, or a block's, unless `num_draft_tokens` was given; before building."""
        if self._follows_selector:
            longest = min(longest, self.architecture.most_drafts or longest)
            self._settings = replace(self._settings, num_draft_tokens=longest)

    # Building

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Let a reduced head draft end tokens and the commonest of `counts` (V,); `refresh_target` follows if built."""
        self._counts = with_ends(counts, end_token_ids(self.target, load_tokenizer(self.target)))
        if self.head is not None:
            choose_vocabulary(self.head, self._counts)

    @property
    def needs_vocabulary(self) -> bool:
        """True while a new head of fewer tokens waits for `choose_vocabulary`; if built, it drafts the lowest ids."""
        is_reduced = self._settings.draft_vocab_size < self.target_config.vocab_size
        return self.head_path is None and is_reduced and self._counts is None

    @property
    def vocabulary(self) -> Tensor | None:
        """Mask of the target's tokens that the head drafts, (V,) on the CPU; None until they are chosen."""
        if self.needs_vocabulary:
            return None
        t2d = self._built.t2d
        return torch.ones(self.target_config.vocab_size, dtype=torch.bool) if t2d is None else t2d.cpu()

    def load_vocabulary(self, vocabulary: Tensor) -> None:
        """Draft the tokens of an earlier `vocabulary`; ValueError if they are not as many as the head's."""
        check_as_many(vocabulary, self._settings.draft_vocab_size)
        if self.vocabulary is None or not torch.equal(self.vocabulary, vocabulary):
            self._counts = vocabulary
            choose_vocabulary(self._built, vocabulary)
            heads.refresh_target(self._built, read_weights(self.target, self.target_config))

    def check_layers(self, layer_ids: Sequence[int]) -> None:
        """Raise ValueError if a checkpoint's head has learned from other layers than this one reads."""
        if (saved := list(layer_ids)) != (own := list(self.layer_ids)):
            raise ValueError(f"The checkpoint's head reads layers {saved}, this one {own}: set `drafter.layer_ids`.")

    @override
    def configure_callbacks(self) -> list[L.Callback]:
        return lifecycle_callbacks(self.trainer)

    @override
    def setup(self, stage: str) -> None:
        self._resumed_optimizer.forget()
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.needs_vocabulary:
            if not hasattr(data, "token_counts"):
                raise RuntimeError(_NO_TEXTS.format(self._settings.draft_vocab_size, self.target_config.vocab_size))
            self.choose_vocabulary(data.token_counts())

    @override
    def configure_model(self) -> None:
        if self.head is not None:
            return
        with torch.device("cpu"):  # random numbers are those of the CPU wherever the head will live
            if self.head_path is not None:
                head = heads.load_head(self.architecture, self.head_path, self._settings)
            else:
                head = heads.build_head(self.architecture, self._settings, self.target_config, self.seed)
                choose_vocabulary(head, self._counts)
            self.follows_target = heads.attach_target(head, read_weights(self.target, self.target_config))
        self.head = head
        if self._trainer is not None:
            self.compute_on(self.trainer.strategy.root_device, is_mixed=self.trainer.precision != "32-true")

    def compute_on(self, device: torch.device, *, is_mixed: bool) -> None:
        """Hold the target's weights in the type that products run in there."""
        if frozen_dtype(device, is_mixed=is_mixed) is torch.float32:
            self._built.float()

    @property
    def _built(self) -> Head:
        if self.head is None:
            raise RuntimeError("The drafter is not built: call `configure_model` first.")
        return self.head

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer([parameter for _, parameter in heads.trainable(self._built)])
        num_steps = None if self.lr_scheduler is None else self.trainer.estimated_stepping_batches
        return with_schedule(optimizer, self.lr_scheduler, num_steps)

    @override
    def on_fit_start(self) -> None:
        self._resumed_optimizer.note(self.trainer)

    @override
    def on_train_start(self) -> None:
        self._resumed_optimizer.apply(self.trainer)

    # Learning

    def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a pack, and `drafter/` metrics as tensors, without a device sync.

        No Trainer is needed. Metrics of agreement with the target take time, and are there with `compares` alone.
        """
        head, architecture = self._built, self.architecture
        most_steps = self.most_steps if architecture.learns_in_turn else None
        num_steps = min(self.num_steps, most_steps or self.num_steps)
        masks, rows = step_masks(batch, num_steps, head.t2d), architecture.sample(batch)
        if rows is not None:
            masks &= torch.zeros_like(masks[0]).index_fill(0, rows, 1)
        positions = masks.sum(-1).clamp(min=1)
        decay = (self.teaching.decay * architecture.decay) ** torch.arange(num_steps, device=masks.device)
        weights = masks * (decay / positions)[:, None]
        terms = chunked_loss.terms_of(self.loss_spec, batch.states)
        predictions, loss = architecture.predict(head, batch, Drafting(terms, weights, rows, compares=compares))
        metrics = {"drafter/loss": loss.detach()}
        if compares:
            agreement = (predictions.top1 & masks).sum(-1) / positions
            metrics |= {f"drafter/top1_pos_{k}": value for k, value in enumerate(agreement, start=1)}
        return loss, metrics

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        loss, metrics = self.loss(batch)
        self.log("drafter/loss", metrics.pop("drafter/loss"), prog_bar=True, batch_size=1, sync_dist=True)
        self.log_dict(metrics, batch_size=1, sync_dist=True)
        return loss

    # Measuring

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> Tensor:
        """Return each document's sums for `quality_of`: (documents, 6, K) on the CPU.

        The sums add up over documents, packs and ranks. Acceptance is expected over the text as the target wrote it;
        text of an older policy measures acceptance by that one.
        """
        head = self._built
        masks = step_masks(batch, self.num_draft_tokens, head.t2d)
        weights = masks.float()
        rates, matches = torch.zeros_like(weights), torch.zeros_like(weights)
        written = draft_ids(head, batch.next_ids[0])

        def judge(step: int, rows: Any, logits: Tensor, targets: Tensor) -> None:
            tokens = shifted(written, step)[rows]
            rates[step, rows], matches[step, rows] = self.acceptance.judge(logits, targets, tokens)

        terms = chunked_loss.terms_of(self.loss_spec, batch.states)
        predictions, _ = self.architecture.predict(head, batch, Drafting(terms, weights, judge=judge))
        steps = expect_acceptance(rates, matches, batch.lengths, batch.loss_mask[0])
        sums = torch.stack([predictions.top1 & masks, predictions.top3 & masks, predictions.losses * weights, masks])
        by_document = torch.zeros(len(batch.lengths), *sums.shape[:2], dtype=torch.float64)
        documents = batch.document_ids[0].clamp(min=0).cpu()  # nothing counts in padding
        by_document.index_add_(0, documents, sums.double().cpu().movedim(-1, 0))
        return torch.cat([steps, by_document], 1)

    @override
    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._sums.append(self.measure(batch).sum(0))

    @override
    def on_validation_epoch_end(self) -> None:
        empty = torch.zeros(6, self.num_draft_tokens)  # a rank may have had no pack
        sums = torch.stack([empty, *self._sums]).sum(0)
        self._sums.clear()
        self.quality = quality_of(sum_over_ranks(self.trainer, sums))
        metrics = self.quality.metrics("val/")
        self.log("val/acceptance_length", metrics.pop("val/acceptance_length"), prog_bar=True)
        self.log_dict(metrics)

    # What travels

    @property
    def has_policy_rows(self) -> bool:
        """True if a reduced head has no output head of its own: the engine copies rows of the policy's for it."""
        return bool(self._built.use_draft_vocab) and self.follows_target

    def trainable_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that an engine takes and a checkpoint holds, live and detached.

        These are the trained ones and any policy's rows (`has_policy_rows`), which must follow the policy. The engine
        shares the embedding and a whole output head with the policy: they never travel.
        """
        yield from ((name, parameter.detach()) for name, parameter in heads.trainable(self._built))
        if self.has_policy_rows:
            yield POLICY_ROWS, self._built.lm_head.weight.detach()

    @torch.no_grad()
    def load_trainable(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `trainable_tensors` yielded; raise ValueError, unchanged, if the names differ."""
        held = dict(self.trainable_tensors())
        if wrong := sorted(set(held) ^ set(tensors)):
            raise ValueError(f"`tensors` are not this drafter's trainable ones; they differ in {wrong}.")
        for name, tensor in held.items():
            tensor.copy_(tensors[name])

    def refresh_target(self, policy: nn.Module) -> None:
        """Copy the live policy, adapters merged, to the frozen embedding, norm and output head.

        Without it the head would learn to draft for the policy as it was.
        """
        heads.refresh_target(self._built, live_weights(policy))

    def export(self, path: str | Path, quality: DraftQuality | None = None) -> Path:
        """Write the head to the directory `path`, which vLLM serves as it is, with a README.

        Files of an earlier export are overwritten. The README states `quality`.
        """
        tensors = dict(self.trainable_tensors())
        if not self.follows_target:
            tensors[POLICY_ROWS] = self._built.lm_head.weight.detach()
        return write_head(self._built, tensors.items(), path, quality, self.acceptance)

    @override
    def on_fit_end(self) -> None:
        if self.export_dir is not None and self.trainer.is_global_zero:
            set_aside(folder := Path(self.export_dir), [folder / name for name in FILES], "the drafter")
            self.export(self.export_dir, self.quality)

    def begins_from(self, origin: tuple[str, int | None]) -> bool:
        """Return True if this is a run's origin, perhaps moved to another place since."""
        return any(mine == other for mine, other in zip(self.origin, origin, strict=True))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = dict(self.trainable_tensors())
        checkpoint["d2t"] = self._built.d2t
        checkpoint["layer_ids"], checkpoint["head"] = list(self.layer_ids), self.origin
        checkpoint["lr_scheduler"] = describe(self.lr_scheduler)
        self._resumed_optimizer.save(checkpoint, self.trainer)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_layers(checkpoint["layer_ids"])
        mine, saved = self._built.d2t, checkpoint["d2t"]
        if (mine is None) != (saved is None) or (mine is not None and not torch.equal(mine.cpu(), saved.cpu())):
            raise ValueError("The head of `ckpt_path` drafts other tokens than this one; resume with the same data.")
        if not self.begins_from(began := checkpoint.get("head", self.origin)):
            message = (
                "`ckpt_path` goes on from %s: `head`, now %s, is not used. To begin with it, leave `ckpt_path` out."
            )
            log.warning(message, began[0], self.origin[0])
        self.load_trainable(checkpoint["state_dict"])
        checkpoint["state_dict"] = {}
        if self.trainer.state.fn == "fit":
            is_another = checkpoint["lr_scheduler"] != describe(self.lr_scheduler)
            self._resumed_optimizer.load(checkpoint, self.lr_scheduler, is_another=is_another)
