"""The drafter's loss: against that of `speculators`, in packs and alone, and what each strategy learns from it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import WORDS, save_policy
from tests.support.drafters.draft_texts import (
    alone,
    draft_logits,
    make_drafter,
    pack,
    quality_on,
    random_sequence,
    read_by_target,
    train,
)
from tests.support.tensor_sizes import LargestOfWidth
from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter.architectures.training_time_test import unroll
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.teaching import Teaching
from tlt_lightning.policy import load_policy

TEACHINGS = [Teaching(num_steps=1), Teaching(), Teaching(decay=0.5)]


@pytest.fixture(scope="module")
def drafter(policy_path: str) -> DrafterModule:
    return make_drafter(policy_path)


def taught(policy: str, teaching: Teaching, **arguments: Any) -> DrafterModule:
    return make_drafter(policy, teaching=teaching, **arguments)


def gradients(drafter: DrafterModule, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


class Calls(TorchDispatchMode):
    """Within the block, `widths` collects the last dimension of what the named operations return."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.widths = names, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.names:
            self.widths.add(result.shape[-1])
        return result


def attend_as_speculators_does(head: Any) -> None:
    """By one dense mask over the pack, in float32."""
    from speculators.models.attention import create_float_mask

    head.layers[0].self_attn.config._attn_implementation = head._attn_impl = "eager"
    head._create_mask_fn = partial(create_float_mask, dtype=torch.float32)


@pytest.mark.oracle
@pytest.mark.parametrize("loss", ["kl_div", "tv", "lk_hybrid", {"ce": 0.3, "nla": 0.7}])
@pytest.mark.parametrize("teaching", [Teaching(), Teaching(num_steps=4, decay=0.7)])
def test_loss_and_gradients_are_those_of_speculators(policy_path: str, teaching: Teaching, loss: Any) -> None:
    from speculators.losses import resolve_loss_config

    drafter = taught(policy_path, teaching, loss=loss)
    batch = alone(random_sequence(130, 20), 128)  # no padding: `speculators` has no mask across documents for targets
    ours, metrics = drafter.loss(batch)
    our_gradients = gradients(drafter, ours)
    attend_as_speculators_does(drafter.head)
    _, theirs, their_metrics = drafter.head(
        hidden_states=batch.states,
        input_ids=batch.input_ids,
        document_ids=batch.document_ids,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        verifier_last_hidden_states=batch.last_states,
        ttt_steps=drafter.num_steps,
        ttt_step_loss_decay=teaching.decay,
        loss_config=resolve_loss_config(loss if isinstance(loss, str) else json.dumps(loss), "eager"),
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(our_gradients, gradients(drafter, theirs), atol=1e-5, rtol=1e-4)
    # For later steps `speculators` counts only what was right in all steps before.
    rate = their_metrics["full_acc_0_sum"] / their_metrics["full_acc_0_total"]
    assert metrics["drafter/top1_pos_1"].item() == pytest.approx(rate.item())


@pytest.mark.parametrize("teaching", TEACHINGS, ids=repr)
def test_packed_documents_cost_what_they_cost_alone(policy_path: str, teaching: Teaching) -> None:
    drafter = taught(policy_path, teaching)
    sequences = [random_sequence(50, 1, seed=seed) for seed in range(3)]  # of one length: the mean is over all entries
    packed, _ = drafter.loss(pack(sequences, 256)[0])
    together = gradients(drafter, packed)
    apart = torch.stack([drafter.loss(alone(sequence))[0] for sequence in sequences]).mean()
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together, gradients(drafter, apart), atol=1e-5, rtol=1e-4)


def test_features_in_a_pack_are_those_of_each_document_alone(drafter: DrafterModule) -> None:
    sequences = [random_sequence(n) for n in (90, 60, 10, 4)]
    (batch,) = pack(sequences, 256)
    features = unroll(drafter.head, batch, 3)
    for number, sequence in enumerate(sequences):
        own_features = unroll(drafter.head, alone(sequence, 128), 3)
        is_here, length = batch.document_ids[0] == number, len(sequence) - 2
        for step in range(3):
            # The last entries of a document have no text left to feed back.
            torch.testing.assert_close(features[step, is_here][: length - step], own_features[step, : length - step])


def test_each_step_stands_one_position_further_on(drafter: DrafterModule) -> None:
    batch, seen = alone(random_sequence(60)), []
    layer = drafter.head.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    unroll(drafter.head, batch, 3)
    hook.remove()
    assert [torch.equal(positions, batch.position_ids + step) for step, positions in enumerate(seen)] == [True] * 3


def test_only_text_that_the_policy_wrote_counts(drafter: DrafterModule) -> None:
    sequence = random_sequence(60, 40)
    batch = alone(sequence)
    loss, _ = drafter.loss(batch)
    for change, moves in ((slice(0, 39), False), (slice(40, 41), True), (slice(58, 59), True), (slice(59, 60), False)):
        changed = random_sequence(60, 40)
        changed.last_states[change] *= -1
        assert (drafter.loss(alone(changed))[0] != loss) == moves, change
    batch.loss_mask[:] = False
    assert drafter.loss(batch)[0] == 0


