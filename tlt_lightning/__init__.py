"""Trains reasoning language models by fast reinforcement learning, in PyTorch Lightning.

Names are imported on first use: `import tlt_lightning` loads neither vllm nor transformers nor speculators.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read below, too, so that each public name is written once
    from tlt_lightning.callbacks.completions_writer import CompletionsWriter as CompletionsWriter
    from tlt_lightning.callbacks.progress_bar import RolloutProgressBar as RolloutProgressBar
    from tlt_lightning.callbacks.run_report import RunReport as RunReport
    from tlt_lightning.commands.export import export_policy as export_policy
    from tlt_lightning.data.dynamic_sampling import DynamicSampling as DynamicSampling
    from tlt_lightning.data.module import RolloutDataModule as RolloutDataModule
    from tlt_lightning.data.prompts import PromptSource as PromptSource
    from tlt_lightning.drafter.data import DrafterDataModule as DrafterDataModule
    from tlt_lightning.drafter.module import DrafterModule as DrafterModule
    from tlt_lightning.engine.base import RolloutEngine as RolloutEngine
    from tlt_lightning.engine.base import RolloutProgress as RolloutProgress
    from tlt_lightning.engine.transformers import TransformersEngine as TransformersEngine
    from tlt_lightning.engine.vllm.engine import VLLMEngine as VLLMEngine
    from tlt_lightning.engine.vllm.quantization.settings import Quantization as Quantization
    from tlt_lightning.engine.vllm.speculation import Speculation as Speculation
    from tlt_lightning.hidden_states import HiddenStateRequest as HiddenStateRequest
    from tlt_lightning.hidden_states import PolicyText as PolicyText
    from tlt_lightning.hooks import RolloutCallback as RolloutCallback
    from tlt_lightning.long_tail.callback import LongTailIdleCallback as LongTailIdleCallback
    from tlt_lightning.metrics import IterationLog as IterationLog
    from tlt_lightning.metrics.rollouts import zero_std_share as zero_std_share
    from tlt_lightning.module import RLModule as RLModule
    from tlt_lightning.objectives.base import ObjectiveOutput as ObjectiveOutput
    from tlt_lightning.objectives.base import PolicyObjective as PolicyObjective
    from tlt_lightning.policy import LoRA as LoRA
    from tlt_lightning.ranks.idle_windows import IdleWindow as IdleWindow
    from tlt_lightning.rewards import RewardTerm as RewardTerm
    from tlt_lightning.rollout import Prompt as Prompt
    from tlt_lightning.rollout import Request as Request
    from tlt_lightning.rollout import Response as Response
    from tlt_lightning.rollout import Rollout as Rollout
    from tlt_lightning.rollout import RolloutBatch as RolloutBatch
    from tlt_lightning.rollout import Sampling as Sampling
    from tlt_lightning.schedules.base import Demand as Demand
    from tlt_lightning.schedules.base import OpenGroup as OpenGroup
    from tlt_lightning.schedules.base import RolloutSchedule as RolloutSchedule
    from tlt_lightning.schedules.history import EarlierAnswers as EarlierAnswers
    from tlt_lightning.schedules.partial_rollout import PartialRollout as PartialRollout
    from tlt_lightning.schedules.synchronous import SynchronousSchedule as SynchronousSchedule
    from tlt_lightning.schedules.tail_batching import TailBatching as TailBatching
    from tlt_lightning.speculation.selectors.beg_mab import BEGMABSelector as BEGMABSelector
    from tlt_lightning.speculation.selectors.cost_model import CostModelSelector as CostModelSelector
    from tlt_lightning.speculation.selectors.fixed import FixedSelector as FixedSelector
    from tlt_lightning.speculation.selectors.threshold import ThresholdSelector as ThresholdSelector
    from tlt_lightning.speculation.strategy import MeasuredStep as MeasuredStep
    from tlt_lightning.speculation.strategy import SelectorState as SelectorState
    from tlt_lightning.speculation.strategy import Strategy as Strategy
    from tlt_lightning.speculation.strategy import StrategySelector as StrategySelector
    from tlt_lightning.training.critic import CriticConfig as CriticConfig

__version__ = "0.1.0"

_HOMES = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{__name__}.")
    for alias in node.names
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
