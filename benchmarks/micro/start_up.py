"""Time a start by part: from the command to the first token.

    python -m benchmarks start_up --models 25m 7b 3b

Each start is a process of its own, as a run's is: imports, the policy under LoRA on the device, vLLM's start by its
parts, the first sync, the selector's measurement of steps, one token. `cold` starts find nothing that was compiled
before, `warm` ones what the cold one before them has left. A model is a size of `target` and `pad_to_7b` with its head,
a policy's folder and a head's (`NAME=POLICY,HEAD`), or a shape: random weights, and a head of random weights. `--tiny`
starts the quickstart's policy on a CPU, with siblings for a head.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common.arguments import FILES, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.common.shapes import SHAPES

CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
"""Environment variables of folders in which what is compiled is kept."""


def start(policy: str, head: str | None, tiny: bool, began: float) -> dict[str, float]:
    """Start in this process; return seconds by part, in their order, since the command at `began` (`time.time`)."""
    from vllm.v1.engine import llm_engine  # noqa: F401 - what takes longest to import

    from tlt_lightning import Sampling, VLLMEngine
    from tlt_lightning.adapters import LoRA
    from tlt_lightning.commands import cli  # noqa: F401 - as a run does
    from tlt_lightning.engine.vllm import internals
    from tlt_lightning.engine.vllm.speculation import Speculation
    from tlt_lightning.policy import PolicyWeights, load_policy
    from tlt_lightning.rollout import Request
    from tlt_lightning.speculation import CostModelSelector

    seconds, last = {"imports": time.time() - began}, time.perf_counter()

    def note(part: str) -> float:
        nonlocal last
        now = time.perf_counter()
        seconds[part], last = now - last, now
        return seconds[part]

    model = load_policy(policy, lora=None if tiny else LoRA(rank=8, base_dtype="bfloat16"))
    model.to("cpu" if tiny else "cuda")  # type: ignore[arg-type]
    note("policy on the device")
    speculation = Speculation(
        head=head, siblings=head is None, selector=CostModelSelector(drafters=("learned" if head else "sibling",))
    )
    cpu: dict[str, Any] = {"dtype": "float32", "kv_cache_gib": 0.25, "enforce_eager": True, "max_num_seqs": 8}
    engine = VLLMEngine(speculation=speculation, **(cpu if tiny else {"dtype": "bfloat16"}))
    engine.setup(policy, max_model_len=1024 if tiny else 4096, seed=0)
    parts = internals.live_executor(engine.inspect().engine).start_up.seconds
    whole = note("rest of vLLM's start")
    seconds |= {f"vLLM: {part}": taken for part, taken in parts.items()}
    seconds["rest of vLLM's start"] = whole - sum(parts.values())
    engine.update_weights(PolicyWeights(model), 0)
    note("first sync")
    engine.warm_up(engine.max_num_seqs)
    note("measuring steps")
    for _ in engine.generate([Request(id=0, prompt_ids=[2, 3, 4])], Sampling(max_tokens=1), seed=0):
        note("first token")
    engine.close()
    return seconds


def prepare(name: str, folder: str) -> tuple[str, str | None]:
    """Return the folders of a model and of its head; write random ones into `folder` for a shape."""
    name, _, given = name.partition("=")
    if given:
        policy, _, head = given.partition(",")
        return policy, head or None
    if name in FILES:
        return FILES[name].policy, FILES[name].head
    from benchmarks.common.random_policy import write_random
    from tlt_lightning.drafter.module import DrafterModule

    policy, head = f"{folder}/{name}", f"{folder}/{name}-head"
    write_random(SHAPES[name], policy)
    drafter = DrafterModule(policy)
    drafter.configure_model()
    drafter.export(head)
    return policy, head


def timed_start(policy: str, head: str | None, caches: str, *, tiny: bool) -> dict[str, float]:
    """Start in a process of its own, with what is compiled in `caches`; return seconds by part."""
    environment = {**os.environ, **{name: f"{caches}/{name.lower()}" for name in CACHES}}
    given = json.dumps([policy, head, tiny, time.time()])
    command = [sys.executable, "-m", "benchmarks.micro.start_up", given]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(next(line for line in printed.splitlines()[::-1] if line.startswith("{"))))


def render(results: dict[str, Any]) -> list[str]:
    """Return the table: a start a column."""
    runs = results["runs"]
    parts = list(dict.fromkeys(part for run in runs for part in run["seconds"]))
    rows = [[part, *(run["seconds"].get(part) for run in runs)] for part in parts]
    rows.append(["**in all**", *(sum(run["seconds"].values()) for run in runs)])
    lines = heading("Start-up", results)
    return [*lines, *table(["seconds", *(f"{run['model']}, {run['start']}" for run in runs)], rows)]


def main(arguments: Sequence[str]) -> None:
    """Start each model cold and warm, and write the table after each start."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["25m", "7b", "3b"], help="sizes, shapes, or NAME=POLICY[,HEAD]")
    parser.add_argument("--warm", type=int, default=1, help="starts after the cold one")
    args = parser.parse_args(arguments)
    runs: list[dict[str, Any]] = []
    results = {**about("tiny" if args.tiny else "start-up", args.note, args.seed), "runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        for name in ["tiny"] if args.tiny else args.models:
            policy, head = prepare(name, folder)
            model = name.partition("=")[0]
            for number in range(1 + args.warm):
                seconds = timed_start(policy, head, f"{folder}/caches-{model}", tiny=args.tiny)
                runs.append({"model": model, "start": "warm" if number else "cold", "seconds": seconds})
                save(args.out / "start_up", results, render(results))
                print("\n".join(render(results)), flush=True)


if __name__ == "__main__":
    print(json.dumps(start(*json.loads(sys.argv[1]))))
