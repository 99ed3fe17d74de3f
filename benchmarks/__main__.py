"""Run one benchmark: `python -m benchmarks <name> [options]`; without a name, list them."""

from __future__ import annotations

import runpy
import sys

BENCHMARKS = {
    "target": "benchmarks.target.run",
    "pad_to_7b": "benchmarks.target.pad_to_7b",
    "rollout": "benchmarks.rollout.run",
    "lossless": "benchmarks.lossless.run",
    "end_to_end": "benchmarks.end_to_end.run",
    "idle_windows": "benchmarks.end_to_end.idle_windows",
    "learning": "benchmarks.end_to_end.learning",
    "step_time": "benchmarks.micro.step_time",
    "lookup_costs": "benchmarks.micro.lookup_costs",
    "drafter_costs": "benchmarks.micro.drafter_costs",
    "selector_regret": "benchmarks.simulation.selector_regret",
}


def main() -> None:
    """Run the benchmark that the command line names, with the arguments after its name."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        raise SystemExit(f"usage: python -m benchmarks {{{','.join(BENCHMARKS)}}} [--help] [options]")
    # `alter_sys`: Lightning and `multiprocessing` start further processes of the module that `__main__` names.
    runpy.run_module(BENCHMARKS[sys.argv.pop(1)], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
