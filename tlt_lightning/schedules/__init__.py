"""Names the schedules: what is rolled out when, and what waits."""

from tlt_lightning.schedules.async_rollout import AsyncRollout as AsyncRollout
from tlt_lightning.schedules.base import RolloutSchedule as RolloutSchedule
from tlt_lightning.schedules.base import SynchronousSchedule as SynchronousSchedule
from tlt_lightning.schedules.partial_rollout import PartialRollout as PartialRollout
from tlt_lightning.schedules.tail_batching import TailBatching as TailBatching
