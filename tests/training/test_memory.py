"""The forecast of an update's memory, from shapes alone, against what it holds."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.conftest import save_policy
from tests.support.architectures import save_architecture
from tests.test_policy import make_batch
from tlt_lightning import RLModule
from tlt_lightning.adapters import LoRA
from tlt_lightning.engine.architectures import ARCHITECTURES
from tlt_lightning.objectives import GRPO, PPO, Distillation, Divergence
from tlt_lightning.packed_pass import without_mask
from tlt_lightning.policy import Teacher, causal_lm, load_policy, load_shapes, response_logps
from tlt_lightning.training.critic import CriticConfig
from tlt_lightning.training.memory.forecast import (
    CONTEXT,
    GIB,
    TrainedModel,
    check_fits,
    forecast,
)
from tlt_lightning.training.memory.optimizer_state import optimizer_bytes
from tlt_lightning.training.memory.pass_size import choose_passes
from tlt_lightning.training.memory.passes import Passes, kept_bytes
from tlt_lightning.training.optimization import fuse_on_gpu

PASSES = Passes(micro_batch_tokens=96, longest=64, is_autocast=False, is_checkpointed=False)


def really_kept(model: torch.nn.Module, passes: Passes) -> float:
    """Bytes that a real pass keeps for its backward pass."""
    trunk, saved = causal_lm(model).base_model, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=passes.is_autocast),
        without_mask(),
    ):
        output = trunk(input_ids=torch.arange(passes.micro_batch_tokens)[None] % 20, use_cache=False)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    del output
    return float(sum(size for storage, size in saved.items() if storage not in own))


@pytest.mark.parametrize("model_type", [each.model_type for each in ARCHITECTURES if "moe" not in each.model_type])
def test_what_a_pass_keeps_is_what_a_real_one_keeps(model_type: str, tmp_path) -> None:
    path = save_architecture(model_type, tmp_path, num_hidden_layers=2)
    assert kept_bytes(load_shapes(path), PASSES)[0] == really_kept(load_policy(path), PASSES)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=4, base_dtype="bfloat16")], ids=["full", "lora"])
def test_layers_autocast_and_adapters_count(lora: LoRA | None, tmp_path) -> None:
    path, passes = str(save_policy(tmp_path, num_hidden_layers=5)), replace(PASSES, is_autocast=True)
    kept, _ = kept_bytes(load_shapes(path, lora), passes)
    assert kept == pytest.approx(really_kept(load_policy(path, lora=lora), passes), rel=0.01)
    assert kept < kept_bytes(load_shapes(path, lora), PASSES)[0]


def test_sharded_weights_come_in_half_and_autocast_keeps_no_copies_of_them(tmp_path) -> None:
    path, passes = str(save_policy(tmp_path, num_hidden_layers=5)), replace(PASSES, is_autocast=True, num_shards=2)
    kept, _ = kept_bytes(load_shapes(path), passes)
    assert kept == pytest.approx(really_kept(load_policy(path).bfloat16(), passes), rel=0.01)
    assert kept < 0.9 * kept_bytes(load_shapes(path), replace(passes, num_shards=1))[0]


def test_recomputing_frees_most_of_many_layers(tmp_path) -> None:
    path = str(save_policy(tmp_path, num_hidden_layers=8, num_attention_heads=4))  # small next to the layers' inputs
    model = load_policy(path)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = really_kept(model, PASSES)
    kept, again = kept_bytes(load_shapes(path), replace(PASSES, is_checkpointed=True))
    all_of_it, gradients = kept_bytes(load_shapes(path), PASSES)
    assert inputs <= kept < 1.1 * inputs
    assert again - gradients == pytest.approx(all_of_it / 8, rel=0.2)


def test_a_layer_in_its_backward_pass_holds_gradients_of_its_widest_tensors(tmp_path) -> None:
    path = str(save_policy(tmp_path, num_hidden_layers=2, intermediate_size=512))
    _, gradients = kept_bytes(load_shapes(path), PASSES)
    assert gradients == 3 * PASSES.micro_batch_tokens * 512 * 4


def adamw_8bit(parameters) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters)


@pytest.mark.parametrize(
    ("build", "state"),
    [
        (torch.optim.AdamW, 8),
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 4),
        (adamw_8bit, 2 + 8 / 256),  # codes, and a scale for 256 of them, twice
    ],
)
def test_optimizers_count_by_their_state(build, state: float, policy_path: str) -> None:
    plan = forecast({"policy": TrainedModel(policy_path)}, PASSES, build, {})
    trained = sum(p.numel() for p in load_policy(policy_path).parameters())
    assert plan.held["optimizer"] == pytest.approx(state * trained, rel=5e-3)
    assert plan.held["gradients"] == plan.held["policy"] == 4 * trained


def test_a_step_that_is_not_fused_counts_with_its_copy(policy_path: str) -> None:
    trained = sum(p.numel() for p in load_policy(policy_path).parameters())
    kinds = [partial(torch.optim.AdamW, foreach=each) for each in (None, False, True)] + [torch.optim.SGD]
    plans = [forecast({"policy": TrainedModel(policy_path)}, PASSES, build, {}) for build in kinds]
    assert [plan.step for plan in plans] == [0, 0, 4 * trained, 4 * trained]


def test_an_engine_that_sleeps_leaves_its_memory_to_the_update(policy_path: str) -> None:
    plan = forecast({"policy": TrainedModel(policy_path)}, PASSES, torch.optim.AdamW, {"reference": policy_path})
    awake = replace(plan, engine={"engine, weights": 2 * GIB, "engine, cache": 7 * GIB}, engine_sleeps=False)
    asleep = replace(awake, engine_sleeps=True)
    assert awake.update - asleep.update == pytest.approx(9 * GIB)
    assert awake.rollout == asleep.rollout == pytest.approx(9 * GIB + sum(plan.held.values()) - plan.held["gradients"])
    assert plan.held["reference"] == plan.held["policy"]
    assert "| engine, cache | 7.00 |" in asleep.table()


def test_what_callbacks_hold_is_in_the_table(policy_path: str, caplog: pytest.LogCaptureFixture) -> None:
    module = RLModule(policy_path, GRPO())
    module.callback_bytes["drafter, trained"] = 2 * GIB
    with caplog.at_level("INFO"):
        choose_passes(module, [PASSES], 8 * GIB, free=0.0, engine={"engine, cache": 7 * GIB}, engine_sleeps=True)
    assert "| drafter, trained | 2.00 |" in caplog.text


def test_what_does_not_fit_is_refused_with_settings_that_would_help(policy_path: str) -> None:
    passes = replace(PASSES, micro_batch_tokens=8192)
    plan = forecast({"policy": TrainedModel(policy_path)}, passes, torch.optim.AdamW, {})
    check_fits(plan, plan.update, passes)
    check_fits(plan, 0.95 * plan.update, passes)  # forecasts err
    message = r"An update would take \d\.\d GiB, and the device has \d\.\d GiB: lower `data.micro_batch_tokens`, \d+ at"
    with pytest.raises(MisconfigurationException, match=message) as raised:
        check_fits(plan, plan.update / 2, passes)
    assert "`model.gradient_checkpointing: true`" in str(raised.value)
    assert "engine.sleep" not in str(raised.value)
    least = replace(passes, longest=8192, is_checkpointed=True)
    with pytest.raises(MisconfigurationException, match=r"GiB: set `data.engine.sleep: true`, or"):
        check_fits(replace(plan, engine_sleeps=False), plan.update / 2, least)


def test_logits_of_a_large_vocabulary_are_held_twice(tmp_path) -> None:
    path = str(save_policy(tmp_path, vocab_size=4000))
    plan = forecast({"policy": TrainedModel(path)}, PASSES, torch.optim.AdamW, {})
    assert plan.activations["logits"] == 2 * PASSES.micro_batch_tokens * 4000 * 4


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_shards_divide_what_is_held_and_what_is_gathered_comes_on_top(
    lora: LoRA | None, is_autocast: bool, policy_path: str
) -> None:
    models, passes = {"policy": TrainedModel(policy_path, lora)}, replace(PASSES, is_autocast=is_autocast)
    alone, shared = (
        forecast(
            models,
            replace(passes, num_shards=ranks),
            partial(torch.optim.AdamW, foreach=True),
            {"reference": policy_path},
        )
        for ranks in (1, 2)
    )
    for name in ("policy", "reference", "gradients", "optimizer"):
        assert shared.held[name] == alone.held[name] / 2 > 0
    assert shared.step == alone.step / 2 > 0
    model = load_policy(policy_path, lora=lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert alone.held["gradients"] == alone.held["optimizer"] / 2 == 4 * trained
    layer = sum(p.numel() for p in causal_lm(model).model.layers[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - 2 * layer
    width = 2 if is_autocast else 4
    gradients = (width + 4) * root if lora is None else 0  # those of adapters are a layer's
    assert shared.activations["gathered"] == width * (root + 2 * layer) + gradients
    assert "gathered" not in alone.activations


def test_a_run_is_refused_or_told_before_anything_is_loaded(policy_path: str, tmp_path, caplog) -> None:
    module = RLModule(policy_path, PPO(), critic=CriticConfig(path=policy_path), reference=policy_path)
    choose_passes(module, [PASSES], 80 * GIB, free=0.0, engine={}, engine_sleeps=True)
    with pytest.raises(MisconfigurationException, match=r"An update would take 1\.\d GiB, and the device has 0\.5"):
        choose_passes(
            module, [replace(PASSES, micro_batch_tokens=32768)], 0.5 * GIB, free=0.0, engine={}, engine_sleeps=True
        )
    routed = RLModule(save_architecture("qwen3_moe", tmp_path), GRPO())
    choose_passes(routed, [PASSES], 0.0, free=0.0, engine={}, engine_sleeps=True)
    assert "experts are chosen by values" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, LoRA(rank=16, base_dtype="bfloat16")], ids=["full", "lora"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("is_taught", [False, True])
def test_the_peak_on_a_gpu_is_the_forecast(lora: LoRA | None, is_checkpointed: bool, is_taught: bool, tmp_path) -> None:
    """Within a tenth: a shape of 0.3 billion weights, 8,192 tokens."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
    path = str(save_policy(tmp_path, num_hidden_layers=16, max_position_embeddings=8192, vocab_size=32000, **shape))
    passes = Passes(8192, 1024, is_autocast=True, is_checkpointed=is_checkpointed)
    of_teacher = ({"reference": path}, path) if is_taught else ({}, None)
    plan = forecast({"policy": TrainedModel(path, lora)}, passes, torch.optim.AdamW, *of_teacher)
    gc.collect()  # the model of the test before lives in cycles; freed in between, it would be taken off the peak
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_policy(path, lora=lora).cuda()
    teacher = load_policy(path, is_half=True).eval().requires_grad_(False).cuda() if is_taught else None
    batch = move_data_to_device(make_batch([1] * 8, [1023] * 8), "cuda")
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    fuse_on_gpu(optimizer, torch.device("cuda"))
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            heard = None if teacher is None else Teacher.of(teacher, batch, Divergence())
            tokens = response_logps(model, batch, teacher=heard)
        (tokens.logps if tokens.divergence is None else tokens.divergence).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    assert measured == pytest.approx(plan.update - CONTEXT, rel=0.1), f"{measured / GIB:.2f} GiB\n{plan.table()}"


