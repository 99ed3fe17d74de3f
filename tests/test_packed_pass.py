"""Passes over sequences laid end to end, against padded passes and against each sequence alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.architectures import save_architecture
from tests.test_policy import make_batch
from tlt_lightning import LoRA
from tlt_lightning.engine.architectures import ARCHITECTURES
from tlt_lightning.hidden_states import BatchTap, HiddenStateRequest
from tlt_lightning.packed_pass import VARLEN, Pack, can_pack, note_if_packable, packed_states, register_varlen
from tlt_lightning.policy import causal_lm, load_policy, response_logps
from tlt_lightning.rollout import RolloutBatch

WINDOW = 16
WINDOWED = {"mistral": {"sliding_window": WINDOW}, "olmo3": {"sliding_window": WINDOW}}


def ragged_batch(seed: int, num_rows: int = 5, longest: int = 40) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = torch.randint(1, longest // 2, (2, num_rows), generator=generator).tolist()
    responses[1] = longest  # further than a window
    batch = make_batch(prompts, responses)
    batch.response_mask[0, 0] = 0.0  # a masked token is not predicted, and the others see it
    batch.response_lengths = torch.tensor(responses)
    return batch


def run(model: Any, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """Log-probs, entropies, states and gradients of a pass."""
    model.zero_grad()
    # A drafter's tap needs a trunk whose last layer is followed by `norm`; Phi's is not.
    max_tokens = 10_000 if hasattr(causal_lm(model).base_model, "norm") else 0
    tap = BatchTap(model, HiddenStateRequest((0, 1), max_tokens), batch, 0)
    with tap.over(range(len(batch))):
        logps, entropy, *_ = response_logps(model, batch)
    (logps.square().sum() + entropy.sum()).backward()
    results = {"logps": logps.detach(), "entropy": entropy.detach()}
    results |= {f"states {number}": text.states.float() for number, text in enumerate(tap.texts)}
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert gradients
    return results | gradients


def packed_and_padded(
    model: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, torch.Tensor]]:
    trunk = causal_lm(model).base_model
    assert can_pack(trunk)
    shapes: list[tuple[int, ...]] = []
    hook = trunk.register_forward_pre_hook(
        lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True
    )
    packed = run(model, batch)
    with monkeypatch.context() as patch:
        for name in ("policy", "hidden_states"):
            patch.setattr(f"tlt_lightning.{name}.can_pack", lambda trunk: False)
        padded = run(model, batch)
    hook.remove()
    assert shapes == [(1, int(batch.lengths.sum())), tuple(batch.input_ids.shape)]
    return [packed, padded]


@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=[each.model_type for each in ARCHITECTURES])
def test_packed_and_padded_passes_agree(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type = ARCHITECTURES[number].model_type
    path = save_architecture(model_type, tmp_path, **WINDOWED.get(model_type, {}))
    model, exact = load_policy(path), 1e-5
    if "moe" not in model_type:  # torch's grouped products of experts have no float64
        model, exact = model.double(), 1e-6
    packed, padded = packed_and_padded(model, ragged_batch(number), monkeypatch)
    assert packed.keys() == padded.keys()
    for name, value in packed.items():
        scale = float(padded[name].abs().max())
        tolerance = 1e-2 if "states" in name else exact  # states are kept in bfloat16
        torch.testing.assert_close(
            value, padded[name], atol=tolerance * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "settings", [{"lora": LoRA(rank=4)}, {"attn_implementation": "eager"}, {"checkpointing": True}]
)
def test_they_agree_with_every_way_to_load(
    settings: dict[str, Any], policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing = settings.pop("checkpointing", False)
    model = load_policy(policy_path, **settings).double()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed, padded = packed_and_padded(model, ragged_batch(0), monkeypatch)
    for name, value in packed.items():
        torch.testing.assert_close(value, padded[name], atol=1e-5 * float(padded[name].abs().max()) + 1e-9, rtol=1e-2)


@pytest.mark.slow
def test_what_would_mix_sequences_is_padded_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hybrid = load_policy(save_architecture("falcon_h1", tmp_path / "hybrid"))
    assert not can_pack(hybrid.base_model)
    assert "is a FalconH1ForCausalLM, whose layers would mix sequences laid end to end" in caplog.text
    caplog.clear()
    assert can_pack(load_policy(save_architecture("qwen2", tmp_path / "qwen2")).base_model)
    assert not caplog.text
    deaf = load_policy(save_architecture("stablelm", tmp_path / "deaf"))
    assert not can_pack(deaf.base_model)  # its layers tell attention of no pack, of which transformers' mask would know


def test_the_rounding_of_a_deep_trunk_in_16_bit_is_no_mixing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """36 layers of width 2048 with random weights round by 2.03% of the largest state."""
    trunk = load_policy(save_architecture("qwen2", tmp_path, initializer_range=0.5), is_half=True).base_model
    draw = torch.Generator().manual_seed(0)

    def round_more(_: Any, __: Any, found: Any) -> None:
        states = found.last_hidden_state
        states += 0.03 * states.abs().max() * (2 * torch.rand(states.shape, generator=draw) - 1)

    trunk.register_forward_hook(round_more)
    assert note_if_packable(trunk)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    trunk.set_attn_implementation("sdpa")
    assert not note_if_packable(trunk)


def test_chunks_of_attention_longer_than_the_trial_are_known_by_their_name(policy_path: str) -> None:
    trunk = load_policy(policy_path).base_model
    assert can_pack(trunk)
    assert not can_pack(type(trunk)(trunk.config))  # which nobody has tried
    trunk.config.layer_types = ["full_attention", "chunked_attention"]
    assert not note_if_packable(trunk)
    assert not can_pack(trunk)


def test_no_mask_is_made_of_a_pack(policy_path: str) -> None:
    """A mask is quadratic in the pack's length."""
    trunk, masks = load_policy(policy_path).base_model, []
    for layer in trunk.layers:
        layer.register_forward_pre_hook(lambda _, __, given: masks.append(given["attention_mask"]), with_kwargs=True)
    packed_states(trunk, Pack.of(torch.ones(2, 4, dtype=torch.long), torch.tensor([2, 4])))
    assert masks == [None, None]
    trunk(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.tensor([[0, 0, 1, 1]]))
    assert masks[2] is not None  # padded on the left, as for generation, sequences need one


