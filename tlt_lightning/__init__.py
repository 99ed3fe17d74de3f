"""Trains reasoning language models by fast reinforcement learning, in PyTorch Lightning.

Names are imported on first use: `import tlt_lightning` loads neither vllm nor transformers nor speculators.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public names by the module that defines them; type checkers read the same in __init__.pyi.
_NAMES = {
    "adapters": "LoRA",
    "callbacks.completions_writer": "CompletionsWriter",
    "callbacks.progress_bar": "RolloutProgressBar",
    "callbacks.run_report": "RunReport",
    "commands.export": "export_policy",
    "data.iteration_settings": "DynamicSampling",
    "data.module": "RolloutDataModule",
    "data.prompts": "PromptSource",
    "data.supervised": "SupervisedDataModule",
    "drafter.data": "DrafterDataModule",
    "drafter.module": "DrafterModule",
    "engine.base": "RolloutEngine RolloutProgress",
    "engine.ray.engine": "RayEngine",
    "engine.transformers": "TransformersEngine",
    "engine.vllm.engine": "VLLMEngine",
    "engine.vllm.quantization": "Quantization",
    "engine.vllm.speculation": "Speculation",
    "environments.limits": "TurnLimits",
    "environments.verifiers": "VerifiersEnvironment",
    "hidden_states": "HiddenStateRequest PolicyText",
    "hooks": "RolloutCallback",
    "long_tail.callback": "LongTailIdleCallback",
    "long_tail.supervised": "SupervisedDrafterCallback",
    "metrics": "IterationLog",
    "metrics.rollouts": "zero_std_share",
    "module": "RLModule",
    "objectives.base": "ObjectiveOutput PolicyObjective",
    "ranks.idle_windows": "IdleWindow",
    "rewards": "RewardTerm",
    "rollout": "Prompt Request Response Rollout RolloutBatch Sampling",
    "schedules.async_rollout": "AsyncRollout",
    "schedules.base": "PendingGroup RolloutDemand RolloutSchedule SynchronousSchedule",
    "schedules.partial_rollout": "PartialRollout",
    "schedules.tail_batching": "TailBatching",
    "speculation.selectors.beg_mab": "BEGMABSelector",
    "speculation.selectors.cost_model": "CostModelSelector",
    "speculation.selectors.rules": "FixedSelector ThresholdSelector",
    "speculation.strategy": "MeasuredStep SelectorState Strategy StrategySelector",
    "training.critic": "CriticConfig",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
