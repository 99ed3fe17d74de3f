import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.support.rl_runs import make_data, make_trainer
from tests.test_policy import make_batch
from tlt_lightning import LoRA, RLModule, RolloutCallback
from tlt_lightning.hidden_states import BatchTap, HiddenStateRequest, HiddenStateTap, PolicyText, choose_rows
from tlt_lightning.objectives import GRPO, K3, KLPenalty
from tlt_lightning.policy import causal_lm, response_logps
from tlt_lightning.rollout import RolloutBatch

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": LoRA(rank=4, alpha=8)},
    "checkpointing": {"gradient_checkpointing": True},
    "mixed": {"precision": "bf16-mixed"},
}


def make_module(path: str, precision: str = "32-true", **arguments: Any) -> RLModule:
    objective = GRPO(loss_kl=KLPenalty(coef=0.1, estimator=K3()))
    module = RLModule(path, **{"objective": objective, **arguments})
    module.trainer = L.Trainer(accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False)  # type: ignore[arg-type]
    module.configure_model()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)  # zero at first, where the reference's states would pass for the policy's
    return module


def score(module: RLModule, batch: RolloutBatch, **arguments: Any) -> RolloutBatch:
    return module.score(batch, 16, **arguments)


def states_of(module: RLModule, batch: RolloutBatch, row: int) -> tuple[torch.Tensor, ...]:
    """All hidden states of one row, as Hugging Face tells them."""
    length = int(batch.lengths[row])
    with module.trainer.precision_plugin.forward_context(), torch.no_grad():
        trunk: Any = causal_lm(module.policy).base_model
        return tuple(trunk(batch.input_ids[row : row + 1, :length], output_hidden_states=True).hidden_states)


