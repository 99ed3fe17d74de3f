"""RLModule: the policy, and how a scored batch of rollouts becomes a loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from math import isfinite
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from tlt_lightning.arguments import check_type
from tlt_lightning.checks import check_trainer
from tlt_lightning.critic import Critic, CriticConfig
from tlt_lightning.data.batch import Rollout, RolloutBatch
from tlt_lightning.data.collate import cut_micro_batches
from tlt_lightning.engine.base import NamedTensors
from tlt_lightning.engine.probe import warn_of_mismatch
from tlt_lightning.hidden_states import BatchTap, HiddenStateRequest
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics import IterationLog, PassAtK
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.policy import LoRA, causal_lm, load_policy, response_logps, stream_weights


class RLModule(L.LightningModule):
    """A policy that learns by reinforcement from the rollouts a `RolloutDataModule` yields.

    Automatic optimization: gradient clipping, accumulation, precision and schedulers are the Trainer's.

    Args:
        policy: Path or hub name of a Hugging Face causal language model.
        objective: What is maximised, for example `tlt_lightning.objectives.GRPO`.
        optimizer: Builds the optimizer from parameter groups.
        lr_scheduler: Builds a scheduler from the optimizer; stepped once per optimizer step.
        lora: Train LoRA adapters; None trains all weights.
        reference: Frozen model for objectives with a KL penalty; None takes the policy as it was at the start (with
            LoRA: the same weights, adapters off, at no cost in memory).
        critic: How values are predicted, for objectives that need them (PPO).
        gradient_checkpointing: Recompute activations in the backward pass; slower by about a quarter, saves most
            activation memory.
        attn_implementation: Attention of Hugging Face: `sdpa`, `eager` or `flash_attention_2`.

    Example:
        >>> from tlt_lightning import RLModule
        >>> from tlt_lightning.objectives import GRPO
        >>> module = RLModule("Qwen/Qwen2.5-0.5B-Instruct", GRPO())  # loads in `Trainer.fit`, not here
    """

    def __init__(
        self,
        policy: str,
        objective: PolicyObjective,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        lora: LoRA | None = None,
        reference: str | None = None,
        critic: CriticConfig | None = None,
        gradient_checkpointing: bool = False,
        attn_implementation: str = "sdpa",
    ) -> None:
        super().__init__()
        check_type("policy", policy, str, "Save a model with `save_pretrained` and give its folder.")
        check_type("objective", objective, PolicyObjective, "Give for example `GRPO()`.")
        if not callable(optimizer):
            raise TypeError(
                f"`optimizer` must build one from parameters, as `torch.optim.AdamW` and `lambda parameters: AdamW("
                f"parameters, lr=1e-6)` do, got a {type(optimizer).__name__} that is built already."
            )
        if objective.needs_critic and critic is None:
            raise ValueError(
                f"`objective` {type(objective).__name__} needs values: set `critic`, for example `critic: {{}}` for a "
                "value head on the policy's trunk."
            )
        self.policy_path = policy
        self.objective = objective
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.lora = lora
        self.reference_path = reference
        self.critic_config = critic
        self.gradient_checkpointing = gradient_checkpointing
        self.attn_implementation = attn_implementation
        self.policy: nn.Module | None = None
        self.critic: Critic | None = None
        self.hidden_state_request: HiddenStateRequest | None = None  # a callback's, for `on_hidden_states`
        self._tap: BatchTap | None = None  # over the policy's passes of an iteration whose states somebody asked for
        self._reference: list[nn.Module] = []  # a list hides it from checkpoints, optimizers and DDP
        self._skip_updates = False
        self._micro_batches: list[dict[str, Tensor]] = []  # metrics since the last optimizer step
        self._metrics: dict[str, float] = {}  # of the iteration that has ended
        self._validated: dict[str, float] = {}  # in this iteration
        self.iteration_log = IterationLog()
        """Takes what anybody, a callback above all, wants logged of the iteration."""
        self.val_accuracy = PassAtK()
        # A LoRA checkpoint holds what is trained; `on_load_checkpoint` checks that all of it is there.
        self.strict_loading = lora is None

    @override
    def setup(self, stage: str) -> None:
        check_trainer(self.trainer)
        if not any(isinstance(callback, _CloseIteration) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            self.trainer.callbacks.insert(0, _CloseIteration())  # type: ignore[attr-defined]
        if stage == "fit" and self.trainer.datamodule is None:  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "`RLModule` learns from what a `RolloutDataModule` rolls out, and was given none: call "
                "`trainer.fit(module, data)`."
            )

    @override
    def configure_model(self) -> None:
        if self.policy is not None:
            return
        policy = load_policy(self.policy_path, lora=self.lora, attn_implementation=self.attn_implementation)
        if self.gradient_checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if self.lora is not None:
                policy.enable_input_require_grads()
        self.policy = policy
        if self.objective.needs_critic and self.critic_config is not None:
            self.critic = Critic(self.critic_config, causal_lm(policy).config.hidden_size)
        if self.objective.needs_reference and (self.lora is None or self.reference_path is not None):
            path = self.reference_path or self.policy_path
            reference = load_policy(path, attn_implementation=self.attn_implementation)
            self._reference = [reference.eval().requires_grad_(False)]

    @override
    def configure_optimizers(self) -> Any:
        assert self.policy is not None
        policy_parameters = [p for p in self.policy.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": policy_parameters}]
        if self.critic is not None and self.critic_config is not None:
            critic_parameters = [p for p in self.critic.parameters() if p.requires_grad]
            groups.append({"params": critic_parameters, "lr": self.critic_config.lr})
        optimizer = self.optimizer(groups)
        if self.lr_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.lr_scheduler(optimizer), "interval": "step"}]

    def policy_weights(self) -> NamedTensors:
        """Stream the policy's weights for an engine, adapters merged, under their Hugging Face names."""
        assert self.policy is not None, "`policy_weights` before `configure_model`"
        return stream_weights(self.policy)

    # Scoring: what must be known before the first update of an iteration

    @torch.no_grad()
    def score(self, batch: RolloutBatch, micro_batch_size: int, *, single_update: bool = False) -> RolloutBatch:
        """Fill in old log-probs, reference log-probs and values of a rank's whole batch, the largest pass first.

        Args:
            batch: On the CPU; the result stays there.
            micro_batch_size: Sequences per forward pass, on average; cut as the update's are.
            single_update: The iteration takes one optimizer step, whose own log-probs then are the old ones: the
                policy's pass is left out unless a critic or the advantages need it, and `old_logps` stays None.
        """
        scores_policy = not single_update or self.critic is not None or self.objective.needs_old_logps
        names = ["old_logps"] if scores_policy else []
        names += ["ref_logps"] if self.objective.needs_reference else []
        names += ["values"] if self.critic is not None else []
        scores = {name: torch.zeros_like(batch.rollout_logps) for name in names}
        assert self.policy is not None
        request = self.hidden_state_request
        self._tap = None if request is None else BatchTap(self.policy, request, batch, self.trainer.global_step)
        for rows in cut_micro_batches(torch.arange(len(batch) if names else 0), batch.lengths, micro_batch_size):
            part = move_data_to_device(batch.select(rows), self.device)
            with self.trainer.precision_plugin.forward_context():
                results = self._score_micro_batch(part, scores_policy=scores_policy)
            for name, result in results.items():
                scores[name][rows, : result.shape[1]] = result.float().cpu()
        return replace(batch, **scores)  # type: ignore[arg-type]

    def _score_micro_batch(self, part: RolloutBatch, *, scores_policy: bool) -> dict[str, Tensor]:
        results = {}
        if scores_policy:
            results["old_logps"], _, values = self._forward(part)
            if values is not None:
                results["values"] = values
        if self.objective.needs_reference:
            results["ref_logps"] = self._reference_logps(part)
        return results

    def _reference_logps(self, part: RolloutBatch) -> Tensor:
        assert self.policy is not None
        model = self._reference[0].to(self.device) if self._reference else self.policy
        with nullcontext() if self._reference else model.disable_adapter():  # type: ignore[operator]
            return response_logps(model, part)[0]

    def _forward(self, batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute log-probs, entropies and values of the response tokens, (B, T) each."""
        assert self.policy is not None
        # Not around the reference's pass, which may be one of the same network.
        with nullcontext() if self._tap is None else self._tap.over(batch.rows):
            logps, entropy, states, index = response_logps(self.policy, batch)
        if not self.objective.needs_entropy_grad:
            entropy = entropy.detach()
        values = None
        if self.critic is not None:
            values = self.critic(batch, states, index)
        return logps, entropy, values

    # Training

    @override
    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        logps, entropy, values = self._forward(batch)
        if batch.old_logps is None:  # the iteration's only update starts from the policy that wrote the batch
            batch = replace(batch, old_logps=logps.detach())
        output = self.objective.loss(batch, logps, entropy, values)
        self._micro_batches.append({"train/loss": output.loss.detach(), **output.metrics})
        return output.loss

    @override
    def on_train_batch_end(self, outputs: Any, batch: RolloutBatch, batch_idx: int) -> None:
        if self._tap is None or not self.trainer.is_last_batch:
            return
        texts, self._tap = self._tap.texts, None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer's step is the update's, not a callback's
        self._lap("update")
        call_rollout_hook(self.trainer, "on_hidden_states", texts)

    def _check_kl(self, metrics: dict[str, Tensor]) -> None:
        """Stop updating for the rest of the iteration once the policy has moved by `objective.stop_at_kl`."""
        if self.objective.stop_at_kl is None:
            return
        if self.trainer.strategy.reduce(metrics["train/approx_kl"], reduce_op="mean") > self.objective.stop_at_kl:
            self._skip_updates = True

    @property
    def _critic_warming_up(self) -> bool:
        config = self.critic_config
        return self.critic is not None and config is not None and self.current_epoch < config.warmup_iterations

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.policy is not None
        parts, self._micro_batches = self._micro_batches, []
        zero = torch.zeros(())
        metrics = {
            name: sum((part.get(name, zero) for part in parts), zero) / len(parts) for name in set().union(*parts)
        }
        self.iteration_log.update(metrics)
        self._check_kl(metrics)
        if self._skip_updates:
            for parameter in self.parameters():
                parameter.grad = None  # an optimizer leaves such parameters alone: no decay, no momentum
            return
        if self._critic_warming_up:
            for parameter in self.policy.parameters():
                parameter.grad = None
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        if gradients:
            self.iteration_log.mean("train/grad_norm", torch.nn.utils.get_total_norm(gradients))

    @override
    def on_train_start(self) -> None:
        self.iteration_log.clear()  # loading belongs to no iteration, nor does what an interrupted run left

    @override
    def on_train_epoch_start(self) -> None:
        self._skip_updates = False
        self._micro_batches.clear()
        self._validated = {}

    def close_iteration(self) -> None:
        """Close the iteration's log and give its metrics to the loggers and to `trainer.callback_metrics`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.iteration_log.lap("update")
        self._metrics = self.iteration_log.close(self.trainer)
        self._check_finite(self._metrics)
        warn_of_mismatch(self._metrics.get("mismatch/kl", 0.0), self.current_epoch + 1)
        self._log(self._metrics)

    @override
    def on_train_epoch_end(self) -> None:
        metrics = {**self._metrics, **self._validated}
        call_rollout_hook(self.trainer, "on_iteration_end", self.current_epoch + 1, metrics)
        self.iteration_log.open()

    def _log(self, metrics: Mapping[str, float]) -> None:
        """Log over the iterations, not over micro-batches as Lightning would, and before a checkpoint is written."""
        self.log_dict(dict(metrics), logger=False)
        for logger in self.trainer.loggers:
            logger.log_metrics(dict(metrics), step=self.current_epoch)
            logger.save()

    def _check_finite(self, metrics: dict[str, float]) -> None:
        """Raise RuntimeError if the update has broken the policy, before a checkpoint holds it."""
        for name in ("train/loss", "train/grad_norm"):
            if not isfinite(metrics.get(name, 0.0)):
                raise RuntimeError(
                    f"`{name}` is {metrics[name]} in iteration {self.current_epoch + 1}: the update has broken the "
                    "policy. Resume from the last checkpoint, which is older, with a lower learning rate, or clip "
                    "gradients (`trainer.gradient_clip_val`)."
                )

    # Evaluation

    @override
    def validation_step(self, batch: list[Rollout], batch_idx: int) -> None:
        self.val_accuracy.update([(rollout.group, rollout.is_correct) for rollout in batch])

    @override
    def on_validation_start(self) -> None:
        self._lap("update")

    @override
    def on_validation_end(self) -> None:
        self._lap("validate")

    def _lap(self, stage: str) -> None:
        if self._is_fitting:
            self.iteration_log.lap(stage)

    @property
    def _is_fitting(self) -> bool:
        """True in an iteration of `fit`, its validation included."""
        return self.trainer.state.fn == "fit" and not self.trainer.sanity_checking

    @override
    def on_validation_epoch_end(self) -> None:
        accuracy = {f"val/{name}": float(value) for name, value in self.val_accuracy.compute().items()}
        self.val_accuracy.reset()
        if self._is_fitting:
            self._validated = accuracy
            self._log(accuracy)
        else:
            self.log_dict(accuracy)

    @override
    def predict_step(self, batch: list[Rollout], batch_idx: int) -> list[dict[str, Any]]:
        return [rollout.to_row() for rollout in batch]

    # Checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["policy"] = {"path": self.policy_path, "lora": None if self.lora is None else asdict(self.lora)}
        if self.lora is not None:
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in state.items() if name in trained}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["policy"]["lora"]
        saved = None if saved is None else LoRA(**{f.name: saved[f.name] for f in fields(LoRA)})
        if saved != self.lora:
            raise ValueError(
                f"The checkpoint was written with `lora` {saved}, this run has {self.lora}; make them equal."
            )
        if self.lora is not None:
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            if missing := trained - checkpoint["state_dict"].keys():
                raise ValueError(f"The checkpoint lacks trained weights, among them {sorted(missing)[:3]}.")


class _CloseIteration(L.Callback):
    """Closes the log before the `on_train_epoch_end` of all other callbacks, which find the metrics there."""

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(pl_module, RLModule):
            pl_module.close_iteration()
