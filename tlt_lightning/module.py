"""Train the policy by reinforcement.

An iteration is one Lightning epoch:

    rollout     the engine writes responses to prompts             data/collector.py
    reward      functions score each as soon as it has ended       rewards/pool.py
    log-probs   of the policy and its reference; a critic's values  `RLModule.score`
    advantage   by how much a response beats what was expected     `RLModule.estimate_advantages`
    loss        of log-probs and advantages, pass by pass          `RLModule.training_step`
    step        the Trainer's optimizer                            `RLModule.on_before_optimizer_step`

`data/iteration.py` makes the first four, and cuts what comes of them into optimizer steps.
"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tlt_lightning.adapters import LoRA
from tlt_lightning.arguments import checked, text_of
from tlt_lightning.callbacks.usual import usual_callbacks
from tlt_lightning.checks import check_has_data, check_models, check_needs, check_numbers
from tlt_lightning.engine.base import NamedTensors
from tlt_lightning.guard.callback import lifecycle_callbacks
from tlt_lightning.guard.shards import check_together
from tlt_lightning.hidden_states import BatchTap, HiddenStateRequest
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics import IterationLog
from tlt_lightning.metrics.held_out import HeldOutMetrics
from tlt_lightning.model_files import HOW_TO_SAVE
from tlt_lightning.objectives import GRPO
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.objectives.ppo import explained_variance
from tlt_lightning.policy import PolicyWeights
from tlt_lightning.ranks.reduce import sum_over_ranks
from tlt_lightning.rollout import Rollout, RolloutBatch
from tlt_lightning.sharding.units import total_norm
from tlt_lightning.training import optimization, resume
from tlt_lightning.training.critic import Critic, CriticConfig
from tlt_lightning.training.described import INSTANTIATOR, describe, describe_object, keep_arguments
from tlt_lightning.training.frozen import drop_frozen, frozen_names, restore_frozen
from tlt_lightning.training.fsdp2 import run_sharding
from tlt_lightning.training.iteration_end import log_of_iteration
from tlt_lightning.training.lr_schedule import with_schedule
from tlt_lightning.training.micro_batches import end_step
from tlt_lightning.training.networks import Networks, NetworkSettings, Reference
from tlt_lightning.training.throughput import log_work


class RLModule(L.LightningModule):
    """Trains a policy by reinforcement on a `RolloutDataModule`, or on the texts of a `SupervisedDataModule`.

    A batch of the Trainer's is an optimizer step: the module runs its micro-batches by itself. All else is Lightning's
    automatic optimization, with the Trainer's gradient clipping, precision and schedulers.

    Args:
        policy: Path or hub name of a Hugging Face causal language model.
        objective: What is maximised; None is `GRPO()`.
        optimizer: Builds the optimizer from parameter groups. None is AdamW without weight decay, at a learning rate of
            1e-6, or 1e-5 for adapters; for the objective `SFT` at 2e-5, or 2e-4.
        lr_scheduler: Builds a scheduler from the optimizer; stepped once per optimizer step.
        lora: Train LoRA adapters; None trains all weights.
        reference: Frozen model for objectives with a KL penalty; None takes the initial policy (LoRA: adapters off).
            For `Distillation` it is the teacher and has to be given: a model of any size with the policy's tokens.
        critic: How values are predicted, for objectives that need them (PPO).
        gradient_checkpointing: Recompute activations in the backward pass: a quarter slower, frees most of them.
        attn_implementation: Attention of Hugging Face: `sdpa`, `eager` or `flash_attention_2`.

    Example:
        >>> from tlt_lightning import RLModule
        >>> module = RLModule("Qwen/Qwen2.5-0.5B-Instruct")  # loads in `Trainer.fit`, not here
    """

    @checked()
    def __init__(
        self,
        policy: str,
        objective: PolicyObjective | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lora: LoRA | None = None,
        reference: str | None = None,
        critic: CriticConfig | None = None,
        gradient_checkpointing: bool = False,
        attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa",
    ) -> None:
        super().__init__()
        keep_arguments(self, locals())
        self.objective = objective = GRPO() if objective is None else objective
        check_needs(objective, critic, reference)
        self.policy_path = text_of("policy", policy, f"Give a folder or hub name. {HOW_TO_SAVE}")
        remedy = "Give a folder or hub name, or leave it out."
        self.reference_path = None if reference is None else text_of("reference", reference, remedy)
        if optimizer is None:
            optimizer = partial(torch.optim.AdamW, lr=objective.usual_rates[lora is not None], weight_decay=0.0)
        self.optimizer, self.lr_scheduler, self.lora, self.critic_config = optimizer, lr_scheduler, lora, critic
        self.gradient_checkpointing, self.attn_implementation = gradient_checkpointing, attn_implementation

        self.policy: nn.Module | None = None  # this and the next two are loaded in `configure_model`
        self.critic: Critic | None = None
        self._reference: Reference | None = None
        self._loaded_with: NetworkSettings | None = None
        self._frozen: frozenset[str] = frozenset()  # weights that are never trained, and in no checkpoint
        self._checksums: dict[str, int] = {}  # of the files that these and a reference come from
        self._resumed_optimizer = optimization.ResumedOptimizer()

        self.iteration_log = IterationLog()
        """Takes what anybody, a callback above all, wants logged of the iteration."""
        self.iteration_metrics: dict[str, float] = {}
        """Metrics of the iteration that has ended."""
        self.validated: dict[str, float] = {}
        """Metrics of the iteration's last validation; empty if it has none yet."""
        self.hidden_state_request: HiddenStateRequest | None = None
        """Hidden states that a callback wants in `on_hidden_states`; None for none."""
        self.callback_bytes: dict[str, float] = {}
        """Bytes that callbacks hold on the device from the start to the end, by name, for the forecast of memory."""
        self._tap: BatchTap | None = None  # around the passes that the wanted hidden states come from
        self._is_single_update = False  # of the batch that was scored last
        self._is_stopped = False  # the policy has moved by `objective.stop_at_kl`, and moves no more in this iteration
        self._parts: list[dict[str, Tensor]] = []  # metrics of the step's micro-batches

    # Learning from a rollout

    def score(self, batch: RolloutBatch, micro_batch_tokens: int, *, single_update: bool = False) -> RolloutBatch:
        """Return a rank's batch with log-probs, reference log-probs and values from before the update.

        Args:
            batch: A batch on the CPU; the result stays there.
            micro_batch_tokens: Most tokens of a forward pass; cut as the update's are.
            single_update: The iteration takes one optimizer step, whose own log-probs are the old ones: `old_logps`
                stays None and the policy's pass is left out, unless a critic or the advantages need it. So it is, in
                however many steps, where the objective clips against the policy that wrote the batch.
        """
        request, step = self.hidden_state_request, self.trainer.global_step
        needs_old_logps = not (single_update or self.objective.clips_behaviour(asynchronous=batch.asynchronous))
        self._tap = None if request is None else BatchTap(self.networks.policy, request, batch, step)
        self._is_single_update = single_update
        return self.networks.score(
            batch,
            micro_batch_tokens,
            self.trainer,
            scores_policy=needs_old_logps or self.critic is not None or self.objective.needs_old_logps,
            scores_reference=self.objective.needs_reference,
        )

    @torch.no_grad()
    def estimate_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        """Return a rank's scored batch with advantages and, with a critic, its targets.

        Raises:
            ValueError: They, or what was scored, are not a finite number for each token.
        """
        sum_ranks = partial(sum_over_ranks, self.trainer)
        advantages, returns = self.objective.advantages(batch, sum_ranks)
        batch = replace(batch, advantages=advantages, returns=returns)
        check_numbers(batch)
        if batch.values is not None and returns is not None:
            explained = explained_variance(batch.values, returns, batch.response_mask, sum_ranks)
            self.iteration_log.mean("train/explained_variance", explained)
        return batch

    @override
    def training_step(self, batch: list[RolloutBatch], batch_idx: int) -> Tensor:
        """Run an optimizer step's micro-batches; the Trainer runs the last one's backward pass."""
        self.zero_grad()
        *others, last = batch
        for part in others:
            optimization.backward_alone(self.trainer, self._loss(part))
        log_work(self.iteration_log, self.networks.trained, batch)
        return self._loss(last)

    @override
    def optimizer_zero_grad(self, *_: Any) -> None:
        """Keep the gradients of a step's first micro-batches: the Trainer would clear them after `training_step`."""

    def _loss(self, batch: RolloutBatch) -> Tensor:
        tokens, values = self.networks.forward(batch, needs_entropy_grad=self.objective.needs_entropy_grad)
        batch = replace(batch, divergence=tokens.divergence)
        if batch.old_logps is None:  # nobody has asked for earlier ones: the only update's are its own
            batch = replace(batch, old_logps=tokens.logps.detach())
        output = self.objective.loss(batch, tokens.logps, tokens.entropy, values)
        self._parts.append({"train/loss": output.loss.detach(), **output.metrics})
        return output.loss

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the step; let the policy stand still once it has moved enough, and while the critic warms up."""
        assert self.policy is not None
        metrics = end_step(self._parts)
        self.iteration_log.update(metrics)
        limit = self.objective.stop_at_kl
        if limit is not None and self.trainer.strategy.reduce(metrics["train/approx_kl"], reduce_op="mean") > limit:
            self._is_stopped = True
        if self._is_stopped:
            self.zero_grad()  # to None: an optimizer leaves such parameters alone, without decay or momentum
            return
        config = self.critic_config
        if self.critic is not None and config is not None and self.current_epoch < config.warmup_iterations:
            self.policy.zero_grad()
        if gradients := [p.grad for p in self.policy.parameters() if p.grad is not None]:
            self.iteration_log.mean("train/grad_norm", total_norm(gradients))
        if (lr := optimizer.param_groups[0].get("lr")) is not None:
            self.iteration_log.mean("train/lr", lr)

    @override
    def on_train_batch_end(self, outputs: Any, batch: list[RolloutBatch], batch_idx: int) -> None:
        if self._tap is None or not (self._is_single_update or self.trainer.is_last_batch):
            return
        texts, self._tap = self._tap.texts, None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer's step is the update's, not a callback's
        self._lap("update")
        call_rollout_hook(self.trainer, "on_hidden_states", texts)

    # Networks and optimizer

    @override
    def configure_model(self) -> None:
        if self.policy is not None:
            return
        self._loaded_with = self.network_settings
        trainer = self._trainer
        sharding = None if trainer is None else run_sharding(trainer)
        is_half = trainer is not None and trainer.precision == "bf16-mixed"
        networks = self._loaded_with.load(self.objective, sharding, is_half=is_half)
        self.policy, self.critic, self._reference = networks.policy, networks.critic, networks.reference
        self._frozen, self._checksums = frozen_names(self), self._loaded_with.checksums(self.objective)

    @property
    def networks(self) -> Networks:
        """Return the networks that read the batches."""
        assert self.policy is not None, "`networks` before `configure_model`"
        return Networks(self.policy, self.critic, self._reference, self.objective.divergence, self._tap)

    @property
    def network_settings(self) -> NetworkSettings:
        """The arguments that say which networks a run has, as they are now."""
        return NetworkSettings(
            self.policy_path,
            self.reference_path,
            self.critic_config,
            self.lora,
            self.gradient_checkpointing,
            self.attn_implementation,
        )

    def check_networks(self) -> None:
        """Raise ValueError if the networks cannot be loaded, or others than those that another fit has loaded."""
        if self._loaded_with is not None:
            self.network_settings.check_loaded(self._loaded_with, self.networks, self.objective)
        check_models(self.network_settings)

    def policy_weights(self) -> NamedTensors:
        """Stream the policy's weights under Hugging Face names, adapters merged, for an engine."""
        assert self.policy is not None, "`policy_weights` before `configure_model`"
        return PolicyWeights(self.policy)

    @override
    def configure_optimizers(self) -> Any:
        assert self.policy is not None
        groups: list[dict[str, Any]] = [{"params": [p for p in self.policy.parameters() if p.requires_grad]}]
        if self.critic is not None and self.critic_config is not None:
            critic_parameters = [p for p in self.critic.parameters() if p.requires_grad]
            groups.append({"params": critic_parameters, "lr": self.critic_config.lr})
        optimizer = optimization.built(self.optimizer, groups)
        self.save_hyperparameters({"optimizer": describe_object(optimizer, optimizer.defaults)})
        every = None if self._trainer is None else self.trainer.check_val_every_n_epoch
        return with_schedule(optimizer, self.lr_scheduler, validates_every=every or 1)

    @override
    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if gradient_clip_val:
            optimization.clip_networks(optimizer, self.critic, gradient_clip_val, gradient_clip_algorithm)

    # A run and its iterations

    @override
    def configure_callbacks(self) -> list[L.Callback]:
        check_has_data(self.trainer)
        return [*usual_callbacks(self.trainer), *lifecycle_callbacks(self.trainer)]

    @override
    def setup(self, stage: str) -> None:
        has_rewards = self.trainer.datamodule.has_rewards  # type: ignore[attr-defined]
        self.held_out = HeldOutMetrics(has_rewards=has_rewards)  # anew: an earlier run may have ended within one
        if stage == "fit":
            self._resumed_optimizer.forget()
            own = {"objective": describe(self.objective), "lr_scheduler": describe(self.lr_scheduler)}
            self.save_hyperparameters(own)  # as they are now; a checkpoint's are compared with them

    @override
    def on_fit_start(self) -> None:
        self._resumed_optimizer.note(self.trainer)

    @override
    def on_train_start(self) -> None:
        self.iteration_log.clear()  # loading belongs to no iteration, nor does what an interrupted run left
        self._finish_iteration()
        optimization.fuse_on_gpu(self.trainer.optimizers[0], self.device)
        self._resumed_optimizer.apply(self.trainer)

    @override
    def on_train_epoch_start(self) -> None:
        self._is_stopped, self.validated = False, {}
        self._parts.clear()
        self._finish_iteration()

    def _finish_iteration(self) -> None:
        """Make the Trainer finish this iteration before it obeys `should_stop`."""
        loop = self.trainer.fit_loop
        loop.min_epochs = max(loop.min_epochs or 0, self.current_epoch + 1)

    @override
    def on_train_epoch_end(self) -> None:
        metrics = {**self.iteration_metrics, **self.validated}
        call_rollout_hook(self.trainer, "on_iteration_end", self.current_epoch + 1, metrics)
        self.iteration_log.open()

    # Evaluation

    @override
    def validation_step(self, batch: list[Rollout] | list[RolloutBatch], batch_idx: int) -> None:
        for part in batch:
            if isinstance(part, RolloutBatch):
                tokens, _ = self.networks.forward(part)
                self.held_out.add_losses(-tokens.logps[part.response_mask.bool()])
        self.held_out.add([part for part in batch if isinstance(part, Rollout)])

    test_step = validation_step

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
    def _is_fitting(self) -> bool:  # in an iteration, its validation included
        return self.trainer.state.fn == "fit" and not self.trainer.sanity_checking

    @override
    def on_validation_epoch_end(self) -> None:
        metrics = self.held_out.read("val")
        if self._is_fitting:
            self.validated = metrics
            log_of_iteration(self, metrics)
        else:  # Lightning wants a name logged in one way throughout a fit, its sanity check included
            self.log_dict(metrics, logger=not self.trainer.sanity_checking)

    @override
    def on_test_epoch_end(self) -> None:
        self.log_dict(self.held_out.read("test"))

    @override
    def predict_step(self, batch: list[Rollout], batch_idx: int) -> list[dict[str, Any]]:
        return [rollout.to_row() for rollout in batch]

    # Checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._resumed_optimizer.save(checkpoint, self.trainer)
        path = self._policy_origin
        lora = None if self.lora is None else asdict(self.lora)
        checkpoint["policy"] = {"path": path, "lora": lora, "checksums": self._checksums}
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]["policy"] = path
        for kind in (L.LightningModule, L.LightningDataModule):
            checkpoint.setdefault(kind.CHECKPOINT_HYPER_PARAMS_KEY, {})["_instantiator"] = INSTANTIATOR
        drop_frozen(self._frozen, checkpoint)

    @property
    def _policy_origin(self) -> str:
        return str(Path(self.policy_path).absolute()) if Path(self.policy_path).is_dir() else self.policy_path

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_together(checkpoint)
        restore_frozen(self._frozen, checkpoint, self)
        resume.check_networks(checkpoint, self.lora, self.state_dict())
        if self._trainer is not None and self.trainer.state.fn == "fit":
            saved, now = checkpoint["policy"], {"model.policy": self._policy_origin, **self._checksums}
            resume.warn_of_changes({**now, "model.policy": saved["path"], **saved.get("checksums", {})}, now)
            data: L.LightningDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
            is_another = resume.warn_of_choices(checkpoint, self, data)
            is_usual = type(self).configure_optimizers is RLModule.configure_optimizers
            resume.rewind(checkpoint)
            self._resumed_optimizer.load(checkpoint, self.lr_scheduler if is_usual else None, is_another=is_another)
