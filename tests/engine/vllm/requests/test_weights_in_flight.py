"""New weights while requests run: every token has the log-prob of the weights that wrote it, after the right cache."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import PROMPTS, ScriptedSelector, save_endless_policy
from tlt_lightning.engine import RolloutProgress, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.speculation.strategy import Strategy

pytestmark = pytest.mark.vllm

BLOCK = 32
SAMPLING = Sampling(max_tokens=50)
LONG = [token for prompt in (*PROMPTS, *PROMPTS) for token in prompt]  # longer than a block

Cuts = Sequence[tuple[int, int]]
"""Number of a policy, and how many tokens there were when it ended."""


class SmallBlocks(VLLMEngine):
    """Shares prefixes of a few tokens: a CPU's blocks hold 128."""

    chunk: int | None = None

    def _engine_args(self, *args: Any) -> Any:
        found = super()._engine_args(*args)
        found.block_size = BLOCK
        if self.chunk is not None:
            found.max_num_batched_tokens = self.chunk
        return found


class Setup(NamedTuple):
    engine: VLLMEngine
    policies: list[nn.Module]
    speculative: str
    is_async: bool

    @property
    def keeps(self) -> bool:
        return self.engine.kv_on_update == "keep"

    def push(self, version: int) -> None:
        self.engine.update_weights(PolicyWeights(self.policies[version % len(self.policies)]), version)

    def write(
        self, requests: Sequence[Request], updates: dict[int, Callable[[], Any]], sampling: Sampling = SAMPLING
    ) -> dict[int, Response]:
        """The responses by id; `updates` are called after so many steps."""
        steps = 0

        def on_progress(progress: RolloutProgress) -> None:
            nonlocal steps
            steps += 1
            updates.get(steps, lambda: None)()

        return {r.request_id: r for r in self.engine.generate(requests, sampling, seed=0, on_progress=on_progress)}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    policy = save_endless_policy(tmp_path_factory.mktemp("policy"))
    return policy, save_head(make_head(policy, seed=3), tmp_path_factory.mktemp("head"))


def start(
    paths: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    kv: Literal["keep", "recompute"],
    *,
    speculative: str = "",
    is_async: bool = False,
    chunk: int | None = None,
) -> Setup:
    """A live engine; asynchronous as on a GPU where wanted, which vLLM's CPU build is not by itself."""
    from vllm.platforms import current_platform

    path, head = paths
    if is_async:
        check = current_platform.check_and_update_config

        def check_and_schedule_ahead(config: Any) -> None:
            check(config)
            config.scheduler_config.async_scheduling = True

        monkeypatch.setattr(current_platform, "check_and_update_config", check_and_schedule_ahead)
    speculation = None
    if speculative:
        drafter: Any = speculative
        selector = ScriptedSelector((drafter,), longest=4)
        selector.script = lambda state: Strategy(4, drafter)
        speculation = Speculation(
            selector=selector,
            head=head if drafter == "learned" else None,
            ngram=drafter == "ngram",
            max_draft_tokens=4,
            draft_sampling="probabilistic",
            steps_per_choice=1,
        )
    engine = SmallBlocks(
        dtype="float32",
        kv_cache_gib=0.0625,
        max_num_seqs=8,
        enforce_eager=True,
        sleep=False,
        kv_on_update=kv,
        speculation=speculation,
    )
    engine.chunk = chunk
    engine.setup(path, max_model_len=192, seed=0)
    return Setup(engine, [changed(path, seed) for seed in range(3)], speculative, is_async)


def changed(path: str, seed: int) -> nn.Module:
    """The saved policy, with noise of 15% unless `seed` is 0."""
    policy = load_policy(path)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            size = 0.15 * float(parameter.std()) if seed else 0.0
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))
    return policy


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kv, speculative, is_async), id=f"{kv}-{speculative or 'plain'}-{'async' if is_async else 'sync'}")
        for kv in ("keep", "recompute")
        for speculative, is_async in (("", False), ("", True), ("ngram", False), ("learned", False))
    ],
)
def setup(request: pytest.FixtureRequest, paths: tuple[str, str]) -> Iterator[Setup]:
    kv, speculative, is_async = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = start(paths, monkeypatch, kv, speculative=speculative, is_async=is_async)
        yield found
        found.engine.close()


def logps_by(policies: Sequence[nn.Module], prompt: Sequence[int], tokens: Sequence[int], cuts: Cuts) -> Tensor:
    """Log-probs of `tokens`, (T,), by policies of which each goes on with the cache that those before it filled."""
    ids, cache, rows, start = torch.tensor([[*prompt, *tokens]]), DynamicCache(), [], 0
    for number, end in cuts:
        read = ids[:, start : len(prompt) + end - 1]
        if read.shape[1]:
            with torch.no_grad():
                rows.append(policies[number](input_ids=read, past_key_values=cache, use_cache=True).logits[0])
        start += read.shape[1]
    logps = torch.cat(rows)[len(prompt) - 1 :].float().log_softmax(-1)
    return logps.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def reference(setup: Setup, request: Request, response: Response, shift: int = 0) -> Tensor:
    """Log-probs that the response should have; with `shift` those of weights that had come so many tokens later."""
    ends = [*accumulate(count for _, count in response.segments)]
    cuts = [(version % len(setup.policies), end) for (version, _), end in zip(response.segments, ends, strict=True)]
    cuts = [(number, end + shift * (end < ends[-1])) for number, end in cuts]
    if setup.keeps:
        return logps_by(setup.policies, request.prompt_ids, response.token_ids, cuts)
    whole = [logps_by(setup.policies, request.prompt_ids, response.token_ids, [(n, ends[-1])]) for n, _ in cuts]
    starts = [0, *(end for _, end in cuts)]
    return torch.cat([row[at:end] for row, at, (_, end) in zip(whole, starts, cuts, strict=False)])


def check(setup: Setup, requests: Sequence[Request], found: dict[int, Response]) -> None:
    for request in requests:
        response = found[request.id]
        logps = torch.tensor(response.logps)
        assert sum(count for _, count in response.segments) == len(response.token_ids)
        assert float((logps - reference(setup, request, response)).abs().max()) < 1e-4
        if len(response.segments) > 1:
            for shift in (-1, 1):
                assert float((logps - reference(setup, request, response, shift)).abs().max()) > 1e-3


def asked(num: int = 6, **settings: Any) -> list[Request]:
    return [Request(id=i, prompt_ids=PROMPTS[i % 4], group=i % 4, seed=100 + i, **settings) for i in range(num)]


def test_every_token_has_the_log_prob_of_the_weights_that_wrote_it(setup: Setup) -> None:
    setup.push(0)
    requests = asked()
    found = setup.write(requests, {9: lambda: setup.push(1), 14: lambda: setup.push(2)})
    assert sum(response.policy_versions == (0, 1, 2) for response in found.values()) > 3
    check(setup, requests, found)
