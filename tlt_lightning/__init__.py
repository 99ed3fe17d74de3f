"""TLT-Lightning: fast reinforcement learning of reasoning language models, as a PyTorch Lightning package.

Names are imported on first use: `import tlt_lightning` loads neither vllm nor transformers nor speculators.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt_lightning.critic import CriticConfig as CriticConfig
    from tlt_lightning.data.module import RolloutDataModule as RolloutDataModule
    from tlt_lightning.data.prompts import PromptSource as PromptSource
    from tlt_lightning.drafter.data import DrafterDataModule as DrafterDataModule
    from tlt_lightning.drafter.module import DrafterModule as DrafterModule
    from tlt_lightning.engine import Sampling as Sampling
    from tlt_lightning.engine import Speculation as Speculation
    from tlt_lightning.engine import TransformersEngine as TransformersEngine
    from tlt_lightning.engine import VLLMEngine as VLLMEngine
    from tlt_lightning.export import export_policy as export_policy
    from tlt_lightning.hooks import RolloutCallback as RolloutCallback
    from tlt_lightning.long_tail.callback import LongTailIdleCallback as LongTailIdleCallback
    from tlt_lightning.module import RLModule as RLModule
    from tlt_lightning.policy import LoRA as LoRA
    from tlt_lightning.rewards import RewardTerm as RewardTerm

__version__ = "0.1.0"

_HOMES = {
    "CriticConfig": "critic",
    "DrafterDataModule": "drafter.data",
    "DrafterModule": "drafter.module",
    "LoRA": "policy",
    "LongTailIdleCallback": "long_tail.callback",
    "PromptSource": "data.prompts",
    "RLModule": "module",
    "RewardTerm": "rewards",
    "RolloutCallback": "hooks",
    "RolloutDataModule": "data.module",
    "Sampling": "engine",
    "Speculation": "engine",
    "TransformersEngine": "engine",
    "VLLMEngine": "engine",
    "export_policy": "export",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
