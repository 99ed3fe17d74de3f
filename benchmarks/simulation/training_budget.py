"""Compare `AdaptiveBudget` with the best constant share of tokens, in simulated runs of 100 iterations.

    python -m benchmarks training_budget

Learning in the simulation is not the budget's model of it (`World`), and the best share is known in hindsight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from benchmarks.common.arguments import parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.simulation.training import World, simulate
from tlt_lightning.long_tail.adaptive_budget import AdaptiveBudget
from tlt_lightning.long_tail.budget import FixedBudget

WORLDS = {
    "no head at the start": World(),
    "the same, training on all tokens takes as long as decoding": World(price=lambda iteration: 40.0),
    "a tenth of the head's skill is lost in each iteration": World(skill=5.0, drift=lambda iteration: 0.1),
    "the same from iteration 40 on, a good head before": World(
        skill=20.0, drift=lambda iteration: 0.1 if iteration >= 40 else 0.0
    ),
    "training takes 20 times as long from iteration 30 on": World(
        drift=lambda iteration: 0.03, price=lambda iteration: 60.0 if iteration >= 30 else 3.0
    ),
    "idle windows for 0.3 of the tokens": replace(World(), idle_share=0.3, drift=lambda iteration: 0.03),
    "a good head, no drift": World(skill=20.0),
    "training teaches nothing": World(skill=2.0, speed=0.0),
    "the head is never chosen": World(usage=0.0),
}
SHARES = tuple(2.0**-number for number in range(8))


def measure(world: World, seeds: Sequence[int]) -> list[float | str]:
    """Return mean seconds of a run without training, of the best constant share, of ours, and ours against that."""
    constant = {0.0: FixedBudget(0.0, every_n_iterations=1000)} | {share: FixedBudget(share) for share in SHARES}
    seconds = {
        share: mean(simulate(world, each, seed=seed).seconds for seed in seeds) for share, each in constant.items()
    }
    best = min(seconds, key=seconds.__getitem__)
    ours = mean(simulate(world, AdaptiveBudget(), seed=seed).seconds for seed in seeds)
    return [seconds[0.0], f"{seconds[best]:,.0f} ({best:g})", ours, f"{100 * (ours / seconds[best] - 1):+.1f}%"]


def main(arguments: Sequence[str]) -> None:
    """Simulate every world and write `training_budget.json` and `.md`."""
    parser = parser_of(__doc__)
    parser.add_argument("--num-seeds", type=int, default=5, help="runs of each world, with seeds from --seed on")
    args = parser.parse_args(arguments)
    seeds = range(args.seed, args.seed + (1 if args.tiny else args.num_seeds))
    rows = [[name, *measure(world, seeds)] for name, world in WORLDS.items()]
    record = about("simulated", args.note, args.seed, on_cpu=True)
    columns = ["", "never trained, s", "best constant share, s (share)", "`AdaptiveBudget`, s", "against the best"]
    lines = [*heading("Budgets of the drafter's training", record), *table(columns, rows)]
    save(args.out / "training_budget", record | {"rows": rows}, lines)
    print("\n".join(lines))
