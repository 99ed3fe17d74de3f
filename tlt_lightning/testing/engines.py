"""Check an engine against the policy that it writes with."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.probe import TOLERANCES
from tlt_lightning.engine.requests import expected
from tlt_lightning.policy import PolicyWeights, causal_lm, end_token_ids, load_policy, load_tokenizer
from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.testing.plugin import POLICY, named, shown

MAX_MODEL_LEN = 96


def check_engine(engine: RolloutEngine, policy: str = POLICY) -> None:
    """Check that an engine keeps each of `DUTIES`.

    Args:
        engine: Fresh from its constructor; closed in the end.
        policy: Path or hub name of a small policy.
    """
    try:
        case = EngineCase(engine, policy)
        for duty in DUTIES:
            duty(case)
    finally:
        for _ in range(2):  # the second time has to be safe
            engine.close()


class EngineCase:
    """Holds an engine that is set up, the policy that it writes with, and requests.

    Args:
        engine: Fresh from its constructor.
        policy: Path or hub name.
    """

    def __init__(self, engine: RolloutEngine, policy: str) -> None:
        self.engine, self.policy, self.who = engine, policy, named(engine, "generate")
        self.ends = end_token_ids(policy, load_tokenizer(policy))
        engine.setup(policy, max_model_len=MAX_MODEL_LEN, seed=0)
        self.push()
        draws, size = random.Random(0), self.model.config.vocab_size
        prompts = [[draws.randrange(size) for _ in range(length)] for length in (5, 5, 7)]
        self.requests = [Request(id=i, prompt_ids=prompts[i // 4], group=i // 4) for i in range(12)]

    def push(self, change: float = 0.0) -> None:
        """Load the policy, change its weights by noise of this size, and push them into the engine."""
        self.model, version = causal_lm(load_policy(self.policy)), self.engine.policy_version + 1
        noise = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(change * torch.randn(parameter.shape, generator=noise))
        self.engine.attach(self.model)
        self.engine.update_weights(PolicyWeights(self.model), version)
        self.engine.policy_version = version  # as a sync does
        self.engine.warm_up()

    def write(self, asked: Any = None, *, seed: int = 0, on_progress: Any = None, **sampling: Any) -> list[Response]:
        """Return the responses to the requests `asked`, in their order, None being all; each has the right form."""
        requests: list[Request] = asked or self.requests
        given: dict[str, Any] = {"max_tokens": 16, **sampling}
        open_ids, found = {request.id for request in requests}, dict[int, Response]()
        responses = self.engine.generate(requests, Sampling(**given), seed=seed, on_progress=on_progress)
        for response in expected(responses, open_ids):
            are_lists = isinstance(response.token_ids, Sequence) and isinstance(response.logps, Sequence)
            assert are_lists, f"{self.who} wrote {shown(response)}: give lists as `token_ids` and `logps`, not tensors."
            versions = response.policy_versions
            is_current = versions[-1:] == (self.engine.policy_version,)
            assert is_current, f"{self.who} gave `policy_versions` {versions}: give `(self.policy_version,)`."
            found[response.request_id] = response
        assert not open_ids, f"{self.who} left requests {sorted(open_ids)} without a response: yield one for each."
        return [found[request.id] for request in requests]

    def logps(self, request: Request, response: Response, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the policy's own log-probs of a response's tokens, (T,), and of the likeliest in their places."""
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            logits = self.model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        logps = (logits / temperature).log_softmax(-1)
        return logps.gather(-1, torch.tensor(response.token_ids)[:, None]).squeeze(-1), logps.amax(-1)

    def check_logps(self, when: str, temperature: float = 1.0) -> None:
        """Write, and check the log-probs against the policy's own."""
        pairs = zip(self.requests, self.write(temperature=temperature), strict=True)
        differences = [self.logps(*pair, temperature)[0] - torch.tensor(pair[1].logps) for pair in pairs]
        mean, dtype = float(torch.cat(differences).abs().mean()), self.engine.compute_dtype
        assert mean <= TOLERANCES[dtype], (
            f"{self.who} gave `logps` {mean:.2g} nats from the policy's {when}: give those of the distribution sampled "
            f"from, after temperature, by the newest weights; {TOLERANCES[dtype]} is allowed in {dtype}."
        )


def responses_end_where_they_must(case: EngineCase) -> None:
    """A response ends at the policy's end of sequence, at a stop token, or at the limit of the request."""
    limits = [1, 5, 9] * 4
    asked = [replace(each, max_tokens=limit) for each, limit in zip(case.requests, limits, strict=True)]
    (greedy,) = case.write(case.requests[:1], temperature=0)
    stop = greedy.token_ids[len(greedy.token_ids) // 2]
    for response, limit in zip(case.write(asked, stop_token_ids=(stop,)), limits, strict=True):
        *tokens, last = response.token_ids
        ends = {*case.ends, stop}
        is_right = not ends & {*tokens} and response.finish_reason == ("stop" if last in ends else "length")
        assert is_right and (last in ends or len(tokens) + 1 == limit), (
            f"{case.who} wrote {[*tokens, last]} with `finish_reason` {response.finish_reason!r}: end with the first "
            f"of {sorted(ends)} (stop), or at {limit} tokens (length)."
        )


def logps_are_those_of_the_distribution_sampled_from(case: EngineCase) -> None:
    """Log-probs are the policy's at the temperature, and at temperature 0 each token is its likeliest."""
    for temperature in (1.0, 0.7):
        case.check_logps(f"at temperature {temperature}", temperature)
    for request, response in zip(case.requests, case.write(temperature=0), strict=True):
        chosen, likeliest = case.logps(request, response)
        gap = float((likeliest - chosen).max())
        is_greedy = gap <= TOLERANCES[case.engine.compute_dtype]
        assert is_greedy, f"{case.who} chose at temperature 0 a token {gap:.2g} nats below the likeliest: take that."


def the_seed_decides_the_text(case: EngineCase) -> None:
    """The same seed gives the same text whoever else draws random numbers, and leaves those of the process alone."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = case.write(seed=3)
    is_alone = torch.equal(torch.get_rng_state(), before)
    assert is_alone, f"{case.who} moved the process's random numbers: draw from a generator of the engine's own."
    again, other = case.write(seed=3, on_progress=lambda _: torch.rand(1)), case.write(seed=4)
    assert again == first, f"{case.who} wrote other text with the same `seed`: let it decide, or a resumed run differs."
    assert other != first, f"{case.who} wrote the same text with another `seed`: draw from it."


def new_weights_write_the_next_response(case: EngineCase) -> None:
    """After `update_weights` the responses are those of the new weights, under their version."""
    case.push(change=0.05)
    case.check_logps("after `update_weights` has brought others")
    case.push()


DUTIES: tuple[Callable[[EngineCase], None], ...] = (
    responses_end_where_they_must,
    logps_are_those_of_the_distribution_sampled_from,
    the_seed_decides_the_text,
    new_weights_write_the_next_response,
)
