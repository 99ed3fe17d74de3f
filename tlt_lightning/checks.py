"""Check settings that on-policy learning cannot honour, before anything is loaded."""

import logging

import lightning as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.engine.transformers import TransformersEngine
from tlt_lightning.model_files import read_config
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.policy import load_shapes, load_tokenizer
from tlt_lightning.rollout import RolloutBatch, Sampling
from tlt_lightning.training.critic import CriticConfig
from tlt_lightning.training.followed_metrics import watch_iteration_end
from tlt_lightning.training.fsdp2 import FSDP2Strategy
from tlt_lightning.training.memory.optimizer_state import has_composed_states
from tlt_lightning.training.networks import NetworkSettings
from tlt_lightning.training.optimization import check_optimization
from tlt_lightning.training.trainer_settings import check_settings

log = logging.getLogger(__name__)

STRATEGIES = (
    "Use `auto` on one device, also in a notebook, and `ddp` in a script on several, or `fsdp2`, which shards policy "
    "and optimizer over them."
)


def check_trainer(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException for settings that make a run wrong or resume inexact.

    `fast_dev_run` and `overfit_batches` are made to choose prompts instead, see `count_in_prompts`.
    """
    count_in_prompts(trainer)
    check_settings(trainer)
    _check_strategy(trainer)
    if trainer.state.fn == "fit" and hasattr(trainer.lightning_module, "lr_scheduler"):
        check_optimization(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        watch_iteration_end(trainer, callback)


def _check_strategy(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException for ways to start and to place ranks that policies or engines cannot follow."""
    strategy = trainer.strategy
    launched_per_process = getattr(strategy, "_start_method", None) in (None, "popen")
    known = SingleDeviceStrategy | DDPStrategy | FSDP2Strategy
    if not isinstance(strategy, known) or not launched_per_process:
        raise MisconfigurationException(
            f"`Trainer(strategy=...)` is {type(strategy).__name__}"
            f"{'' if launched_per_process else ' with spawned or forked processes'}, which is not supported. "
            f"{STRATEGIES}"
        )
    if isinstance(strategy, FSDP2Strategy):
        _check_sharded(trainer)
    device = strategy.root_device
    if device.type == "cuda" and device.index != trainer.local_rank:
        # The code that vLLM compiles is tied to a device, and kept by rank.
        raise MisconfigurationException(
            f"`Trainer(devices=...)` puts local rank {trainer.local_rank} on {device}; engines need rank and device to "
            "agree. Choose GPUs with the environment variable CUDA_VISIBLE_DEVICES, and give their number as `devices`."
        )


def _check_sharded(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException for what needs the whole policy on a rank, or passes of one rank alone."""
    if isinstance(getattr(trainer.datamodule, "engine", None), TransformersEngine):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            "`data.engine` TransformersEngine generates with the live policy, for which `fsdp2` would have all ranks "
            "take equally many steps; use `VLLMEngine`, or `strategy: ddp`."
        )
    if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            "`WeightAveraging` keeps a copy of the whole policy, and `fsdp2` shards it; drop the callback, or use "
            "`strategy: ddp`."
        )
    build = getattr(trainer.lightning_module, "optimizer", None)
    if build is not None and has_composed_states(build):
        raise MisconfigurationException(
            "`model.optimizer` keeps states of 8 bits or fewer, of which `fsdp2` cannot read a rank's rows back from a "
            "checkpoint; use `torch.optim.AdamW`, or `strategy: ddp`."
        )
    io = trainer.strategy.checkpoint_io
    if type(io) is not TorchCheckpointIO and not hasattr(io, "save_part"):  # which `guard` puts in its place
        raise MisconfigurationException(
            f"The plugin {type(io).__name__} writes checkpoints of rank zero alone, and `fsdp2` has every rank write "
            "its shard; drop the plugin."
        )


def count_in_prompts(trainer: L.Trainer) -> None:
    """Take back what `fast_dev_run` and `overfit_batches` cut off an iteration: they choose its prompts."""
    if trainer.fast_dev_run or trainer.overfit_batches:  # type: ignore[attr-defined]
        trainer.limit_train_batches = 1.0
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop.max_steps = -1


def check_has_data(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException if this run, whatever an earlier one had, has no data module of a policy."""
    selector = trainer._data_connector._datahook_selector  # `trainer.datamodule` may be an earlier run's
    data = getattr(selector, "datamodule", None)
    if not hasattr(type(data), "num_steps"):  # whose value is known after `setup`
        given, function = "none" if data is None else f"a {type(data).__name__}", trainer.state.fn.value  # type: ignore[union-attr]
        raise MisconfigurationException(
            f"`RLModule` reads what a `RolloutDataModule` rolls out or a `SupervisedDataModule` reads, and was given "
            f"{given}: call `trainer.{function}(module, data)`."
        )


def check_needs(objective: PolicyObjective, critic: CriticConfig | None, reference: str | None) -> None:
    """Raise ValueError if an objective lacks the critic or the teacher that it learns from."""
    name = type(objective).__name__
    if objective.needs_critic and critic is None:
        raise ValueError(f"`objective` {name} needs `critic`: `{{}}` is a value head on the policy's trunk.")
    if objective.divergence is not None and reference is None:
        raise ValueError(
            f"`objective` {name} learns from a teacher: name it by `reference`. The policy itself would teach it "
            "nothing."
        )


def check_numbers(batch: RolloutBatch) -> None:
    """Raise ValueError unless what an update reads is a finite number for each token."""
    for name in ("old_logps", "ref_logps", "values", "advantages", "returns"):
        numbers = getattr(batch, name)
        if numbers is not None and not (numbers.shape == batch.response_mask.shape and numbers.isfinite().all()):
            raise ValueError(
                f"`batch.{name}`, of shape {tuple(numbers.shape)}, has to be a finite number for each token, "
                f"{tuple(batch.response_mask.shape)}: it would teach the policy nonsense. A callback may have changed "
                "rewards; what is wrong with an objective `tlt_lightning.testing.check_objective` finds."
            )


def check_rewards(objective: PolicyObjective, scores: bool, *, draws_by_them: bool) -> None:
    """Raise ValueError if nothing scores responses, and the objective or the drawing of prompts goes by it."""
    if not scores and (objective.needs_rewards or draws_by_them):
        who = f"`objective` {type(objective).__name__}" if objective.needs_rewards else "`dynamic_sampling`"
        raise ValueError(
            f"`rewards` is empty, and {who} goes by them; give at least one reward function, or an `environment` with "
            "`get_reward`."
        )


def warn_of_filters(sampling: Sampling) -> None:
    """Warn of biased importance ratios if the engine samples from a part of the vocabulary."""
    if sampling.filters:
        log.warning(
            "`data.sampling` (%s) cuts the distribution that responses are sampled from, and the loss is taken under "
            "the whole of it: importance weights average below 1 and scale the loss down. To learn on-policy, leave "
            "`top_p` 1 and `top_k`, `min_p` and `min_tokens` 0.",
            ", ".join(f"`{name}` {value:g}" for name, value in sampling.filters.items()),
        )


def check_models(wanted: NetworkSettings) -> None:
    """Raise ValueError if transformers reads no config of a model, or `lora` does not fit."""
    critic = None if wanted.critic is None else wanted.critic.path
    for argument, path in (("policy", wanted.policy), ("reference", wanted.reference), ("critic.path", critic)):
        if path is not None:
            read_config(path, f"model.{argument}")
    if wanted.reference is not None:
        _check_same_tokens(wanted.policy, wanted.reference)
    if wanted.lora is not None:  # its adapters fit, which takes no memory to ask
        load_shapes(wanted.policy, wanted.lora)


def _check_same_tokens(policy: str, reference: str) -> None:
    """Raise ValueError unless two models mean the same tokens by the same numbers."""
    ids, others = (load_tokenizer(path).get_vocab() for path in (policy, reference))
    if differing := sorted(token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token)):
        token = differing[0]
        raise ValueError(
            f"`model.reference` {reference!r} has other tokens than `model.policy` {policy!r}: {token!r} is "
            f"{others.get(token)} there and {ids.get(token)} here, and {len(differing) - 1} more differ. Its log-probs "
            "would be of other texts; choose a model of the policy's family."
        )


def check_engine_ranks(num_ranks: int, trainer: L.Trainer) -> None:
    """Raise MisconfigurationException unless the devices of each node make whole engines of `num_ranks`."""
    devices = trainer.num_devices
    if devices % num_ranks:
        raise MisconfigurationException(
            f"`engine.tensor_parallel` {num_ranks} does not divide the {devices} devices of a node "
            "(`Trainer(devices=...)`), on which an engine's ranks are neighbours; choose a divisor, or other devices."
        )


def context_of(policy: str) -> int | None:
    """Return the most tokens of a sequence, None where the policy has no limit.

    The frequencies of `longrope` follow the longest sequence of a pass, in vLLM the longest that may come: a pack, a
    padded batch and the engine would differ on a short sequence, so its context ends where they begin to.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(policy).get_text_config()
    limit, ropes = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):  # one, or one a type of layer
        if rope.get("rope_type") == "longrope":
            limit = rope["original_max_position_embeddings"]
    return limit


def check_lengths(policy: str, max_prompt_tokens: int, sampling: Sampling, val_sampling: Sampling) -> None:
    """Raise ValueError if prompt and response may outgrow the policy's context."""
    limit = context_of(policy)
    for name, max_tokens in (("sampling", sampling.max_tokens), ("val_sampling", val_sampling.max_tokens)):
        if limit is not None and max_prompt_tokens + max_tokens > limit:
            raise ValueError(
                f"`data.max_prompt_tokens` {max_prompt_tokens} plus `data.{name}.max_tokens` {max_tokens} is "
                f"{max_prompt_tokens + max_tokens}, but `policy` {policy!r} has a context of {limit} tokens; lower "
                "one of them. (Of `longrope` it is the original one: beyond it log-probs depend on what shares a pass.)"
            )