def check(
    module: RLModule, batch: RolloutBatch, row: int, text: PolicyText, expected: tuple[torch.Tensor, ...]
) -> None:
    assert torch.equal(text.input_ids, batch.input_ids[row, : batch.lengths[row]])
    assert text.input_ids.untyped_storage().nbytes() == 8 * len(text)  # no view that keeps the batch
    assert text.prompt_length == batch.prompt_lengths[row]
    assert (text.states.dtype, text.last_states.dtype) == (torch.bfloat16, torch.bfloat16)
    parts = text.states.float().split(64, -1)
    for part, hidden in zip(parts[:2], expected[:2], strict=True):
        torch.testing.assert_close(part, hidden[0].float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(parts[2], text.last_states.float())  # what follows the last layer, not yet normed
    with module.trainer.precision_plugin.forward_context(), torch.no_grad():
        normed = causal_lm(module.policy).base_model.norm(text.last_states.float()[None])
    torch.testing.assert_close(normed.float(), expected[2].float(), atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("case", CASES)
def test_a_tap_keeps_the_states_of_its_rows_and_of_no_other_pass(case: str, policy_path: str) -> None:
    module = make_module(policy_path, **CASES[case])
    batch = make_batch([3, 5, 4, 2], [6, 1, 9, 4])
    plain = score(module, batch)
    module.hidden_state_request = HiddenStateRequest((0, 1, 2), max_tokens=1000)
    tapped = score(module, batch)
    assert torch.equal(tapped.old_logps, plain.old_logps)
    assert torch.equal(tapped.ref_logps, plain.ref_logps)
    with HiddenStateTap(module.policy, (0, 1, 2), [2, 0]) as tap, module.trainer.precision_plugin.forward_context():
        module.policy(batch.input_ids)
    texts = [batch.input_ids[row, : batch.lengths[row]] for row in (2, 0)]
    for row, text in zip((2, 0), tap.read(texts, batch.prompt_lengths[[2, 0]].tolist(), 7), strict=True):
        check(module, batch, row, text, states_of(module, batch, row))
        assert text.policy_version == 7


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


def test_nothing_is_hooked_unless_somebody_asks_and_nothing_stays(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = make_module(policy_path), make_batch([3, 5], [6, 1])
    registered: list[str] = []
    register = nn.Module.register_forward_pre_hook

    def spy(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        registered.append(type(self).__name__)
        return register(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", spy)
    module.score(batch, 10)
    assert not registered
    module.hidden_state_request = HiddenStateRequest((0, 1, 2), max_tokens=9)
    module.score(batch, 10)
    assert len(registered) == 3  # around the micro-batch of the row that fits; the last layer's output has one hook
    with pytest.raises(RuntimeError, match="broken"), HiddenStateTap(module.policy, (1,), [0]):
        raise RuntimeError("broken")
    assert hooks_of(module) == 0


def test_layers_that_are_not_there_are_refused(policy_path: str) -> None:
    with pytest.raises(ValueError, match=r"names \[-1, 3\], but the policy's layers are 0 to 2"):
        HiddenStateTap(make_module(policy_path).policy, (-1, 1, 3), [0])


class Asker(RolloutCallback):
    """Compares what it is given with the states before the update, and notes when that was."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batch: RolloutBatch | None = None
        self.expected: list[tuple[torch.Tensor, ...]] = []
        self.version = -1

    def on_engine_setup(self, trainer, pl_module, engine):  # type: ignore[no-untyped-def]
        pl_module.hidden_state_request = HiddenStateRequest((0, 1, 2), max_tokens=10_000)

    def on_rollout_scored(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
        self.calls.append("scored")
        self.batch, self.version = batch, trainer.global_step
        self.expected = [states_of(pl_module, batch, row) for row in range(len(batch))]
        self.hooks = hooks_of(pl_module)  # Hugging Face leaves some of its own

    def on_hidden_states(self, trainer, pl_module, texts):  # type: ignore[no-untyped-def]
        self.calls.append("states")
        assert len(texts) == len(self.batch)
        assert hooks_of(pl_module) == self.hooks
        for row, text in enumerate(texts):
            assert torch.equal(text.input_ids, self.batch.input_ids[row, : self.batch.lengths[row]])
            assert text.policy_version == self.version < trainer.global_step
            parts = text.states.float().split(64, -1)
            for part, hidden in zip(parts[:2], self.expected[row][:2], strict=True):
                torch.testing.assert_close(part, hidden[0].float(), atol=2e-2, rtol=2e-2)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # type: ignore[no-untyped-def]
        self.calls.append("step")

    def on_train_epoch_end(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        self.calls.append("end")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_callback_gets_the_states_of_the_policy_before_the_update_once_and_after_it(
    minibatches: int, checkpointing: bool, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    asker = Asker()
    optimizer = lambda p: torch.optim.AdamW(p, lr=1e-1)  # noqa: E731
    module = RLModule(policy_path, GRPO(), optimizer=optimizer, gradient_checkpointing=checkpointing)
    trainer = make_trainer(tmp_path, asker)
    sizes: list[int] = []
    begin = module.score
    module.score = lambda *a, **k: (sizes.append(k["single_update"]), begin(*a, **k))[1]  # type: ignore[method-assign,assignment]
    trainer.fit(module, make_data(prompts_path, num_minibatches=minibatches))
    assert sizes == [minibatches == 1] * 2  # a single optimizer step, whose own passes give the states
    assert asker.calls == ["scored", *["step"] * minibatches, "states", "end"] * 2


def keep(share: float, max_tokens: int = 100_000) -> list[int]:
    return HiddenStateRequest((0, 1, 2), max_tokens, share / 0.5).rows([100] * 40)  # half of them are held out


def test_a_drafter_learns_no_token_that_an_environment_wrote(policy_path: str) -> None:
    batch = make_batch([3, 2], [6, 5])
    batch.observed = torch.zeros_like(batch.response_mask, dtype=torch.bool)
    batch.observed[0, 1:3] = batch.observed[0, 5] = True
    module = make_module(policy_path)
    tap = BatchTap(module.policy, HiddenStateRequest((0, 1), 100), batch, 0)
    with torch.no_grad(), tap.over([1, 0]):
        response_logps(module.policy, batch.select([1, 0]))
    assert [text.others for text in tap.texts] == [((4, 6), (8, 9)), ()]  # places in prompt and response together


def test_no_more_rows_are_kept_than_fit_or_are_trained_on() -> None:
    assert len(keep(1.0)) == 40
    assert len(keep(1.0, 701)) == 7
    assert len(keep(0.1)) == 8  # a tenth to train on, as much to hold out
    assert len(keep(0.1, 300)) == 3
    assert len(keep(0.001)) == 2  # one to train on, one to hold out
    assert keep(0.1) == keep(0.1)
    assert HiddenStateRequest((0, 1, 2), 10).rows([]) == []


def long_tailed(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [int(min(2000, 8 + source.lognormvariate(4, 1))) for _ in range(count)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_chosen_rows_fit_and_fill() -> None:
    lengths = long_tailed(200)
    for share in (0.1, 0.3, 0.9):
        limit = int(share * sum(lengths))
        rows = choose_rows(lengths, limit, generator())
        assert rows == sorted(set(rows))
        assert limit - min(lengths[row] for row in set(range(200)) - set(rows)) < sum(lengths[r] for r in rows) <= limit


def test_chosen_rows_have_the_lengths_of_the_iteration() -> None:
    lengths = long_tailed(400)
    ordered = sorted(lengths)
    half_mass = next(length for i, length in enumerate(ordered) if sum(ordered[:i]) > sum(lengths) / 2)
    for seed in range(5):
        chosen = [lengths[row] for row in choose_rows(lengths, sum(lengths) // 5, generator(seed))]
        assert sum(length for length in chosen if length > half_mass) / sum(chosen) == pytest.approx(0.5, abs=0.1)


def test_a_long_row_is_chosen_however_many_short_ones_there_are() -> None:
    lengths = [10] * 990 + [1000] * 10
    for seed in range(5):
        assert max(choose_rows(lengths, 2000, generator(seed))) >= 990


def test_all_rows_are_chosen_if_they_fit_and_none_if_none_does() -> None:
    lengths = long_tailed(20)
    assert choose_rows(lengths, sum(lengths), generator()) == list(range(20))
    assert choose_rows(lengths, min(lengths) - 1, generator()) == []
    assert choose_rows([], 100, generator()) == []


def test_the_choice_follows_the_generator() -> None:
    lengths = long_tailed(100)
    choices = [choose_rows(lengths, 1000, generator(seed)) for seed in (0, 0, 1)]
    assert choices[0] == choices[1] != choices[2]


def test_the_engine_can_still_be_changed_in_its_hook(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    calls: list[str] = []
    data = make_data(prompts_path)
    setup = data.engine.setup
    data.engine.setup = lambda *a, **k: (calls.append("setup"), setup(*a, **k))  # type: ignore[method-assign,assignment]

    class First(RolloutCallback):
        def on_engine_setup(self, trainer, pl_module, engine):  # type: ignore[no-untyped-def]
            calls.append("hook" if engine is data.engine else "another engine")

    make_trainer(tmp_path, First(), max_epochs=1).fit(RLModule(policy_path, GRPO()), data)
    assert calls == ["hook", "setup"]
