"""Names the schedules: what is rolled out when, and what waits."""

from tlt_lightning.schedules.async_rollout import AsyncRollout
from tlt_lightning.schedules.base import RolloutSchedule, SynchronousSchedule
from tlt_lightning.schedules.partial_rollout import PartialRollout
from tlt_lightning.schedules.tail_batching import TailBatching