def test_predictions_are_compared_with_those_of_the_target(drafter: DrafterModule) -> None:
    generator = torch.Generator().manual_seed(0)
    features, last_states = torch.randn(2, 50, 64, generator=generator), torch.randn(50, 64, generator=generator)
    terms = {"kl_div": (vocabulary_kl, 1.0)}
    with torch.no_grad():
        weights, watched = torch.full((2, 50), 0.5), {}

        def watch(step: int, rows: slice, logits: torch.Tensor, targets: torch.Tensor) -> None:
            assert rows == slice(0, 50 - step)
            watched[step] = logits.argmax(-1)

        found, total = chunked_loss.predict(drafter.head, features, last_states, terms, weights, watch)
        targets = drafter.head.verifier_lm_head(drafter.head.verifier_norm(last_states))
        for step in range(2):
            logits = draft_logits(drafter.head, features[step, : 50 - step])
            goals = targets[step:].argmax(-1, keepdim=True)
            assert torch.equal(watched[step], logits.argmax(-1))
            assert torch.equal(found.top1[step, : 50 - step], (logits.topk(1).indices == goals).any(-1))
            assert torch.equal(found.top3[step, : 50 - step], (logits.topk(3).indices == goals).any(-1))
            torch.testing.assert_close(found.losses[step, : 50 - step], vocabulary_kl(logits, targets[step:]))
    assert found.top1.sum() < found.top3.sum()
    torch.testing.assert_close(total, 0.5 * found.losses.sum())


def vocabulary_kl(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (targets.softmax(-1) * (targets.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)


@pytest.mark.slow
def test_chunks_of_the_vocabulary_change_nothing(policy_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, batch, results = make_drafter(policy_path), alone(random_sequence(200)), []
    for chunk in (4096, 100, 7, 1):  # also smaller than a step's offset
        monkeypatch.setattr(chunked_loss, "_LOGITS", chunk * len(WORDS))
        loss, metrics = drafter.loss(batch)
        results.append((loss, metrics, gradients(drafter, loss), drafter.measure(batch)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("entries", "rows"), [(100, 100), (200, 128)], ids=["a part of a tile", "whole tiles"])
def test_no_tensor_over_the_vocabulary_is_larger_than_a_chunk(
    entries: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "_LOGITS", entries * 4096)
    drafter = make_drafter(str(save_policy(tmp_path, vocab_size=4096)))
    with LargestOfWidth(4096) as largest:
        drafter.loss(alone(random_sequence(250)))[0].backward()
    assert largest.rows == rows


def test_agreement_is_left_out_where_nobody_asks_for_it(drafter: DrafterModule) -> None:
    batch = alone(random_sequence(60))
    loss, metrics = drafter.loss(batch)
    with Calls("argmax") as compared:
        assert drafter.loss(batch, compares=False)[0] == loss
    assert not compared.widths
    assert set(metrics) == {"drafter/loss", *(f"drafter/top1_pos_{k}" for k in (1, 2, 3))}


def test_a_steps_targets_are_copied_only_where_steps_are_compared_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, batch = make_drafter(str(save_policy(tmp_path, vocab_size=4096))), alone(random_sequence(250))
    for chunk, is_copied in ((768, True), (256, False), (128, False)):
        monkeypatch.setattr(chunked_loss, "_LOGITS", chunk * 4096)
        with Calls("stack", "cat", "constant_pad_nd") as copies:
            drafter.loss(batch)
        assert (4096 in copies.widths) == is_copied, chunk


def test_norms_and_activations_take_a_pass_each(drafter: DrafterModule) -> None:
    head: Any = drafter.head
    layer = head.layers[0]
    norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm)
    assert all("forward" in vars(part) for part in (layer.mlp, *norms))


@pytest.mark.slow
def test_a_head_learns_to_draft(policy_path: str) -> None:
    drafter = make_drafter(policy_path)
    policy = load_policy(policy_path)
    ids = torch.arange(2, 12).repeat(12)  # ten tokens that follow each other, ever again
    (sequence,) = read_by_target(policy, [ids.tolist()], 1, drafter.layer_ids)
    sequence.last_states = policy.get_input_embeddings().weight.detach()[ids.roll(-1)] * 9  # the policy says so, too
    batch = alone(sequence, 128)
    before = quality_on(drafter, [batch])
    train(drafter, [batch], num_steps=50, lr=1e-2)
    after = quality_on(drafter, [batch])
    assert before.acceptance_length < 1.5
    assert after.acceptance_length > 2.5
    assert after.top3[0] > 0.9


def test_loss_waits_for_no_device(drafter: DrafterModule) -> None:
    class NoReadBack(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "is_nonzero"), func
            return func(*args, **(kwargs or {}))

    batch = alone(random_sequence(60))
    with NoReadBack():
        loss, metrics = drafter.loss(batch)
    assert all(isinstance(value, torch.Tensor) for value in metrics.values())
    assert loss.requires_grad


def test_autocast_and_bfloat16_states_are_supported(drafter: DrafterModule) -> None:
    sequence = random_sequence(60)
    exact, _ = drafter.loss(alone(sequence))
    sequence.states, sequence.last_states = sequence.states.bfloat16(), sequence.last_states.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = drafter.loss(alone(sequence))
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
