"""Speculation on a V2 model runner, as far as it needs no GPU."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.engine.vllm.runner_v2 import RunnerV2, keep_drawn, pack_lookups, splice
from tlt_lightning.speculation.controller import StrategyController
from tlt_lightning.speculation.lookup import LEARNED, LookupDraft, LookupDrafter
from tlt_lightning.speculation.strategy import OFF, Strategy


def looked_up(num_known: int, tokens: list[int]) -> LookupDraft:
    return LookupDraft(tokens, "sibling", 2, num_known)


def spliced(written: list[int], continuation: list[int], learned: list[int]) -> list[int]:
    """Drafts of one request of which the host knows 10 tokens and the device also `written`."""
    packed = torch.from_numpy(pack_lookups(["a"], {"a": looked_up(10, continuation)}))
    seen = [*written, *[-7] * len(continuation)][: len(continuation)]  # beyond `written` the row holds old rubbish
    return splice(torch.tensor([learned]), packed, torch.tensor([seen]), torch.tensor([10 + len(written)]))[0].tolist()


@pytest.mark.parametrize(
    ("written", "continuation", "expected"),
    [
        ([], [5, 6, 7, 8], [5, 6, 7]),
        ([5], [5, 6, 7, 8], [6, 7, 8]),
        ([5, 6], [5, 6, 7, 8], [7, 8, 0]),
        ([5, 9], [5, 6, 7, 8], [0, 0, 0]),
        ([5, 6, 7, 8], [5, 6, 7, 8], [0, 0, 0]),
        ([5, 6, 7, 8, 9], [5, 6, 7, 8], [0, 0, 0]),
        ([4, 6], [5, 6, 7, 8], [0, 0, 0]),
    ],
)
def test_a_look_up_is_taken_where_it_was_right_so_far(
    written: list[int], continuation: list[int], expected: list[int]
) -> None:
    assert spliced(written, continuation, [0, 0, 0]) == expected


def test_requests_without_a_look_up_keep_their_drafts() -> None:
    lookups = {"b": looked_up(4, [1, 2, 3]), "d": looked_up(6, [9])}
    packed = pack_lookups(["a", "b", "c", "d"], lookups)
    assert packed.tolist() == [[0, 0, 0, 0, 0], [4, 3, 1, 2, 3], [0, 0, 0, 0, 0], [6, 1, 9, 0, 0]]
    drafts = torch.full((4, 2), 50)
    written = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    total = torch.tensor([8, 5, 3, 6])
    merged = splice(drafts, torch.from_numpy(packed), written, total)
    assert merged.tolist() == [[50, 50], [2, 3], [50, 50], [9, 50]]


class Outline:
    """A V2 runner around no model: request b has written 1, 2, 3, 20 and on the device also `ahead`."""

    def __init__(
        self, strategy: Strategy, ahead: tuple[int, ...] = (), has_head: bool = False, draft_logits: Any = None
    ) -> None:
        selector = ScriptedSelector(("learned", "sibling"))
        selector.script = lambda state: strategy
        lookups = LookupDrafter(siblings=True, ngram=False)
        self.controller = StrategyController(selector, steps_per_choice=1, lookups=lookups)
        lookups.add("a", [1, 2, 3])
        lookups.add("b", [1, 2, 3])
        lookups._texts["a"].tokens += [20, 21, 22, 23, 24, 25, 26]  # type: ignore[operator]
        lookups._texts["b"].tokens += [20]  # type: ignore[operator]
        self.passes: list[dict[str, Any]] = []
        known = [1, 2, 3, 20, *ahead]
        states = SimpleNamespace(
            draft_tokens=torch.zeros(4, 3, dtype=torch.int64),
            all_token_ids=SimpleNamespace(gpu=torch.tensor([known + [0] * (16 - len(known))])),
            total_len=SimpleNamespace(gpu=torch.tensor([len(known)])),
        )
        speculator = SimpleNamespace(propose=self.stock, draft_logits=draft_logits)
        self.verifier = SimpleNamespace(num_speculative_steps=3, _verify=len)
        model_runner: Any = SimpleNamespace(speculator=speculator, req_states=states, rejection_sampler=self.verifier)
        self.runner = RunnerV2(model_runner, self.controller, has_head=False)
        self.runner.head = object() if has_head else None  # one that always has to run: plain decoding never comes
        self.speculator = speculator
        self.last = known[-1]

    def stock(
        self, input_batch: Any, aux: Any, last_sampled: Any, seeds: Any, new: int = 7, num_speculative_tokens: int = 0
    ) -> torch.Tensor:
        self.passes.append({"seeds": seeds, "new": new, "num_speculative_tokens": num_speculative_tokens})
        return torch.full((1, 3), 50)

    def step(self, num_scheduled: int = 3) -> list[list[int]]:
        """Draft in one step, as vLLM calls it."""
        self.controller.plan(1, 4.0, 0)
        batch = SimpleNamespace(
            num_reqs=1,
            req_ids=["b"],
            idx_mapping=torch.tensor([0]),
            has_prefill=False,
            num_scheduled_tokens=torch.tensor([num_scheduled]),
        )
        last = torch.tensor([[self.last]])
        return self.speculator.propose(batch, None, last, "seeds", num_speculative_tokens=3, new=8).tolist()


@pytest.mark.parametrize(
    ("ahead", "expected"), [((), [21, 22, 23]), ((21, 22), [23, 24, 25]), ((21, 9), [9, 9, 9]), ((30,), [30, 30, 30])]
)
def test_the_device_keeps_what_fits_of_a_look_up_that_outlasts_the_steps_under_way(
    ahead: tuple[int, ...], expected: list[int]
) -> None:
    made = Outline(Strategy(1, "sibling"), ahead)
    assert made.step() == [expected]
    assert made.passes == []


def test_nothing_is_looked_up_for_the_head_alone_or_while_off() -> None:
    for strategy in (Strategy(2, "learned"), OFF):
        made = Outline(strategy, has_head=True)
        assert made.step() == [[50, 50, 50]]
        assert made.controller.lookups is not None
        assert made.controller.lookups.indices["sibling"].num_tokens == 0


def test_arguments_of_vllms_own_propose_pass_through_and_only_the_head_is_asked_for_drafts() -> None:
    for strategy, num_drafts in ((Strategy(2, "learned"), 3), (Strategy(2, "sibling"), 0), (OFF, 0)):
        made = Outline(strategy, has_head=True)
        made.step()
        assert made.passes == [{"seeds": "seeds", "new": 8, "num_speculative_tokens": num_drafts}]


@pytest.mark.parametrize(
    ("strategy", "since", "source"),
    [
        (Strategy(2, "sibling"), [21, 22], ("sibling", 4)),
        (Strategy(2, "sibling"), [21, 9], None),
        (Strategy(2, "mixed"), [21, 9], LEARNED),
        (Strategy(2, "mixed"), [], ("sibling", 4)),
        (Strategy(2, "sibling"), [21, 22, 23], None),  # nothing is left of it
    ],
)
def test_the_device_may_have_kept_a_look_up_or_not_and_the_host_finds_out(
    strategy: Strategy, since: list[int], source: Any
) -> None:
    request = SimpleNamespace(all_token_ids=[1, 2, 3, 20, *since])
    draft = LookupDraft([21, 22, 23], "sibling", 4, num_known=4)
    assert Outline(strategy).runner.source(strategy, draft, request) == source


def test_without_a_look_up_fillers_are_nobodys() -> None:
    runner, request = Outline(OFF).runner, SimpleNamespace(all_token_ids=[])
    assert runner.source(Strategy(2, "sibling"), None, request) is None
    for drafter in ("learned", "mixed"):
        assert runner.source(Strategy(2, drafter), None, request) == LEARNED


def kept_one_by_one(drawn: list[int], drafts: list[int], lengths: list[int]) -> list[list[int]]:
    """What each request writes, found row by row."""
    written, row = [], 0
    for length in lengths:
        tokens = []
        for place in range(length):
            tokens.append(drawn[row + place])
            if place == length - 1 or drafts[row + place + 1] != tokens[-1]:
                break
        written.append(tokens)
        row += length
    return written


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_kept_as_long_as_they_are_what_was_drawn(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    longest = 1 + seed % 4
    lengths = torch.randint(1, longest + 2, (9,), generator=random).tolist()
    drawn = torch.randint(0, 2, (sum(lengths),), generator=random)
    drafts = torch.randint(-1, 2, (sum(lengths),), generator=random, dtype=torch.int32)  # -1 is a placeholder
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens, counts = keep_drawn(drawn, drafts, bounds, torch.arange(longest + 2))
    assert tokens.shape == (9, longest + 1)
    assert (tokens.dtype, counts.dtype) == (torch.int64, torch.int32)
    written = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    assert written == kept_one_by_one(drawn.tolist(), drafts.tolist(), lengths)


def test_drafts_that_are_distributions_are_left_to_vllm() -> None:
    made = Outline(OFF, draft_logits=torch.zeros(1))
    assert made.verifier._verify is len
    made = Outline(OFF)
    assert made.verifier._verify == made.runner.verify


VOCAB, LENGTH = 5, 40
TEMPERATURES, SEEDS = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([3, 4, 5])
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))  # logits by the last token


def noisy_argmax(logits: Any, rows: Any, temperature: Any, seed: Any, pos: Any, **settings: Any) -> torch.Tensor:
    """Draw as vLLM's kernel does: with noise of seed and position, and without at temperature 0."""
    assert settings == {"apply_temperature": False, "is_drafting": False, "use_fp64": False}
    generators = [
        torch.Generator().manual_seed(int(seed[row]) * 999 + int(at)) for row, at in zip(rows, pos, strict=True)
    ]
    noise = torch.stack([-(-torch.rand(VOCAB, generator=each).log()).log() for each in generators])
    return (logits + noise * (temperature[rows] > 0)[:, None]).argmax(1)


