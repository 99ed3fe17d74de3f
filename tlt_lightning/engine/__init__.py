"""Offer the rollout engines, which write responses.

They import the policy when they are set up: engine hosts that load none do without torch's sharding.
"""

from tlt_lightning.engine.base import RolloutEngine, RolloutProgress
from tlt_lightning.engine.ray.engine import RayEngine
from tlt_lightning.engine.transformers import TransformersEngine
from tlt_lightning.engine.vllm.engine import EngineParts, VLLMEngine
from tlt_lightning.engine.vllm.quantization import Quantization
from tlt_lightning.engine.vllm.speculation import Speculation
