from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.test_module import make_data, make_trainer
from tests.test_policy import make_batch
from tlt_lightning import LoRA, RLModule, RolloutCallback
from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.hidden_states import HiddenStateRequest, HiddenStates, HiddenStateTap
from tlt_lightning.objectives import GRPO, K3, KLPenalty
from tlt_lightning.policy import causal_lm

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


def ask(module: RLModule, rows: list[int], layer_ids: tuple[int, ...] = (0, 1, 2)) -> list[RolloutBatch]:
    """Request the states of `rows`; returns the batches that `choose` was given."""
    seen: list[RolloutBatch] = []

    def choose(batch: RolloutBatch) -> list[int]:
        seen.append(batch)
        return rows

    module.hidden_state_request = HiddenStateRequest(layer_ids, choose)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_the_states_are_those_of_the_policy_and_the_scores_stay_as_they_are(case: str, policy_path: str) -> None:
    module = make_module(policy_path, **CASES[case])
    batch = make_batch([3, 5, 4, 2], [6, 1, 9, 4])
    plain = module.score(batch, micro_batch_size=2)
    assert plain.hidden_states is None
    seen = ask(module, [2, 0])
    tapped = module.score(batch, micro_batch_size=2)
    assert torch.equal(tapped.old_logps, plain.old_logps)
    assert torch.equal(tapped.ref_logps, plain.ref_logps)
    assert len(seen) == 1
    assert seen[0] is batch
    assert set(tapped.hidden_states) == {0, 2}
    for row, states in tapped.hidden_states.items():
        length = int(batch.prompt_lengths[row] + batch.response_lengths[row])
        with module.trainer.precision_plugin.forward_context(), torch.no_grad():
            trunk: Any = causal_lm(module.policy).base_model
            expected = trunk(batch.input_ids[row : row + 1, :length], output_hidden_states=True).hidden_states
            normed = trunk.norm(states.last.float()[None])
        assert (states.layers.dtype, states.last.dtype) == (torch.bfloat16, torch.bfloat16)
        parts = states.layers.float().split(64, -1)
        for part, hidden in zip(parts[:2], expected[:2], strict=True):
            torch.testing.assert_close(part, hidden[0].float(), atol=2e-2, rtol=2e-2)
        assert torch.equal(parts[2], states.last.float())  # what follows the last layer, not yet normed
        torch.testing.assert_close(normed, expected[2].float(), atol=4e-2, rtol=4e-2)


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
    module.score(batch, micro_batch_size=1)
    assert not registered
    ask(module, [1])
    module.score(batch, micro_batch_size=1)
    assert len(registered) == 3  # only around the micro-batch of row 1; the last layer's output has one hook
    with pytest.raises(RuntimeError, match="broken"), HiddenStateTap(module.policy, (1,), [0]):
        raise RuntimeError("broken")
    assert hooks_of(module) == 0


@pytest.mark.parametrize("case", CASES)
def test_where_the_policy_is_not_scored_the_update_gives_the_same_states(case: str, policy_path: str) -> None:
    module, batch = make_module(policy_path, **{"objective": GRPO(), **CASES[case]}), make_batch([3, 5, 4], [6, 1, 9])
    ask(module, [0, 2])
    states, hooks = module.score(batch, micro_batch_size=3).hidden_states, hooks_of(module)
    sizes: list[int] = []
    counter = causal_lm(module.policy).base_model.register_forward_hook(lambda *args: sizes.append(1))
    alone = module.score(batch, micro_batch_size=3, single_update=True)
    counter.remove()
    assert (alone.old_logps, alone.hidden_states) == (None, None)
    assert not sizes  # no pass but the update's
    for rows in ([2, 1], [0]):
        part = replace(
            batch.select(rows),
            advantages=torch.ones(len(rows), int(batch.response_lengths[rows].max())),
            num_loss_tokens=16.0,
        )
        with module.trainer.precision_plugin.train_step_context():
            module.training_step(part, 0).backward()
    assert module._update_tap is not None
    taken = module._update_tap.hidden_states
    assert set(taken) == {0, 2}
    for row, own in taken.items():
        torch.testing.assert_close(own.layers, states[row].layers)
        torch.testing.assert_close(own.last, states[row].last)
    assert hooks_of(module) == hooks


def test_layers_that_are_not_there_are_refused(policy_path: str) -> None:
    with pytest.raises(ValueError, match=r"names \[-1, 3\], but the policy's layers are 0 to 2"):
        HiddenStateTap(make_module(policy_path).policy, (-1, 1, 3), [0])


class Asker(RolloutCallback):
    """Compares what it is given with the states before the update, and notes when that was."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batch: RolloutBatch | None = None
        self.expected: list[HiddenStates] = []

    def on_engine_setup(self, trainer, pl_module, engine):  # type: ignore[no-untyped-def]
        pl_module.hidden_state_request = HiddenStateRequest((0, 1, 2), lambda batch: range(3))

    def on_rollout_scored(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
        self.calls.append("scored")
        self.batch = batch
        with torch.no_grad(), HiddenStateTap(pl_module.policy, (0, 1, 2), range(3)) as tap:
            pl_module.policy(batch.input_ids)
        self.expected = tap.read(batch.lengths[:3].tolist())

    def on_hidden_states(self, trainer, pl_module, batch):  # type: ignore[no-untyped-def]
        self.calls.append("states")
        assert set(batch.hidden_states) == {0, 1, 2}
        for row, states in batch.hidden_states.items():
            torch.testing.assert_close(states.layers, self.expected[row].layers, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(states.last, self.expected[row].last, atol=1e-2, rtol=1e-2)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # type: ignore[no-untyped-def]
        assert self.batch.hidden_states is None  # their memory is free while the policy is trained
        assert batch.hidden_states is None
        self.calls.append("pass")

    def on_train_epoch_end(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        self.calls.append("end")


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_callback_gets_the_states_of_the_policy_before_the_update(
    accumulate: int, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    asker = Asker()
    module = RLModule(policy_path, GRPO(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-1))
    trainer = make_trainer(tmp_path, asker, accumulate_grad_batches=accumulate)
    trainer.fit(module, make_data(prompts_path))
    scores = ["scored", "states", *["pass"] * 4, "end"]
    updates = ["scored", *["pass"] * 4, "states", "end"]  # a single optimizer step, whose passes give the states
    assert asker.calls == (scores if accumulate == 2 else updates) * 2
    assert module._update_tap is None


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
