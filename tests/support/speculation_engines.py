"""Policies, heads and engines of the speculation tests; a selector that does what a test says."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import save_policy
from tests.support.drafters.draft_texts import make_drafter, pack, read_by_target, train
from tests.support.drafters.eagle_head import make_head, save_head, train_head
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.engine import Quantization, RolloutProgress, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.speculation.strategy import OFF, Drafter, SelectorState, Strategy, StrategySelector

MAX_MODEL_LEN = 128
PROMPTS = [[12, 13, 3, 15, 4], [14, 13, 3, 17, 4], [12, 19, 3, 22, 4], [30, 5, 3, 25, 4]]
GREEDY = Sampling(max_tokens=64, temperature=0)


class ScriptedSelector(StrategySelector):
    """Chooses what `script` says; remembers what it was told."""

    def __init__(self, drafters: tuple[Drafter, ...] = ("learned",), longest: int = 5) -> None:
        self.all_arms = (OFF, *(Strategy(k, drafter) for k in range(1, longest + 1) for drafter in drafters))
        self.script: Callable[[SelectorState], Strategy] = lambda state: OFF
        self.records: list[tuple[SelectorState, Strategy, tuple[int, ...], float]] = []

    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        return self.all_arms

    def select(self, state: SelectorState) -> Strategy:
        return self.script(state)

    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        self.records.append((state, strategy, num_emitted, seconds))

    def state_dict(self) -> dict[str, Any]:
        return {"records": len(self.records)}

    def at_random(self, seed: int) -> None:
        """Another strategy in every step, off in one of six."""
        draw = random.Random(seed)
        self.script = lambda state: OFF if draw.random() < 1 / 6 else draw.choice(self.all_arms)

    def off_and_on(self, strategy: Strategy, steps: int) -> None:
        """Off and `strategy` in turn, for `steps` steps each."""
        count = iter(range(10**9))
        self.script = lambda state: strategy if next(count) // steps % 2 else OFF


def save_endless_policy(path: Path, architecture: str = "qwen2", **overrides: object) -> str:
    """A policy of four layers that all but never writes its end-of-sequence token."""
    save_policy(path, architecture, num_hidden_layers=4, **overrides)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name][1] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


def greedy_texts(policy: str, num_tokens: int, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the policy's texts after prompts of one length, by `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    model.generation_config.eos_token_id = None
    written = model.generate(torch.tensor(prompts), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return written.tolist()


def greedy_gap(policy: str, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """Measure how far any written token's logit is below the likeliest one's, in float32."""
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    gaps = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        gaps.append(logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0])
    return float(torch.cat(gaps).max())


def save_trained_head(policy: str, path: Path, num_tokens: int = 64) -> str:
    """A head that knows the policy's greedy answers to the test's prompts."""
    head = train_head(make_head(policy), policy, greedy_texts(policy, num_tokens), num_steps=120)
    return save_head(head, path)


def train_block_head(policy: str, num_tokens: int = 64, **arguments: Any) -> DrafterModule:
    """A DSpark head of blocks of six that knows the policy's greedy answers to the test's prompts."""
    drafter = make_drafter(policy, architecture=DSpark(num_layers=2, block_size=6, markov_rank=8), **arguments)
    texts = read_by_target(policy, greedy_texts(policy, num_tokens), len(PROMPTS[0]), drafter.layer_ids)
    train(drafter, pack(texts, 512), num_steps=150)
    return drafter


@contextmanager
def engine_of(
    policy: str,
    speculation: Speculation | None,
    max_num_seqs: int = 8,
    enforce_eager: bool = True,
    sleep: bool = False,  # vLLM allows one engine that can sleep per process
    dtype: Literal["float32", "bfloat16"] = "float32",
    quantization: Quantization | None = None,
) -> Iterator[VLLMEngine]:
    """A live engine that holds the policy's weights; only one may live at a time."""
    engine = VLLMEngine(
        dtype=dtype,
        kv_cache_gib=0.0625,
        max_num_seqs=max_num_seqs,
        enforce_eager=enforce_eager,
        sleep=sleep,
        speculation=speculation,
        quantization=quantization,
    )
    engine.setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
    try:
        engine.update_weights(PolicyWeights(load_policy(policy)), 0)
        yield engine
    finally:
        engine.close()


def siblings(num: int = 3, prompts: list[list[int]] = PROMPTS) -> list[Request]:
    """`num` requests for each prompt, each with a limit of its own."""
    pairs = [(group, prompt) for _ in range(num) for group, prompt in enumerate(prompts)]
    return [
        Request(id=i, prompt_ids=prompt, group=group, max_tokens=64 - 5 * i) for i, (group, prompt) in enumerate(pairs)
    ]


def write(engine: VLLMEngine, requests: list[Request], sampling: Sampling = GREEDY, seed: int = 0) -> list[list[int]]:
    """The responses' tokens, in the order of the requests."""
    responses = {response.request_id: response for response in engine.generate(requests, sampling, seed=seed)}
    return [list(responses[request.id].token_ids) for request in requests]


def write_in_pieces(
    engine: VLLMEngine, requests: list[Request], sampling: Sampling, num_steps: int, seed: int = 0
) -> list[Response]:
    """The responses, all stopped after every `num_steps` engine steps and continued in a rollout of its own."""
    written: dict[int, Response] = {}
    first_seed = seed
    while open_requests := [r for r in requests if r.id not in written or written[r.id].is_unfinished]:
        steps = itertools.count(1)

        def stop(progress: RolloutProgress, steps: Iterator[int] = steps) -> None:
            if next(steps) == num_steps:
                engine.stop([request.id for request in requests])

        asked = [replace(request, written=written.get(request.id)) for request in open_requests]
        for response in engine.generate(asked, sampling, seed=seed, on_progress=stop):
            written[response.request_id] = response
        seed += 1000
    assert seed > first_seed + 1000, "nothing was stopped"
    return [written[request.id] for request in requests]
