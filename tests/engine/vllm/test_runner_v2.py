"""Speculation on a V2 model runner, as far as it needs no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.engine.vllm.runner_v2 import RunnerV2, pack_lookups, splice
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

    def __init__(self, strategy: Strategy, ahead: tuple[int, ...] = (), has_head: bool = False) -> None:
        selector = ScriptedSelector(("learned", "sibling"))
        selector.script = lambda state: strategy
        lookups = LookupDrafter(siblings=True, ngram=False)
        self.controller = StrategyController(selector, steps_per_choice=1, lookups=lookups)
        self.controller.add("a", [1, 2, 3])
        self.controller.add("b", [1, 2, 3])
        lookups._texts["a"].tokens += [20, 21, 22, 23, 24, 25, 26]  # type: ignore[operator]
        lookups._texts["b"].tokens += [20]  # type: ignore[operator]
        self.passes: list[dict[str, Any]] = []
        known = [1, 2, 3, 20, *ahead]
        states = SimpleNamespace(
            draft_tokens=torch.zeros(4, 3, dtype=torch.int64),
            all_token_ids=SimpleNamespace(gpu=torch.tensor([known + [0] * (16 - len(known))])),
            total_len=SimpleNamespace(gpu=torch.tensor([len(known)])),
        )
        speculator = SimpleNamespace(propose=self.stock)
        model_runner: Any = SimpleNamespace(speculator=speculator, req_states=states)
        self.runner = RunnerV2(model_runner, self.controller, has_head=False)
        self.runner.has_head = has_head  # one that always has to run: it never sees plain decoding here
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
