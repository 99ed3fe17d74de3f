"""What it costs the host to look drafts up: microseconds per running request, step by step through a long tail.

    python -m benchmarks lookup_costs

replays searches of the benchmarks' target (`target/text.py`), in groups of siblings, as an engine would write them: a
few tokens per request and step. In every step each running request is looked up among its siblings, after what they
wrote since has been read, and the finds are packed for the device, all by the code the engine runs. The device works
meanwhile; the time shows where the host is the slower of the two. Each batch size gets the fastest of `--rounds`
rounds, the machine being shared. CPU only; takes some seconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.common.results_file import about, heading, save, table
from benchmarks.target.text import draw_question, write_search
from tlt_lightning.engine.vllm.runner_v2 import pack_lookups
from tlt_lightning.engine.vllm.steering import DeviceSteering
from tlt_lightning.speculation import FixedSelector
from tlt_lightning.speculation.controller import SpeculationControl
from tlt_lightning.speculation.lookup import RunningTexts

DRAFTS = 5
COLUMNS = {"steps": "steps", "found": "found", "us_a_request": "us a request", "ms_a_step": "ms a step"}
EMITTED = (1, 2, 4, 4)  # tokens of a request and step, drawn from these: 2.75 on average, as with a trained head


@dataclass
class Tally:
    """What the steps of one range of batch sizes add up to."""

    steps: int = 0
    look_ups: int = 0
    finds: int = 0
    seconds: float = 0.0


def write_answers(num_prompts: int, group_size: int, seed: int) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer of every request."""
    rng, answers = random.Random(seed), {}
    for group in range(num_prompts):
        question = draw_question(rng)
        prompt = [rng.randrange(100) for _ in range(16)]
        for sample in range(group_size):
            answers[f"{group}-{sample}"] = prompt, write_search(question, rng)
    return answers


def replay(answers: dict[str, tuple[list[int], list[int]]], seed: int) -> dict[int, Tally]:
    """What looking up took, by the power of two that is nearest below the number of requests."""
    from vllm.v1.utils import ConstantList

    rng = random.Random(seed)
    texts = RunningTexts(siblings=True, ngram=False, keeps=False)
    steering = DeviceSteering(SpeculationControl(FixedSelector(DRAFTS, "sibling")), texts)
    written = {name: list(prompt) for name, (prompt, _) in answers.items()}
    requests: dict[str, Any] = {}
    for name, tokens in written.items():
        known = ConstantList(tokens)
        requests[name] = SimpleNamespace(num_tokens=len(tokens), all_token_ids=known)
        texts.add(name, known)
    tallies: dict[int, Tally] = defaultdict(Tally)
    while requests:
        scheduler = SimpleNamespace(running=list(requests.values()), waiting=[], max_num_running_reqs=len(answers))
        scheduler.requests = requests
        steering.before_schedule(scheduler)
        began = time.perf_counter()
        lookups = steering.look_up(list(requests))
        if lookups:
            pack_lookups(list(requests), lookups)
        seconds = time.perf_counter() - began
        tally = tallies[1 << len(requests).bit_length() - 1]
        tally.steps += 1
        tally.look_ups += len(requests)
        tally.finds += len(lookups)
        tally.seconds += seconds
        steering.after_schedule(SimpleNamespace(finished_req_ids=set()))
        for name in list(requests):
            answer, done = answers[name][1], len(written[name]) - len(answers[name][0])
            written[name] += answer[done : done + rng.choice(EMITTED)]
            requests[name].num_tokens = len(written[name])
            if len(written[name]) == len(answers[name][0]) + len(answer):
                del requests[name]
                texts.remove(name)
    return tallies


def render(results: dict[str, Any]) -> str:
    """The report in Markdown."""
    rows = [
        [f"{row['least']} to {2 * row['least'] - 1}", *(row[name] for name in COLUMNS)] for row in results["by_batch"]
    ]
    lines = heading("What looking up costs the host", results)
    lines += [f"{results['requests']} requests in groups of {results['group_size']}, {results['tokens']:,} tokens.", ""]
    return "\n".join([*lines, *table(["running requests", *COLUMNS.values()], rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay some rounds and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="of which the fastest counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    args = parser.parse_args(arguments)
    answers = write_answers(args.num_prompts, args.group_size, args.seed)
    gc.collect()
    gc.freeze()  # as vLLM does once it has started
    rounds = [replay(answers, args.seed) for _ in range(args.rounds)]
    fastest = {size: min(found[size].seconds for found in rounds) for size in rounds[0]}
    results = about("siblings", "", args.seed, on_cpu=True) | {
        "requests": len(answers),
        "group_size": args.group_size,
        "tokens": sum(len(answer) for _, answer in answers.values()),
        "by_batch": [
            {
                "least": size,
                "steps": tally.steps,
                "found": f"{tally.finds / tally.look_ups:.0%}",
                "us_a_request": round(1e6 * fastest[size] / tally.look_ups, 1),
                "ms_a_step": round(1e3 * fastest[size] / tally.steps, 2),
            }
            for size, tally in sorted(rounds[0].items())
        ],
    }
    save(args.out / "lookup_costs.json", results)
    (args.out / "lookup_costs.md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
