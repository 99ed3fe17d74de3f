"""Text that is sampled under speculation follows the policy exactly: every text of a tiny vocabulary is counted.

The policy knows 6 tokens and writes at most 3, so the probability of every text is known. The drafter is a random head,
or a look-up in a prompt made to match whatever comes; both are mostly wrong, which is where a faulty verification
shows. One head has logits that are no finite numbers. On a GPU the same is counted under vLLM's V2 runner with CUDA
graphs and asynchronous scheduling, in both types; `--junit-xml FILE` of pytest keeps what was counted.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.conftest import save_policy
from tests.support.drafters.draft_texts import make_drafter
from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import ScriptedSelector, engine_of, write_in_pieces
from tlt_lightning.data.prompts import PromptSource
from tlt_lightning.data.streams.conversations import ConversationStream
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.engine import RolloutProgress, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.environments.turns import Turns
from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer
from tlt_lightning.rollout import Prompt, Request, Response, Sampling
from tlt_lightning.seeds import seed_of
from tlt_lightning.speculation.strategy import Drafter

pytestmark = pytest.mark.vllm

VOCAB, HORIZON, END = 6, 3, 1
# 3 is followed by everything but the end: a look-up always finds.
PROMPT = [int(token) for token in "3023243353403523"]
NUM_DRAWS, SEEDS = 512, (1, 2)

CASES: dict[str, dict[str, Any]] = {
    "greedy drafts and look-ups": {"draft_sampling": "greedy", "siblings": True, "ngram": True},
    "sampled drafts and look-ups": {"draft_sampling": "probabilistic", "siblings": True, "ngram": True},
    "sampled drafts, the head alone": {"draft_sampling": "probabilistic"},
    "sampled drafts, a head that overflows": {"draft_sampling": "probabilistic"},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "greedy drafts of a block and look-ups": {"draft_sampling": "greedy", "siblings": True, "ngram": True},
    "sampled drafts of a block and look-ups": {"draft_sampling": "probabilistic", "siblings": True, "ngram": True},
    "sampled drafts of a block head": {"draft_sampling": "probabilistic"},
    "sampled drafts of a block head that overflows": {"draft_sampling": "probabilistic"},
}
"""With a DSpark head, which vLLM serves on GPUs alone, in 16 bit: there its FlashAttention lets rows see later ones."""
SOME = torch.tensor([1, 1, 2, 2])
"""Map of a head alone to the tokens that it drafts: 1, 2, 4 and 5."""


ON_GPU = pytest.mark.gpu
GRAPHS = [
    pytest.param((case, dtype), id=f"{case}, graphs, {dtype}", marks=ON_GPU)
    for case in (*CASES, *BLOCKS)
    for dtype in (("bfloat16",) if case in BLOCKS else ("float32", "bfloat16"))
]


class Setup(NamedTuple):
    engine: VLLMEngine
    selector: ScriptedSelector
    drafters: list[Drafter]
    policy: str
    name: str
    tolerance: float  # of a log-prob, against float32 on the CPU


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("small")
    return str(save_policy(path, vocab_size=VOCAB, num_hidden_layers=4, initializer_range=0.1))


def save_eagle(policy: str, path: Path, num_drafted: int | None, *, overflows: bool) -> tuple[str, dict[str, Tensor]]:
    head = make_head(policy, seed=3, draft_vocab_size=num_drafted)
    if overflows:  # finite weights, and logits that are infinite or no numbers
        with torch.no_grad():
            head.norm.weight.fill_(3e38)
    return save_head(head, path), head.state_dict()


def save_block(policy: str, path: Path, num_drafted: int | None, *, overflows: bool) -> tuple[str, dict[str, Tensor]]:
    architecture = DSpark(num_layers=2, block_size=4, markov_rank=4)
    drafter = make_drafter(policy, architecture=architecture, draft_vocab_size=num_drafted, seed=3)
    if overflows:
        with torch.no_grad():
            dict(drafter.trainable_tensors())["norm.weight"].fill_(3e38)
    return str(drafter.export(path)), dict(drafter.trainable_tensors())


@pytest.fixture(scope="module", params=[*(pytest.param((case, ""), id=case) for case in CASES), *GRAPHS])
def setup(request: pytest.FixtureRequest, policy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    name, graphs_dtype = request.param
    case, dtype = (CASES | BLOCKS)[name], graphs_dtype or "float32"
    drafters: list[Drafter] = ["learned", *(("sibling", "ngram", "mixed") if case.get("siblings") else ())]
    is_alone = drafters == ["learned"]
    num_drafted, folder = len(SOME) if is_alone else None, tmp_path_factory.mktemp("head")
    save = save_block if name in BLOCKS else save_eagle
    path, tensors = save(policy, folder, num_drafted, overflows="overflows" in name)
    selector = ScriptedSelector(tuple(drafters), longest=3)
    speculation = Speculation(selector=selector, head=path, max_draft_tokens=3, steps_per_choice=1, **case)
    with engine_of(policy, speculation, max_num_seqs=128, enforce_eager=not graphs_dtype, dtype=dtype) as engine:
        parts = engine.inspect()
        parts.controller.alarm.window = 10**9  # the head is meant to be wrong
        if is_alone:  # other tokens than those it was loaded with
            engine.update_drafter([*tensors.items(), ("d2t", SOME)], 1)
        if graphs_dtype:
            assert parts.graphs is not None
            assert parts.engine.vllm_config.scheduler_config.async_scheduling
        on_gpu = torch.cuda.is_available()  # where vLLM's attention takes TF32 for float32
        rounding = 0.1 if dtype == "bfloat16" else 5e-3 if on_gpu else 2e-4
        yield Setup(engine, selector, drafters, policy, f"{name}, graphs, {dtype}" if graphs_dtype else name, rounding)


def text_logps(
    policy: Any, sampling: Sampling, prompt: Sequence[int] = PROMPT, horizon: int = HORIZON
) -> dict[tuple[int, ...], list[float]]:
    """Every text that a policy, a path or a model, can write, with the log-probability of each of its tokens."""
    model = AutoModelForCausalLM.from_pretrained(policy).eval() if isinstance(policy, str) else policy
    texts: dict[tuple[int, ...], list[float]] = {}
    open_texts: dict[tuple[int, ...], list[float]] = {(): []}
    for length in range(1, horizon + 1):
        prefixes = list(open_texts)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes])).logits[:, -1].float()
        logps = limited(logits / sampling.temperature, sampling).log_softmax(-1).tolist()
        longer = {
            (*prefix, token): [*open_texts[prefix], row[token]]
            for prefix, row in zip(prefixes, logps, strict=True)
            for token in range(VOCAB)
            if row[token] > -math.inf
        }
        open_texts = {text: values for text, values in longer.items() if text[-1] != END and length < horizon}
        texts |= {text: values for text, values in longer.items() if text not in open_texts}
    return texts


def limited(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with what top-k and top-p leave out at minus infinity, (N, V)."""
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -math.inf)
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    is_beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
    return logits.masked_fill(is_beyond.scatter(-1, order, is_beyond), -math.inf)


