"""Follow a rollout from engine step to engine step, and a rank from stage to stage, for pictures of them."""

from collections.abc import Sequence
from typing import Any

from tlt_lightning.engine.base import RolloutProgress

NUM_SPANS = 150
MAX_STAGES = 100


class RolloutTimeline:
    """Keeps what each engine step of an iteration's rollouts did, on this rank."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the rollouts so far."""
        self._steps: list[tuple[float, int, int, int, int, str]] = []
        self._offset = 0.0  # seconds of the rounds before, where dynamic sampling rolls out several times
        self._last: RolloutProgress | None = None

    def add(self, progress: RolloutProgress) -> None:
        """Note the state after an engine step."""
        last, strategy = self._last, progress.strategy
        if last is not None and progress.finished < last.finished:  # another round
            self._offset, last = self._offset + last.elapsed, None
        finished, tokens = (0, 0) if last is None else (last.finished, last.tokens)
        active = progress.running + progress.finished - finished  # whoever ran in the step runs on or is done
        drafter, k = "off" if strategy.is_off else strategy.drafter, strategy.num_draft_tokens
        end = self._offset + progress.elapsed
        self._steps.append((end, active, progress.waiting, progress.tokens - tokens, k, drafter))
        self._last = progress

    def spans(self, count: int = NUM_SPANS) -> dict[str, Any] | None:
        """Return the rollout in at most `count` equal spans of time; None if there was none.

        Keys: `seconds` of the whole; lists with a value a span: `waiting` (requests), `k` (tokens drafted for each
        running request), `tokens` (per running request and engine step); and `running`, such a list for each drafter
        that was in force, `off` among them, whose sum is the mean number of running requests.
        """
        if not self._steps or self._steps[-1][0] <= 0:
            return None
        count = min(count, len(self._steps))
        width = self._steps[-1][0] / count
        running: dict[str, list[float]] = {step[-1]: [0.0] * count for step in self._steps}
        sums = {name: [0.0] * count for name in ("waiting", "k", "tokens", "active")}
        begin = 0.0
        for end, active, waiting, tokens, k, drafter in self._steps:
            first, last = min(int(begin / width), count - 1), min(int(end / width), count - 1)
            for span in range(first, last + 1):
                inside = min(end, (span + 1) * width) - max(begin, span * width)
                running[drafter][span] += active * inside / width
                sums["waiting"][span] += waiting * inside / width
                sums["k"][span] += k * inside / width
                share = inside / (end - begin) if end > begin else 1.0
                sums["tokens"][span] += tokens * share
                sums["active"][span] += active * share
            begin = end
        sums["tokens"] = [t / max(a, 1e-9) for t, a in zip(sums["tokens"], sums.pop("active"), strict=True)]
        rounded = {name: [round(value, 2) for value in values] for name, values in sums.items()}
        by_drafter = {name: [round(value, 2) for value in values] for name, values in sorted(running.items())}
        return {"seconds": round(self._steps[-1][0], 3), **rounded, "running": by_drafter}


def rank_timeline(
    laps: Sequence[tuple[str, float]], idle_seconds_used: float, most: int = MAX_STAGES
) -> list[tuple[str, float]]:
    """Return a rank's stages in the order in which they passed, with the seconds of each, about `most` of them.

    Of an idle window the part in which the rank trained, its first, is a stage of its own. Where the stages are too
    many, the shortest are counted to those before them.

    Args:
        laps: Stages and seconds, as they passed.
        idle_seconds_used: Seconds of the idle windows in which the rank trained.
        most: Stages to keep.
    """
    stages: list[tuple[str, float]] = []
    for stage, seconds in laps:
        used = min(idle_seconds_used, seconds) if stage == "idle" else 0.0
        idle_seconds_used -= used
        stages += [part for part in (("idle, used", used), (stage, seconds - used)) if part[1] > 0]
    shortest = min(sorted(seconds for _, seconds in stages)[-most:], default=0.0)
    shown: list[tuple[str, float]] = []
    for stage, seconds in stages:
        if shown and (seconds < shortest or stage == shown[-1][0]):
            stage, seconds = shown[-1][0], shown.pop()[1] + seconds
        shown.append((stage, seconds))
    return [(stage, round(seconds, 3)) for stage, seconds in shown]
