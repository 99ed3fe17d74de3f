"""Checks plugins in their authors' own tests, each by one call.

A check runs the plugin on small real data, on the CPU, and raises AssertionError at the first duty that is not kept, or
a run's own ValueError: what the plugin did, and what to do. Nothing here runs in training.

Example:
    >>> from tlt_lightning import ThresholdSelector
    >>> check_selector(ThresholdSelector(3))
"""

from tlt_lightning.testing.callbacks import check_callback
from tlt_lightning.testing.engines import check_engine
from tlt_lightning.testing.objectives import check_objective
from tlt_lightning.testing.rewards import check_reward
from tlt_lightning.testing.schedules import check_schedule
from tlt_lightning.testing.selectors import check_selector
