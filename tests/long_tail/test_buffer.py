import io
import random

import pytest
import torch

from tlt_lightning.hidden_states import HiddenStateRequest, PolicyText
from tlt_lightning.long_tail.buffer import DrafterBuffer

HIDDEN = 4
TOKEN_BYTES = 8 + 2 * 4 * HIDDEN  # a token id, three layers and the last one in bfloat16


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sequence(length: int, prompt: int = 0, version: int = 0, answer: int = 0) -> PolicyText:
    """A sequence of `length` tokens that answers prompt number `prompt` with answer number `answer`."""
    ids = torch.full((length,), answer)
    ids[0] = prompt
    states, last = torch.randn(length, 3 * HIDDEN).bfloat16(), torch.randn(length, HIDDEN).bfloat16()
    return PolicyText(ids, states, last, prompt_length=1, policy_version=version)


def num_bytes(buffer: DrafterBuffer) -> int:
    return sum(sequence.nbytes for sequence in (*buffer.training, *buffer.held_out))


def prompts(sequences: list[PolicyText]) -> set[int]:
    return {int(sequence.input_ids[0]) for sequence in sequences}


def lengths_of(sequences: list[PolicyText]) -> list[int]:
    return sorted(map(len, sequences))


def long_tailed(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [int(min(2000, 8 + source.lognormvariate(4, 1))) for _ in range(count)]


def same(one: list[PolicyText], other: list[PolicyText]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.input_ids, b.input_ids)
        and torch.equal(a.states, b.states)
        and torch.equal(a.last_states, b.last_states)
        and (a.prompt_length, a.policy_version) == (b.prompt_length, b.policy_version)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("max_tokens", [400, 777, 3000, 100_000])
def test_the_buffer_never_holds_more_than_its_bound(max_tokens):
    buffer = DrafterBuffer(max_tokens * TOKEN_BYTES)
    for version in range(6):
        lengths = long_tailed(5 + 10 * version, seed=version)
        buffer.add([sequence(length, prompt=i // 4, version=version) for i, length in enumerate(lengths)])
        held = buffer.training + buffer.held_out
        assert num_bytes(buffer) == sum(map(len, held)) * TOKEN_BYTES <= buffer.max_bytes
        assert buffer.training
        assert buffer.held_out


def test_long_sequences_of_the_previous_iteration_stay_and_older_ones_go():
    buffer = DrafterBuffer(1000 * TOKEN_BYTES, held_out_share=0, previous_share=0.5)
    lengths = [50, *[20] * 20, 150, 50, 300, 50]
    for version in range(2):
        buffer.add([sequence(length, i, version) for i, length in enumerate(lengths)])
    assert [len(item) for item in buffer.training if item.policy_version == 0] == [300, 150, 50]
    assert max(len(item) for item in buffer.training if item.policy_version == 1) == 300
    buffer.add([sequence(20, i, version=2) for i in range(10)])
    assert next(len(item) for item in buffer.training if item.policy_version == 1) == 300
    assert {item.policy_version for item in buffer.training} == {1, 2}


def test_a_previous_share_of_zero_leaves_the_previous_iteration_only_what_is_free():
    buffer = DrafterBuffer(500 * TOKEN_BYTES, held_out_share=0, previous_share=0)
    buffer.add([sequence(100, i) for i in range(5)])
    buffer.add([sequence(100, i, version=1) for i in range(4)])
    assert [item.policy_version for item in buffer.training] == [1, 1, 1, 1, 0]
    buffer.add([sequence(100, i, version=2) for i in range(5)])
    assert {item.policy_version for item in buffer.training} == {2}


def test_held_out_prompts_are_the_newest_and_never_trained_on():
    buffer = DrafterBuffer(1 << 20, held_out_share=0.25)
    for version in range(3):
        buffer.add([sequence(20 + version, i // 4, version, answer=i) for i in range(32)])
        assert len(prompts(buffer.held_out)) == 2
        assert len(buffer.held_out) == 8
        assert prompts(buffer.held_out).isdisjoint(prompts(buffer.training))
        assert {item.policy_version for item in buffer.held_out} == {version}
    assert {item.policy_version for item in buffer.training} == {1, 2}
    assert len(buffer) == len(buffer.training)
    buffer.add([sequence(20, i // 4, version=3, answer=i) for i in range(8)])
    assert [len(prompts(part)) for part in (buffer.held_out, buffer.training[: 8 - len(buffer.held_out)])] == [1, 1]


def test_what_was_trained_on_leaves_when_its_prompt_is_held_out():
    buffer = DrafterBuffer(1 << 20, held_out_share=0.5)
    buffer.add([sequence(10, prompt) for prompt in range(10)])
    trained = prompts(buffer.training)
    buffer.add([sequence(10, prompt, version=1) for prompt in sorted(trained)[:2]])
    (held_out,) = prompts(buffer.held_out)
    assert prompts(buffer.training) == trained - {held_out}


def test_of_a_single_prompt_sequences_are_held_out():
    buffer = DrafterBuffer(1 << 20)
    buffer.add([sequence(10, prompt=5, answer=i) for i in range(8)])
    assert (len(buffer), len(buffer.held_out)) == (6, 2)
    buffer.add([sequence(10, prompt=5)])
    assert (len(buffer.held_out), buffer.training[0].input_ids[0]) == (0, 5)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_few_texts_that_come_again_in_other_company_are_learned_from_or_held_out(at_once: int) -> None:
    buffer, learned, judging, texts = DrafterBuffer(1 << 20), set(), set(), list(range(32))
    for seed in range(4):
        random.Random(seed).shuffle(texts)
        for start in range(0, len(texts), at_once):
            step = [sequence(10, prompt=i % 7, answer=i) for i in texts[start : start + at_once]]
            buffer.add(step, come_again=True)
            learned |= {int(item.input_ids[1]) for item in buffer.training}
            held_out = [int(item.input_ids[1]) for item in buffer.held_out]
            judging |= {*held_out}
            assert len(held_out) == len({*held_out}) == min(8, len(judging))  # each once
    assert learned | judging == {*texts}
    assert learned & judging == set()


def test_something_is_held_out_even_if_it_takes_more_than_its_share():
    buffer = DrafterBuffer(1000 * TOKEN_BYTES, held_out_share=0.05, previous_share=0.5)
    buffer.add([sequence(400, prompt) for prompt in range(4)])
    assert (len(buffer), len(buffer.held_out)) == (1, 1)
    buffer.add([sequence(900, prompt, version=1) for prompt in range(4, 8)])
    assert (len(buffer), lengths_of(buffer.held_out)) == (0, [900])  # nor does anything of before beside it
    assert num_bytes(buffer) <= buffer.max_bytes


def test_nothing_is_held_out_where_nothing_shall_be():
    buffer = DrafterBuffer(1 << 20, held_out_share=0)
    buffer.add([sequence(10, prompt) for prompt in range(8)])
    assert (len(buffer), buffer.held_out) == (8, [])


def test_an_empty_iteration_changes_nothing():
    buffer = DrafterBuffer(1 << 20)
    buffer.add([sequence(10, prompt) for prompt in range(8)])
    before = buffer.training
    buffer.add([])
    assert same(buffer.training, before)


def test_an_iteration_that_does_not_fit_is_a_warning(caplog):
    buffer = DrafterBuffer(100 * TOKEN_BYTES, held_out_share=0)
    buffer.add([sequence(50)])
    assert not caplog.text
    buffer = DrafterBuffer(100 * TOKEN_BYTES, held_out_share=0)
    buffer.add([sequence(102 - prompt % 2, prompt) for prompt in range(3)])
    assert f"None of an iteration's 3 sequences fits the drafter's buffer: the shortest has {101 * TOKEN_BYTES}" in (
        caplog.text
    )
    assert num_bytes(buffer) == 0
    with pytest.raises(RuntimeError, match="nothing to train on"):
        buffer.sample(10, generator())


def test_what_is_larger_than_the_buffer_is_not_held_out_either():
    buffer = DrafterBuffer(100 * TOKEN_BYTES)
    buffer.add([sequence(101 + prompt, prompt) for prompt in range(3)])
    assert num_bytes(buffer) == 0


def test_the_same_sequences_are_kept_whenever_they_are_added():
    sequences = [sequence(10 + i % 7, i) for i in range(200)]
    buffers = [DrafterBuffer(500 * TOKEN_BYTES) for _ in range(2)]
    for buffer in buffers:
        buffer.add(sequences)
    assert same(buffers[0].training, buffers[1].training)


def test_what_is_too_short_to_draft_anything_is_not_held():
    buffer = DrafterBuffer(1 << 20)
    buffer.add([sequence(2, i) for i in range(9)])
    assert len(buffer) == len(buffer.held_out) == 0
    buffer.add([sequence(2 + i % 2, i) for i in range(9)])
    assert {len(sequence) for sequence in (*buffer.training, *buffer.held_out)} == {3}


def test_a_sample_has_the_tokens_asked_for_of_all_lengths_and_nothing_twice():
    lengths = long_tailed(300)
    buffer = DrafterBuffer(1 << 30, held_out_share=0)
    buffer.add([sequence(length, i) for i, length in enumerate(lengths)])
    for seed in range(5):
        sample = buffer.sample(sum(lengths) // 4, generator(seed))
        assert len({id(item) for item in sample}) == len(sample) == 75
        assert sum(map(len, sample)) == pytest.approx(sum(lengths) / 4, rel=0.15)
        assert sum(len(item) > sorted(lengths)[270] for item in sample) in (7, 8, 9)
        assert lengths_of(sample) != list(map(len, sample))


def test_all_sequences_are_drawn_alike_whatever_their_length():
    buffer = DrafterBuffer(1 << 20, held_out_share=0)
    buffer.add([sequence(length, i) for i, length in enumerate([5, 10, 20, 40, 80, 160, 320])])
    counts, source = dict.fromkeys(range(7), 0), generator()
    for _ in range(700):
        for item in buffer.sample(180, source):  # two of seven
            counts[int(item.input_ids[0])] += 1
    assert sum(counts.values()) == 1400
    assert all(160 < count < 240 for count in counts.values())


def test_neighbours_in_length_are_not_always_drawn_together():
    buffer = DrafterBuffer(1 << 20, held_out_share=0)
    buffer.add([sequence(10 + i, i) for i in range(12)])
    source = generator()
    assert len({frozenset(prompts(buffer.sample(46, source))) for _ in range(100)}) > 10


def test_a_sample_larger_than_the_buffer_repeats_everything_alike():
    buffer = DrafterBuffer(1 << 20, held_out_share=0)
    buffer.add([sequence(10, i) for i in range(4)])
    sample = buffer.sample(100, generator())
    counts = [sum(int(item.input_ids[0]) == i for item in sample) for i in range(4)]
    assert sorted(counts) == [2, 2, 3, 3]


def test_a_sample_is_never_empty_and_follows_the_generator():
    buffer = DrafterBuffer(1 << 20, held_out_share=0)
    buffer.add([sequence(100 + i, i) for i in range(50)])
    assert len(buffer.sample(1, generator())) == 1
    samples = [[len(item) for item in buffer.sample(2000, generator(seed))] for seed in (3, 3, 4)]
    assert samples[0] == samples[1] != samples[2]


def test_a_restored_buffer_goes_on_as_the_one_that_was_saved():
    def iteration(version: int) -> list[PolicyText]:
        torch.manual_seed(version)
        lengths = long_tailed(40, seed=version)
        return [sequence(length, i // 2, version) for i, length in enumerate(lengths)]

    buffer, restored = (DrafterBuffer(3000 * TOKEN_BYTES, held_out_share=0.2) for _ in range(2))
    for version in range(3):
        buffer.add(iteration(version))
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for version in range(3, 5):
        assert same(restored.training, buffer.training)
        assert same(restored.held_out, buffer.held_out)
        assert same(restored.sample(500, generator(9)), buffer.sample(500, generator(9)))
        buffer.add(iteration(version))
        restored.add(iteration(version))
    assert same(restored.training, buffer.training)


def test_a_smaller_buffer_restores_what_fits():
    buffer, smaller = DrafterBuffer(1 << 20), DrafterBuffer(300 * TOKEN_BYTES)
    buffer.add([sequence(10 + i, i) for i in range(30)])
    smaller.load_state_dict(buffer.state_dict())
    assert 200 * TOKEN_BYTES < num_bytes(smaller) <= smaller.max_bytes
    assert smaller.held_out
    empty = DrafterBuffer(100)
    empty.load_state_dict(DrafterBuffer(100).state_dict())
    assert num_bytes(empty) == 0


def test_it_asks_for_the_tokens_that_it_can_hold_beside_the_previous_and_for_those_held_out_besides():
    request = DrafterBuffer(1000 * TOKEN_BYTES, 0.2, previous_share=0.25).request((1, 2, 3), HIDDEN, 0.4, 7)
    assert request == HiddenStateRequest((1, 2, 3), 800, pytest.approx(0.5), 7)


@pytest.mark.parametrize("max_tokens", [2500, 6000, 100_000])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_every_text_that_it_asked_for_is_held(max_tokens, share):
    buffer = DrafterBuffer(max_tokens * TOKEN_BYTES)
    for version in range(20):
        lengths = long_tailed(60, seed=version)
        rows = buffer.request((1, 2, 3), HIDDEN, share, version).rows(lengths)
        buffer.add([sequence(lengths[row], 15 * version + row // 4, version) for row in rows])
        newest = [item for item in buffer.training if item.policy_version == version]
        assert lengths_of(newest + buffer.held_out) == sorted(lengths[row] for row in rows)
        assert num_bytes(buffer) <= buffer.max_bytes


def test_of_texts_that_do_not_fit_some_of_every_length_are_held():
    lengths = long_tailed(400)
    half_mass = next(n for i, n in enumerate(sorted(lengths)) if sum(sorted(lengths)[:i]) > sum(lengths) / 2)
    held, trained = list[int](), list[int]()
    for seed in range(10):
        random.Random(seed).shuffle(lengths)
        buffer = DrafterBuffer(sum(lengths) // 5 * TOKEN_BYTES)
        buffer.add([sequence(length, i // 4) for i, length in enumerate(lengths)])
        held += lengths_of(buffer.held_out)
        trained += lengths_of(buffer.training)
    for part in (held, trained):
        assert sum(n for n in part if n > half_mass) / sum(part) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("num_prompts", "least"), [(1, 0), (2, 1), (3, 1), (4, 2), (12, 2)])
def test_two_prompts_at_least_are_held_out_of_four_or_more(num_prompts: int, least: int) -> None:
    buffer = DrafterBuffer(1 << 20, held_out_share=1e-9)
    buffer.add([sequence(10, prompt) for prompt in range(num_prompts)])
    assert len(prompts(buffer.held_out)) == least
    assert len(buffer) == num_prompts - least


def test_a_held_out_prompt_was_trained_on_in_no_earlier_iteration() -> None:
    """The border does not move with an iteration: 1,000 prompts, 40 an iteration, in another order each epoch."""
    order, trained, held = random.Random(0), set[int](), set[int]()
    for _ in range(3):
        numbers = order.sample(range(1000), 1000)
        for first in range(0, 1000, 40):
            buffer = DrafterBuffer(1 << 20)
            buffer.add([sequence(10, prompt) for prompt in numbers[first : first + 40]])
            trained |= prompts(buffer.training)
            held |= prompts(buffer.held_out)
            assert len(prompts(buffer.held_out)) >= 2
    assert trained.isdisjoint(held)
    assert len(held) == pytest.approx(250, abs=40)
