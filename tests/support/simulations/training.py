"""Simulate a run whose drafter is trained by a budget; its learning is not the model that a forecast fits."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail.budget import MeasuredIteration, TrainingBudget
from tlt_lightning.long_tail.publishing import PublishDecision

ERROR = 0.02  # of a measured acceptance


@dataclass
class World:
    """Describes a run; tokens per step rise as 1 + (best - 1) * skill / (skill + 1), and the policy's moves cost skill.

    The defaults are much like a new head in the 7B shape (benchmarks/results/end_to_end_7b_cold_coupled.md).

    Args:
        best: Tokens per step that a head can reach.
        skill: What the head begins with, in passes over an iteration's tokens.
        speed: Skill that training on an iteration's tokens gives.
        lag: Skill that does not show in drafts yet.
        drift: Share of the skill that is lost in an iteration, by its number.
        decode: Decode seconds at one token per step.
        exponent: Decoding is tokens per step to this power as fast.
        price: Seconds of training on all of an iteration's tokens, by iteration.
        usage: Share of the decode seconds with the head.
        idle_share: What idle windows have room for.
        other: Seconds of everything else.
    """

    best: float = 8.0
    skill: float = 0.0
    speed: float = 0.235
    lag: float = 0.0
    drift: Callable[[int], float] = lambda iteration: 0.0
    decode: float = 40.0
    exponent: float = 0.4
    price: Callable[[int], float] = lambda iteration: 30.0
    usage: float = 1.0
    idle_share: float = 0.0
    other: float = 10.0

    def speed_up(self, skill: float) -> float:
        """Return how many times as fast a head of that skill makes decoding."""
        return self.acceptance(skill) ** self.exponent

    def acceptance(self, skill: float) -> float:
        """Return the tokens per step of a head of that skill."""
        skill = max(0.0, skill - self.lag)
        return 1 + (self.best - 1) * skill / (skill + 1)


@dataclass
class Outcome:
    """Holds a run's seconds, those of them that training cost, and the share trained on by iteration."""

    seconds: float
    cost: float
    shares: list[float]


def simulate(world: World, budget: TrainingBudget, num_iterations: int = 100, seed: int = 0) -> Outcome:
    """Run `num_iterations`, whose number the budget knows."""
    rng = random.Random(seed)
    served = trained = world.skill
    outcome, pending, is_cold = Outcome(0.0, 0.0, []), False, world.skill == 0
    for iteration in range(num_iterations):
        cost, remaining = 0.0, num_iterations - iteration - 1
        if pending:
            before, after = (world.acceptance(skill) for skill in (served, trained))
            seen = max(1.0, after + rng.gauss(0, ERROR))
            bound = seen - before - 1.28 * ERROR
            published = bound > 0
            old, new = (DraftQuality((length - 1,), (), (), (), 1) for length in (before, seen))
            decision = PublishDecision(old, new, seen - before, bound, published, has_diverged=False)
            budget.note_decision(decision, remaining)
            if published:
                served, is_cold = trained, False
            cost += 0.1
        share = budget.decide(iteration, remaining)
        plain = world.decode * (1 - world.usage)
        with_head = (world.decode - plain) / (1 if is_cold else world.speed_up(served))
        decode = plain + with_head
        seconds = world.other + decode
        idle = 0.0 if share is None else world.idle_share
        rest = 0.0 if share is None else max(0.0, share - idle)
        if rest * world.price(iteration) > budget.limit(seconds):
            rest = budget.limit(seconds) / world.price(iteration)
        training = rest * world.price(iteration)
        cost += training + (0.1 if share is not None else 0.0)
        trained += world.speed * (rest + idle)
        budget.note_iteration(
            MeasuredIteration(
                seconds=seconds + cost,
                decode_seconds=decode,
                cost=cost,
                training_seconds=training,
                share=rest,
                idle_share=idle,
                learned_share=None if is_cold else with_head / decode,
            )
        )
        pending = rest + idle > 0 or (pending and share is not None)
        served, trained = (skill * (1 - world.drift(iteration)) for skill in (served, trained))
        outcome.seconds += seconds + cost
        outcome.cost += cost
        outcome.shares.append(rest)
    return outcome