@pytest.mark.slow
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_teacher_counts_with_weights_states_a_copy_of_its_head_and_logits(is_autocast: bool, tmp_path) -> None:
    policy = str(save_policy(tmp_path / "policy", vocab_size=70_000))
    path = str(save_policy(tmp_path / "teacher", hidden_size=32, vocab_size=70_000))
    passes = replace(PASSES, micro_batch_tokens=2048, is_autocast=is_autocast)
    frozen, models = {"reference": path}, {"policy": TrainedModel(policy)}
    alone = forecast(models, passes, torch.optim.AdamW, frozen)
    taught = forecast(models, passes, torch.optim.AdamW, frozen, path)
    model, batch = load_policy(path, is_half=is_autocast).requires_grad_(False), make_batch([1] * 2, [1024] * 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        heard = Teacher.of(model, batch, Divergence())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    left = [each.nbytes for each in (heard.states, heard.weight) if each.data_ptr() not in own]
    assert taught.activations["teacher"] == sum(left)
    weights = sum(each.nbytes for each in model.parameters())
    assert taught.held == alone.held | {"reference": weights}
    width = 2 if is_autocast else 4
    assert alone.activations["logits"] == 2 * width * 70_000 * 2048  # a chunk's, and its gradient
    assert taught.activations["logits"] == 4 * width * 70_000 * 1024  # of two heads
    module = RLModule(policy, Distillation(), reference=path)
    _, planned = choose_passes(module, [passes], 8 * GIB, free=8 * GIB, engine={}, engine_sleeps=True)
    assert planned.activations == taught.activations


def test_a_teacher_far_larger_than_its_policy_counts_with_its_own_pass(tmp_path) -> None:
    policy = str(save_policy(tmp_path / "policy", hidden_size=8, intermediate_size=8))
    teacher = str(save_policy(tmp_path / "teacher", intermediate_size=4096))
    plan = forecast({"policy": TrainedModel(policy)}, PASSES, torch.optim.AdamW, {"reference": teacher}, teacher)
    assert sum(plan.activations.values()) == 3 * PASSES.micro_batch_tokens * 4096 * 4


def test_an_optimizer_for_cuda_graphs_is_measured_on_the_cpu() -> None:
    plain, captured = (
        lambda groups, c=c: torch.optim.AdamW(groups, foreach=False, capturable=c) for c in (False, True)
    )
    assert optimizer_bytes(captured) == optimizer_bytes(plain)