def draw(setup: Setup, sampling: Sampling, seed: int, num_draws: int = NUM_DRAWS) -> list[Response]:
    """Responses of which each has noise of its own, as in a run."""
    requests = [Request(id=i, prompt_ids=PROMPT, seed=seed_of(seed, i)) for i in range(num_draws)]
    return list(setup.engine.generate(requests, sampling, seed=seed))


def probabilities_of(logps: dict[tuple[int, ...], list[float]]) -> dict[tuple[int, ...], float]:
    probabilities = {text: math.exp(sum(parts)) for text, parts in logps.items()}
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    return probabilities


def cycle(setup: Setup, drafter: Drafter | None) -> None:
    """Another strategy of `drafter` (None: of any) in every step, off among them."""
    arms = [arm for arm in setup.selector.all_arms if drafter in (None, arm.drafter)]
    count = iter(range(10**9))
    setup.selector.script = lambda state: arms[7 * next(count) % len(arms)]


def chi_square_p(counts: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """P-value of the counts; texts expected fewer than five times are taken together."""
    assert set(counts) <= set(probabilities)
    total, statistic, cells, rest = counts.total(), 0.0, 0, [0.0, 0.0]
    for text, probability in probabilities.items():
        expected = total * probability
        if expected < 5:
            rest = [rest[0] + counts[text], rest[1] + expected]
        else:
            statistic, cells = statistic + (counts[text] - expected) ** 2 / expected, cells + 1
    if rest[1] > 0:
        statistic, cells = statistic + (rest[0] - rest[1]) ** 2 / rest[1], cells + 1
    return torch.special.gammaincc(torch.tensor((cells - 1) / 2.0), torch.tensor(statistic / 2)).item()


def uniform_p(values: list[float]) -> float:
    """Kolmogorov's p-value that `values` are uniform on [0, 1]."""
    ordered, n = sorted(values), len(values)
    distance = max(max((i + 1) / n - value, value - i / n) for i, value in enumerate(ordered))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 50)))