def test_a_pack_lays_sequences_end_to_end_and_takes_them_apart() -> None:
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 4], [3, 0, 0, 0]])
    pack = Pack.of(ids, torch.tensor([2, 4, 1]))
    assert pack.input_ids.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert pack.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0]
    assert (pack.starts.tolist(), pack.longest) == ([0, 2, 6, 7], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=[each.model_type for each in ARCHITECTURES])
def test_the_kernel_of_packs_agrees_with_padding(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type = ARCHITECTURES[number].model_type
    model = load_policy(save_architecture(model_type, tmp_path, **WINDOWED.get(model_type, {}))).cuda()
    assert model.config._attn_implementation == VARLEN
    # The kernel needs no mask: position ids that restart tell it nothing.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    batch = ragged_batch(number)
    for name in ("input_ids", "prompt_lengths", "response_mask", "rollout_logps", "response_lengths"):
        setattr(batch, name, getattr(batch, name).cuda())
    with torch.autocast("cuda", torch.bfloat16):
        packed, padded = packed_and_padded(model, batch, monkeypatch)
    for name in ("logps", "entropy"):
        torch.testing.assert_close(packed[name], padded[name], atol=0.1, rtol=0.05)


@pytest.mark.gpu
def test_the_kernel_of_packs_reads_fewer_heads_of_keys_and_values_as_they_are() -> None:
    torch.manual_seed(0)
    attention = ALL_ATTENTION_FUNCTIONS[register_varlen()]
    starts = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")
    parts = [torch.randn(1, heads, 100, 64, device="cuda") for heads in (6, 2, 2)]
    weights, results = torch.randn(1, 100, 6, 64, device="cuda"), []
    for dtype in (torch.bfloat16, torch.float32):  # the kernel, and one sequence after the other
        given = [part.to(dtype).requires_grad_() for part in parts]
        output = attention(None, *given, None, cu_seq_lens_q=starts, max_length_q=60)[0]
        (output * weights).sum().backward()
        results.append([output, *(part.grad for part in given)])
    for kernel, expected in zip(*results, strict=True):
        assert kernel.shape == expected.shape
        assert (kernel - expected).norm() < 0.02 * expected.norm()
