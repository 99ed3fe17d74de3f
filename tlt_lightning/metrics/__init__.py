"""Names what a metric is written to."""

from tlt_lightning.metrics.iteration_log import IterationLog