def test_every_text_is_as_likely_as_it_should_be(setup: Setup, record_property: Callable[[str, object], None]) -> None:
    values = []
    for sampling in (Sampling(max_tokens=HORIZON, temperature=0.7), Sampling(max_tokens=HORIZON)):
        logps = text_logps(setup.policy, sampling)
        probabilities = probabilities_of(logps)
        # Of one drafter all strategies are the same ones: a p-value counted twice is not uniform.
        for drafter in [*setup.drafters, None] if len(setup.drafters) > 1 else [None]:
            pooled: Counter[tuple[int, ...]] = Counter()
            for seed in SEEDS:
                cycle(setup, drafter)
                responses = draw(setup, sampling, seed)
                counts = Counter(tuple(response.token_ids) for response in responses)
                values.append(chi_square_p(counts, probabilities))
                pooled += counts
                for response in responses:
                    assert response.logps == pytest.approx(logps[tuple(response.token_ids)], abs=setup.tolerance)
            found, stats = chi_square_p(pooled, probabilities), setup.engine.stats()
            row = {"engine": setup.name, "drafter": drafter or "any", "temperature": sampling.temperature}
            row |= {"texts": len(probabilities), "draws": pooled.total(), "p": found}
            row["acceptance length"] = stats["speculation/acceptance_length"]
            record_property("enumeration", row | {"graphs": stats.get("speculation/graph_hits")})
            assert found > 1e-4, (drafter, sampling)
            assert stats["speculation/acceptance_length"] > 1
            assert "graphs" not in setup.name or stats["speculation/graph_hits"] > 0
    assert uniform_p(values) > 1e-3, sorted(values)


def test_texts_whose_weights_change_at_every_step_are_as_likely_as_they_should_be(setup: Setup) -> None:
    """Each token follows the weights of its segment, given the text before it: counted by weights and text so far."""
    sampling, steps, noise = Sampling(max_tokens=HORIZON), iter(range(1, 10**9)), torch.Generator().manual_seed(1)
    policies = [load_policy(setup.policy) for _ in range(2)]
    with torch.no_grad():
        for parameter in policies[1].parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    laws = [
        {text[: n + 1]: logps[n] for text, logps in text_logps(policy, sampling).items() for n in range(len(text))}
        for policy in policies
    ]
    assert max(abs(laws[0][text] - laws[1][text]) for text in laws[0]) > 0.5

    def push(_: RolloutProgress) -> None:
        number = next(steps)
        setup.engine.update_weights(PolicyWeights(policies[number % 2]), number)

    cycle(setup, None)
    requests = [Request(id=i, prompt_ids=PROMPT, seed=seed_of(5, i)) for i in range(2 * NUM_DRAWS)]
    counts: Counter[tuple[int, tuple[int, ...]]] = Counter()
    try:
        for response in setup.engine.generate(requests, sampling, seed=0, on_progress=push):
            versions = [version for version, count in response.segments for _ in range(count)]
            for n, (version, logp) in enumerate(zip(versions, response.logps, strict=True)):
                text = tuple(response.token_ids[: n + 1])
                counts[version % 2, text] += 1
                assert logp == pytest.approx(laws[version % 2][text], abs=setup.tolerance)
    finally:
        setup.engine.update_weights(PolicyWeights(policies[0]), 0)
    by_start: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for (number, text), count in counts.items():
        by_start[number, text[:-1]] += count
    statistic, degrees = 0.0, 0
    for (number, start), total in by_start.items():
        expected = {token: total * math.exp(laws[number][*start, token]) for token in range(VOCAB)}
        if min(expected.values()) >= 5:
            statistic += sum((counts[number, (*start, token)] - e) ** 2 / e for token, e in expected.items())
            degrees += VOCAB - 1
    assert degrees >= 4 * (VOCAB - 1)
    assert torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2)).item() > 1e-4


