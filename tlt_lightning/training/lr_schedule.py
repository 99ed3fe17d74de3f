"""Move the learning rate of a run."""

from math import cos, isfinite, pi
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from tlt_lightning.arguments import Count, Share, check_argument, checked


class WarmupCosine(LRScheduler):
    """Raises every group's learning rate to its own in equal steps, then lowers it to 0 along a cosine.

    Args:
        optimizer: The optimizer whose learning rates move.
        num_steps: Optimizer steps until 0; None is those of the run, which a drafter's `fit` knows.
        warmup_share: Share of them in which the rates rise.

    Example:
        >>> optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> WarmupCosine(optimizer, num_steps=40, warmup_share=0.1).get_last_lr()
        [0.2]
    """

    @checked()
    def __init__(self, optimizer: Optimizer, num_steps: Count | None = None, warmup_share: Share = 0.05) -> None:
        self.num_steps, self.warmup_share = num_steps, warmup_share
        super().__init__(optimizer)

    def run_over(self, num_steps: int) -> None:
        """Let the rates be 0 after `num_steps`."""
        self.num_steps = num_steps
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    @override
    def get_lr(self) -> list[float | Tensor]:
        return [rate * self._factor() for rate in self.base_lrs]

    def _factor(self) -> float:
        if self.num_steps is None:
            return 1.0
        rising = round(self.warmup_share * self.num_steps)
        if self.last_epoch < rising:
            return (self.last_epoch + 1) / (rising + 1)
        return 0.5 + 0.5 * cos(pi * min(1.0, (self.last_epoch - rising) / max(1, self.num_steps - rising)))

    @override
    def state_dict(self) -> dict[str, Any]:
        kept = ("num_steps", "warmup_share")  # a run that is resumed has its own
        return {name: value for name, value in super().state_dict().items() if name not in kept}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.num_steps is not None:
            self.run_over(self.num_steps)  # the optimizer has the rate of the run that is resumed, perhaps 0


def with_schedule(
    optimizer: Optimizer, build: LRSchedulerCallable | None, num_steps: float | None = None, *, validates_every: int = 1
) -> Any:
    """Return the optimizer and a scheduler that moves once a step, as Lightning wants them.

    A `WarmupCosine` is told the run's `num_steps`, where they are known and it was not given its own. Raises
    MisconfigurationException if it has none, or if the scheduler follows a metric and none is named. One that follows a
    metric moves once an epoch, or once in `validates_every` by a metric of the validation.
    """
    if build is None:
        return optimizer
    scheduler = build(optimizer)
    check_argument("lr_scheduler(optimizer)", scheduler, LRScheduler)
    if isinstance(scheduler, WarmupCosine) and scheduler.num_steps is None:
        if num_steps is None or not isfinite(num_steps):
            raise MisconfigurationException(
                "`lr_scheduler` WarmupCosine needs `num_steps`, the optimizer steps of the run: they are not known "
                "beforehand here. Of a drafter's `fit` they are with `Trainer(max_epochs=...)` or `max_steps`."
            )
        scheduler.run_over(int(num_steps))
    if not isinstance(scheduler, ReduceLROnPlateau):
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
    if (monitor := getattr(scheduler, "monitor", None)) is None:
        raise MisconfigurationException(
            "`lr_scheduler` torch.optim.lr_scheduler.ReduceLROnPlateau has no way to name a metric; use "
            "`lightning.pytorch.cli.ReduceLROnPlateau` with, for example, `monitor: reward/mean` and `mode: max`."
        )
    frequency = validates_every if monitor.startswith("val/") else 1
    return [optimizer], [{"scheduler": scheduler, "interval": "epoch", "frequency": frequency, "monitor": monitor}]
