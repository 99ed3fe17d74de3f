"""Hold a run to the arguments that it began with."""

from collections.abc import Mapping
from typing import Any

from tlt_lightning.checks import warn_of_filters
from tlt_lightning.rollout import Sampling
from tlt_lightning.schedules.base import RolloutSchedule


class RunArguments:
    """Holds a run to the arguments that it began with; between iterations `sampling` alone may become another.

    Args:
        begun_with: The arguments by name.
    """

    def __init__(self, begun_with: Mapping[str, Any]) -> None:
        self._kept = dict(begun_with)
        self._most_tokens = self.sampling.max_tokens

    @property
    def sampling(self) -> Sampling:
        """Return how the last iteration was sampled."""
        return self._kept["sampling"]

    def take_sampling(self, sampling: Sampling, schedule: RolloutSchedule) -> None:
        """Let the iteration that begins be sampled otherwise; warn of filters that the last one had not.

        Raises:
            ValueError: The schedule keeps to one sampling, or the run has no room for such long responses.
        """
        if schedule.continues:
            raise ValueError(
                f"A callback has changed `data.sampling`, and {type(schedule).__name__} continues responses of earlier "
                "iterations, which keep to one sampling: drop the callback, or `data.schedule`."
            )
        if sampling.max_tokens > self._most_tokens:
            raise ValueError(
                f"A callback gave `data.sampling` {sampling.max_tokens} `max_tokens`, and the run has made room for "
                f"{self._most_tokens}: begin with the most that it will need."
            )
        if sampling.filters.keys() - self.sampling.filters.keys():
            warn_of_filters(sampling)
        self._kept["sampling"] = sampling

    def check(self, owner: object) -> None:
        """Raise ValueError if an attribute of `owner` is not the argument of its name: it would be ignored."""
        for name, value in self._kept.items():
            if (now := getattr(owner, name)) is not value and now != value:
                raise ValueError(
                    f"A callback has changed `data.{name}`, which this iteration would ignore: within a run only "
                    "`data.sampling` may change, in `on_train_epoch_start`."
                )