def test_stopped_and_continued_texts_are_as_likely_as_they_should_be(setup: Setup) -> None:
    sampling = Sampling(max_tokens=HORIZON)
    logps = text_logps(setup.policy, sampling)
    cycle(setup, None)
    for num_steps, seeds in ((5, [None] * NUM_DRAWS), (2, range(NUM_DRAWS))):  # without and with noise of their own
        requests = [Request(id=i, prompt_ids=PROMPT, seed=seed) for i, seed in enumerate(seeds)]
        responses = write_in_pieces(setup.engine, requests, sampling, num_steps)  # others wait meanwhile
        assert chi_square_p(Counter(tuple(r.token_ids) for r in responses), probabilities_of(logps)) > 1e-4
        for response in responses:
            assert response.logps == pytest.approx(logps[tuple(response.token_ids)], abs=setup.tolerance)


class Repeating:
    """Says what it heard, once; look-ups find it where the second turn begins."""

    def reset(self, **row: Any) -> None:
        self.num_turns = 0

    def step(self, text: str) -> str | None:
        self.num_turns += 1
        return f": {text} =" if self.num_turns == 1 else None


def test_conversations_of_two_turns_are_as_likely_as_they_should_be(setup: Setup) -> None:
    """Each turn has two tokens at most, of three kinds; what the environment says between them depends on the first."""
    length, tokenizer = 2, load_tokenizer(setup.policy)
    sampling, turns = Sampling(max_tokens=16, top_k=3), Turns(tokenizer, None, end_tokens=[END])
    model = AutoModelForCausalLM.from_pretrained(setup.policy).eval()
    logps: dict[tuple[int, ...], list[float]] = {}
    for first, of_first in text_logps(model, sampling, horizon=length).items():
        said = [] if first[-1] == END else [END]
        said += tokenizer(f": {turns.words(first)} =")["input_ids"]
        for second, of_second in text_logps(model, sampling, [*PROMPT, *first, *said], length).items():
            logps[*first, *said, *second] = [*of_first, *[0.0] * len(said), *of_second]
    cycle(setup, None)
    stream = ConversationStream(setup.engine, Environments(Repeating), TurnLimits(most=2, tokens=length))
    stream.speak(PromptSource(rows=[{}], answer_column=None), turns, len(PROMPT))
    requests = [Request(id=i, prompt_ids=PROMPT, seed=seed_of(9, i)) for i in range(2 * NUM_DRAWS)]
    stream.ask(requests, sampling, seed=9, prompts=[Prompt("", tuple(PROMPT), row={})] * len(requests))
    responses = list(stream)
    stream.close()
    assert chi_square_p(Counter(tuple(r.token_ids) for r in responses), probabilities_of(logps)) > 1e-4
    for response in responses:
        assert response.logps == pytest.approx(logps[tuple(response.token_ids)], abs=setup.tolerance)
    later = [at >= response.turns[1][0] and kept for response in responses for at, _, _, kept in response.drafts]
    assert any(later) or "overflows" in setup.name  # of a block head's drafts that are no numbers none is kept


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8, "temperature": 0.7}])
def test_top_k_and_top_p_hold_for_drafts(setup: Setup, limits: dict[str, Any]) -> None:
    sampling = Sampling(**{"max_tokens": HORIZON, **limits})
    logps = text_logps(setup.policy, sampling)
    cycle(setup, None)
    responses = draw(setup, sampling, 1)
    assert chi_square_p(Counter(tuple(r.token_ids) for r in responses), probabilities_of(logps)) > 1e-4
    for response in responses:
        assert response.logps == pytest.approx(logps[tuple(response.token_ids)], abs=setup.tolerance)


def test_the_test_sees_a_small_bias(policy: str) -> None:
    probabilities = probabilities_of(text_logps(policy, Sampling(max_tokens=HORIZON)))
    biased = probabilities_of(text_logps(policy, Sampling(max_tokens=HORIZON, temperature=0.8)))
    seeded = torch.Generator().manual_seed(0)
    draws = torch.multinomial(torch.tensor(list(biased.values())), 4 * NUM_DRAWS, replacement=True, generator=seeded)
    texts = list(biased)
    assert chi_square_p(Counter(texts[i] for i in draws.tolist()), probabilities) < 1e-4


def test_same_seed_same_responses(setup: Setup) -> None:
    fixed = [arm for arm in setup.selector.all_arms if arm.drafter != "mixed"]  # which goes by what it saw before
    arm = fixed[-1]
    setup.selector.script = lambda state: arm
    first, again, other = (
        sorted((r.request_id, tuple(r.token_ids)) for r in draw(setup, Sampling(max_tokens=HORIZON), seed))
        for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other
