"""Count the drafts, tokens and seconds of speculation in one rollout."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt_lightning.speculation.strategy import Strategy


def arm_name(strategy: Strategy) -> str:
    """Return a strategy's name in metrics and traces: `off`, `learned_5`, `sibling_7`."""
    return "off" if strategy.is_off else f"{strategy.drafter}_{strategy.num_draft_tokens}"


@dataclass(slots=True)
class SpeculationCounters:
    """Counts one rollout's speculation; `stats` turns the counts into `speculation/*` metrics.

    Acceptance counts every verified draft. Seconds and tokens of an arm count its settled steps alone: decode steps
    that verify and draft under the same strategy, the only ones whose time says what the strategy costs.
    """

    decode_steps: int = 0
    off_steps: int = 0
    sum_k: int = 0
    verifications: int = 0
    verified_emitted: int = 0
    switches: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    arm_tokens: Counter[str] = field(default_factory=Counter)
    arm_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    learned_seconds: float = 0.0

    def count_step(self, strategy: Strategy, num_drafted: Sequence[int], num_emitted: Sequence[int]) -> None:
        """Count a finished decode step: drafts verified and tokens emitted by each request."""
        self.decode_steps += 1
        self.off_steps += strategy.is_off
        self.sum_k += strategy.num_draft_tokens
        for (drafted, emitted), number in Counter(zip(num_drafted, num_emitted, strict=True)).items():
            if drafted:
                self.verifications += number
                self.verified_emitted += number * emitted
            for position in range(drafted):
                self.drafted_at[position] += number
                self.accepted_at[position] += number * (position < emitted - 1)

    def count_time(self, strategy: Strategy, tokens: int, seconds: float) -> None:
        """Count tokens and seconds of a settled step."""
        self.arm_tokens[arm_name(strategy)] += tokens
        self.arm_seconds[arm_name(strategy)] += seconds
        self.learned_seconds += seconds * strategy.is_learned

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per request and speculative step, bonus token included; 1 before the first."""
        return self.verified_emitted / self.verifications if self.verifications else 1.0

    def stats(self) -> dict[str, float]:
        """Return the rollout's metrics; draft positions count from 1."""
        steps = max(self.decode_steps, 1)
        stats = {
            "speculation/acceptance_length": self.acceptance_length,
            "speculation/off_share": self.off_steps / steps,
            "speculation/k_mean": self.sum_k / steps,
            "speculation/switches": float(self.switches),
        }
        for position, drafted in sorted(self.drafted_at.items()):
            stats[f"speculation/acceptance_rate_pos_{position + 1}"] = self.accepted_at[position] / drafted
        if (total := sum(self.arm_seconds.values())) > 0:
            stats["speculation/learned_share"] = self.learned_seconds / total
        for arm, seconds in sorted(self.arm_seconds.items()):
            if seconds > 0:
                stats[f"speculation/tokens_per_s_{arm}"] = self.arm_tokens[arm] / seconds
        return stats
