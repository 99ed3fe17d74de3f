"""Run one benchmark: `python -m benchmarks <name> [options]`; without a name, list them."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "main_table": "benchmarks.main_table",
    "target": "benchmarks.target.run",
    "pad_to_7b": "benchmarks.target.pad_to_7b",
    "rollout": "benchmarks.rollout.run",
    "environments": "benchmarks.rollout.environments",
    "lossless": "benchmarks.lossless.run",
    "end_to_end": "benchmarks.end_to_end.run",
    "foretold": "benchmarks.end_to_end.foretold",
    "learning": "benchmarks.end_to_end.learning",
    "staleness": "benchmarks.end_to_end.staleness",
    "distillation": "benchmarks.end_to_end.distillation",
    "warm_start": "benchmarks.end_to_end.warm_start",
    "start_up": "benchmarks.micro.start_up",
    "step_time": "benchmarks.micro.step_time",
    "makespan": "benchmarks.micro.makespan",
    "mismatch": "benchmarks.micro.mismatch",
    "update": "benchmarks.micro.update",
    "drafter_step": "benchmarks.micro.drafter_step",
    "cold_head": "benchmarks.micro.cold_head",
    "warm_up": "benchmarks.micro.warm_up",
    "forecast": "benchmarks.micro.forecast",
    "ray_throughput": "benchmarks.micro.ray_throughput",
    "schedules": "benchmarks.schedules.run",
}


def main() -> None:
    """Run the benchmark that the command line names, with the arguments after its name."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        raise SystemExit(f"usage: python -m benchmarks {{{','.join(BENCHMARKS)}}} [--help] [options]")
    importlib.import_module(BENCHMARKS[sys.argv[1]]).main(sys.argv[2:])


if __name__ == "__main__":
    main()