def samplers(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """vLLM's own sampler and rejection sampler of three requests, without a device; ours verifies in the latter."""
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    monkeypatch.setattr(sampler, "gumbel_sample", noisy_argmax)
    plain: Any = sampler.Sampler.__new__(sampler.Sampler)
    plain.use_xpu_sampler = plain.use_fp64_gumbel = plain.return_sampling_mask = False
    plain.use_flashinfer, plain.logprobs_mode = True, "processed_logprobs"
    plain.needs_logits_processing = np.zeros(3, dtype=bool)
    states: Any = sampler.SamplingStates.__new__(sampler.SamplingStates)
    states.vocab_size, states.seeds_set = VOCAB, np.zeros(3, dtype=bool)
    for name, values in {"temperature": TEMPERATURES, "seeds": SEEDS, "top_k": SEEDS * 0 + VOCAB}.items():
        setattr(states, name, SimpleNamespace(gpu=values, np=values.numpy()))
    states.top_p, plain.sampling_states = SimpleNamespace(np=np.ones(3)), states
    verifier: Any = rejection_sampler.RejectionSampler.__new__(rejection_sampler.RejectionSampler)
    verifier.sampler, verifier.enable_adaptive_verification = plain, False
    made = Outline(OFF)
    made.runner._verifier, verifier._verify = verifier, made.runner.verify
    return plain, verifier


def texts_of(verifier: Any, draft: Callable[[int, list[int]], list[int]]) -> tuple[list[list[int]], int]:
    """Texts of the three requests, with `draft`'s drafts for a request after its text, and the steps they took."""
    texts: list[list[int]] = [[0], [1], [2]]
    for num_steps in range(LENGTH):
        if min(map(len, texts)) >= LENGTH:
            return [text[:LENGTH] for text in texts], num_steps
        parts = [[text[-1], *draft(number, text)] for number, text in enumerate(texts)]
        bounds = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        tokens = torch.tensor([token for part in parts for token in part], dtype=torch.int32)
        places = [(row, at) for row, part in enumerate(parts) for at in range(len(part))]
        batch = SimpleNamespace(
            num_reqs=3,
            cu_num_logits_np=bounds,
            cu_num_logits=torch.from_numpy(bounds),
            idx_mapping=torch.arange(3),
            idx_mapping_np=np.arange(3),
            expanded_idx_mapping=torch.tensor([row for row, _ in places]),
            expanded_local_pos=torch.tensor([at for _, at in places]),
            seq_lens_cpu_upper_bound=torch.zeros(3),
        )
        pos = torch.tensor([len(texts[row]) - 1 + at for row, at in places])
        rows = TABLE[tokens.clamp(min=0).long()]
        written, counts, *_ = verifier._verify_in_chunks(rows, batch, None, tokens, pos, 6, max_num_logprobs=-1)
        for text, row, number in zip(texts, written.tolist(), counts.tolist(), strict=True):
            text += row[:number]
    raise AssertionError("a step wrote nothing")


@pytest.mark.vllm
def test_text_is_that_of_plain_decoding_whatever_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by who knows the noise: twins by a policy that is somewhat different, as one is after an update."""
    plain, verifier = samplers(monkeypatch)
    undrafted, steps = texts_of(verifier, lambda *_: [])
    one_by_one: list[list[int]] = [[0], [1], [2]]
    for at in range(LENGTH - 1):
        last, rows = torch.tensor([text[-1] for text in one_by_one]), torch.arange(3)
        drawn, _ = plain.sample(
            TABLE[last], rows, rows, rows.numpy(), rows * 0 + at, last, rows * 0, rows.numpy(), return_logprobs=True
        )
        for written, token in zip(one_by_one, drawn.tolist(), strict=True):
            written.append(token)
    assert (undrafted, steps) == (one_by_one, LENGTH - 1)
    random = Random(0)
    texts, steps = texts_of(verifier, lambda *_: random.choices(range(-1, VOCAB), k=random.randrange(4)))
    assert texts == undrafted
    with monkeypatch.context() as other_weights:
        change = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        other_weights.setitem(globals(), "TABLE", TABLE + 0.2 * change)
        twins, _ = texts_of(verifier, lambda *_: [])
    assert twins != undrafted
    texts, steps_with_twins = texts_of(verifier, lambda row, text: twins[row][len(text) : len(text) + 3])
    assert texts == undrafted
    assert steps_with_twins < steps
