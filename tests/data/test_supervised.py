"""Supervised fine-tuning: which tokens are learned, runs that resume, and what comes before a rollout."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import save_policy
from tests.data.test_formats import TWO_TURNS, messages
from tests.support.report_pages import read_page
from tests.support.rl_runs import make_data, make_module, make_trainer, weights
from tlt_lightning import (
    HiddenStateRequest,
    LoRA,
    PolicyText,
    PromptSource,
    RLModule,
    RolloutCallback,
    SupervisedDataModule,
    export_policy,
)
from tlt_lightning.data.formats import Text
from tlt_lightning.data.texts import AnsweredRows
from tlt_lightning.objectives import GRPO, SFT
from tlt_lightning.training.resume import Requeue

TEMPLATE = (
    "{% for turn in messages %}{% if turn['role'] == 'assistant' %}{{ '= ' }}[[{{ turn['content'] + ' <eos>' }}]]"
    "{{ '\n' }}{% else %}{{ ': ' + turn['content'] + ' <eos>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '= ' }}{% endif %}"
)
UNMARKED = TEMPLATE.replace("[[", "").replace("]]", "")
MARKED = TEMPLATE.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
OTHERS = [[("user", "1"), ("assistant", "2 3")], [("user", "4 + 4 + 4"), *TWO_TURNS[1:], ("user", "5")]]
CONVERSATIONS = [{"messages": messages(turns)} for turns in [TWO_TURNS, *OTHERS]]
PAIRS = [{"prompt": f"{i} {i} = ", "completion": f"{i + 1} {'7 ' * i}"} for i in range(6)]
ROWS = [{"prompt": f"{i % 9} + {i % 7} =", "answer": f"{i % 5} {'8 ' * (i % 4)}"} for i in range(20)]


class Kept(L.Callback):
    """Keeps the gradients of the first optimizer step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            parameters = pl_module.policy.named_parameters()
            self.gradients = {name: each.grad.clone() for name, each in parameters if each.grad is not None}


def make(policy: str, rows: Any, **settings: Any) -> tuple[RLModule, SupervisedDataModule]:
    module = {name: settings.pop(name) for name in ("lora", "objective") if name in settings}
    data: dict[str, Any] = {"train": rows, "batch_size": 4, **settings}
    return make_module(policy, **{"objective": SFT(), **module}), SupervisedDataModule(**data)


def save_chat_policy(path: Path, template: str | None) -> str:
    save_policy(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


def trl_step(policy: str, rows: list[dict[str, Any]], out: Path, packing: bool) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of TRL's first step over all rows."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    args = trl.SFTConfig(
        output_dir=str(out),
        assistant_only_loss="messages" in rows[0],
        packing=packing,
        max_length=64,
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    data, tokenizer = datasets.Dataset.from_list(rows), AutoTokenizer.from_pretrained(policy)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.oracle
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("pass_tokens", [32, 512])
@pytest.mark.parametrize("kind", ["conversations", "pairs"])
def test_loss_and_gradients_are_those_of_trl(kind: str, packing: bool, pass_tokens: int, tmp_path: Path) -> None:
    """Ours reads a template without marks of what the assistant says, and cuts the step into passes."""
    has_turns = kind == "conversations"
    rows = CONVERSATIONS if has_turns else PAIRS
    loss, gradients = trl_step(
        save_chat_policy(tmp_path / "marked", MARKED if has_turns else None), rows, tmp_path, packing
    )
    policy = save_chat_policy(tmp_path / "policy", UNMARKED if has_turns else None)
    module, data = make(policy, rows, batch_size=len(rows), micro_batch_tokens=pass_tokens)
    kept = Kept()
    trainer = make_trainer(tmp_path, kept, max_epochs=1)
    trainer.fit(module, data)
    assert float(trainer.callback_metrics["train/passes"]) > 1 or pass_tokens > 32
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(loss, abs=1e-6)
    assert kept.gradients.keys() == gradients.keys()
    for name, gradient in kept.gradients.items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-6, rtol=1e-5)


def read(policy: str, rows: list[dict[str, Any]], max_tokens: int = 64, **source: Any) -> tuple[list[Text], Any]:
    reader = AnsweredRows(PromptSource(rows=rows, **source), policy, max_tokens)
    return reader.read_all(), reader.tokenizer.decode


@pytest.mark.parametrize(
    ("row", "source"),
    [
        ({"prompt": "1 + 2", "answer": "3"}, {}),
        ({"prompt": "1 + 2", "completion": "3", "messages": None}, {}),
        ({"prompt": messages(TWO_TURNS[:1]), "answer": messages(TWO_TURNS[1:2])}, {}),
        ({"question": "1 + 2", "right": "3", "answer": "5"}, {"prompt_column": "question", "answer_column": "right"}),
        ({"a": 1, "b": 2, "answer": "3"}, {"template": "{{ a }} + {{ b }}"}),
        ({"messages": messages(TWO_TURNS[:2])}, {}),
        ({"prompt": "5 5", "messages": messages(TWO_TURNS[:2])}, {}),
        ({"talk": messages(TWO_TURNS[:2])}, {"prompt_column": "talk"}),
        ({"conversations": [{"from": "human", "value": "1 + 2"}, {"from": "gpt", "value": "3"}]}, {}),
    ],
)
def test_each_format_of_a_recipe_gives_the_prompt_of_rl_and_its_answer(
    row: dict[str, Any], source: dict[str, Any], tmp_path: Path
) -> None:
    (text,), decode = read(save_chat_policy(tmp_path, UNMARKED), [row], **source)
    assert (decode(text.prompt), decode(text.answers)) == (":1+2<eos>=", "3<eos>")


def test_what_predict_wrote_is_imitated_token_by_token(policy_path: str) -> None:
    row = {"prompt": "1", "answer": "4", "prompt_ids": [5, 6], "response_ids": [7, 1], "response": "3"}
    assert read(policy_path, [row])[0] == [Text([5, 6, 7, 1], 2)]


def test_a_system_prompt_and_a_template_of_ones_own_are_written(tmp_path: Path) -> None:
    texts, decode = read(
        save_chat_policy(tmp_path, None), ROWS[:1], system_prompt="6 6", chat=True, chat_template=UNMARKED
    )
    assert decode(texts[0].ids) == ":66<eos>:0+0=<eos>=0<eos>"


def test_texts_are_cut_and_rows_left_out_with_a_warning(policy_path: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "1", "answer": "2 3 4 5 6"}, {"prompt": "1", "answer": None}, {"prompt": "1", "answer": "2"}]
    texts, decode = read(policy_path, rows, max_tokens=4)
    assert [decode(text.answers) for text in texts] == ["2 3 4", "2 <eos>"]
    assert "1 of 3 rows of `rows` are left out, the first: row 1" in caplog.text
    assert "1 of 2 texts of `rows` reach `max_tokens` 4, where they are cut" in caplog.text


def test_rows_of_no_format_are_named_with_what_they_have(policy_path: str) -> None:
    with pytest.raises(ValueError, match=r"`rows` has the columns text, id; a row must have `prompt_ids`.*`messages`"):
        read(policy_path, [{"text": "1", "id": 2}])
    with pytest.raises(ValueError, match=r"`rows` holds no text to learn from: row 0"):
        read(policy_path, [{"prompt": "1", "answer": 7}])
    with pytest.raises(
        ValueError, match=r"Row 0 \(from 0\) of `rows` is a conversation, which .* has no chat template for"
    ):
        read(policy_path, CONVERSATIONS)


def fit(
    policy: str, root: Path, *callbacks: L.Callback, ckpt: Path | None = None, epochs: int = 4, **settings: Any
) -> Any:
    L.seed_everything(11)
    module, data = make(policy, ROWS, **{"steps_per_epoch": 2, **settings})
    trainer = make_trainer(root, *callbacks, max_epochs=epochs, enable_checkpointing=True)
    trainer.fit(module, data, ckpt_path=ckpt)
    return module, data, trainer


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_a_run_resumes_bit_for_bit_amid_a_pass_over_the_data(
    lora: LoRA | None, policy_path: str, tmp_path: Path
) -> None:
    """Five steps are a pass, and an epoch has two."""
    whole, data, _ = fit(policy_path, tmp_path / "whole", lora=lora)
    fit(policy_path, tmp_path / "part", epochs=3, lora=lora)
    saved = tmp_path / "part/checkpoints/last.ckpt"
    resumed, resumed_data, trainer = fit(policy_path, tmp_path / "resumed", ckpt=saved, lora=lora)
    assert trainer.global_step == 8
    assert data.state_dict() == resumed_data.state_dict()
    assert data.state_dict()["position"] == 32
    loaded = SupervisedDataModule.load_from_checkpoint(saved, train=PromptSource(rows=ROWS))
    assert loaded.hparams == data.hparams
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


class StopBefore(L.Callback):
    """Ends the run before an optimizer step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.datamodule.liveness.interrupt()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_an_interrupted_run_has_drawn_what_it_has_learned(step: int, policy_path: str, tmp_path: Path) -> None:
    """Before an epoch's first step the run ends there; amid an epoch it is finished first."""
    whole, _, _ = fit(policy_path, tmp_path / "whole")
    with pytest.raises(SystemExit):
        fit(policy_path, tmp_path / "part", StopBefore(step))
    resumed, data, trainer = fit(policy_path, tmp_path / "part", ckpt=tmp_path / "part/checkpoints/last.ckpt")
    assert (trainer.global_step, data.state_dict()["position"]) == (8, 32)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_an_epoch_is_a_pass_in_which_each_text_comes_once(policy_path: str, tmp_path: Path) -> None:
    seen: list[int] = []

    class Seen(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.extend(hash(tuple(ids.tolist())) for part in batch for ids in part.input_ids)

    rows = [{"prompt": f"{i} =", "answer": f"{i}"} for i in range(8)]
    module, data = make(policy_path, rows, batch_size=4)
    make_trainer(tmp_path, Seen(), max_epochs=2).fit(module, data)
    first, second = seen[:8], seen[8:]
    assert len(set(first)) == 8
    assert set(first) == set(second)
    assert first != second


def test_overfitting_takes_so_many_batches_of_the_first_texts_and_all_held_out_ones(
    policy_path: str, tmp_path: Path
) -> None:
    module, data = make(policy_path, ROWS, val=ROWS[:3])
    make_trainer(tmp_path, max_epochs=1, overfit_batches=2).fit(module, data)
    assert (len(data.train_texts), len(data.val_texts), data.num_steps) == (8, 3, 2)


def test_a_prompt_is_learned_where_all_tokens_are_asked_for(policy_path: str, tmp_path: Path) -> None:
    module, data = make(policy_path, ROWS[:4], assistant_only=False)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, data)
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    losses = [
        model(ids, labels=ids).loss * (ids.shape[1] - 1)
        for ids in map(torch.tensor, ([t.ids] for t in data.train_texts))
    ]
    total = sum(len(text.ids) - 1 for text in data.train_texts)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(sum(losses)) / total, abs=1e-6)


def test_held_out_loss_is_that_of_all_tokens_however_they_are_batched(policy_path: str, tmp_path: Path) -> None:
    results = []
    for size in (3, 20):
        module, data = make(policy_path, ROWS, val=ROWS[:7], batch_size=size)
        trainer = make_trainer(tmp_path, limit_val_batches=1.0)
        results.append(trainer.validate(module, data, verbose=False)[0])
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    losses = []
    for text in data.val_texts:
        logps = model(torch.tensor([text.ids])).logits[0, :-1].log_softmax(-1)
        losses += [-float(logps[at - 1, text.ids[at]]) for at in range(text.prompt_length, len(text.ids))]
    expected = torch.tensor(losses).mean()
    for result in results:
        assert result == {
            "val/loss": pytest.approx(float(expected), abs=1e-5),
            "val/perplexity": pytest.approx(float(expected.exp()), rel=1e-5),
        }


@pytest.mark.slow
def test_a_checkpoint_is_exported_and_begins_a_run_of_rl_and_a_report_shows_the_loss(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    L.seed_everything(11)
    module, data = make(policy_path, ROWS, val=ROWS)
    trainer = make_trainer(tmp_path, enable_checkpointing=True, logger=None, limit_val_batches=1.0)
    trainer.fit(module, data)
    metrics = read_page(tmp_path)["metrics"]
    assert metrics["train/loss"][1] < metrics["train/loss"][0]
    assert metrics["val/loss"][1] < metrics["val/loss"][0]
    assert not any(name.startswith(("mismatch/", "reward/", "rollout/")) for name in metrics)
    exported = export_policy(str(tmp_path / "checkpoints/last.ckpt"), str(tmp_path / "hf"), dtype="float32")
    rl = make_module(str(exported))
    make_trainer(tmp_path / "rl", max_epochs=1).fit(rl, make_data(prompts_path))
    assert rl.iteration_metrics["rollout/tokens"] > 0


def test_a_fit_goes_on_where_the_trainers_last_one_ended(policy_path: str, tmp_path: Path) -> None:
    L.seed_everything(11)
    module, data = make(policy_path, ROWS, steps_per_epoch=2)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    assert data.state_dict()["position"] == 24


class Asks(RolloutCallback):
    """Asks for hidden states, and keeps what comes."""

    def __init__(self) -> None:
        self.texts: list[PolicyText] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.hidden_state_request = HiddenStateRequest((0, 1, 2), max_tokens=10_000)

    def on_hidden_states(self, trainer: Any, pl_module: Any, texts: Any) -> None:
        assert {text.policy_version for text in texts} == {trainer.global_step - 1}
        self.texts += texts


def test_hidden_states_come_after_each_step_from_its_own_pass(policy_path: str, tmp_path: Path) -> None:
    asks = Asks()
    module, data = make(policy_path, ROWS, micro_batch_tokens=32)
    make_trainer(tmp_path, asks, max_epochs=1).fit(module, data)
    assert len(asks.texts) == 20
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    text = asks.texts[0]  # of the first step
    expected = model(text.input_ids[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(text.states[:, :64], expected[0][0].bfloat16())
    torch.testing.assert_close(text.states[:, 64:128], expected[1][0].bfloat16(), atol=0.01, rtol=0.02)


@pytest.mark.slow
def test_a_requeue_amid_an_epoch_waits_for_the_next_one_and_resumes_exactly(policy_path: str, tmp_path: Path) -> None:
    whole, _, _ = fit(policy_path, tmp_path / "whole")

    class Preempted(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                (requeue,) = (each for each in trainer.callbacks if isinstance(each, Requeue))
                requeue.handle(lambda: trainer.save_checkpoint(tmp_path / "requeued.ckpt"))

    fit(policy_path, tmp_path / "part", Preempted(), epochs=3)
    resumed, data, trainer = fit(policy_path, tmp_path / "resumed", ckpt=tmp_path / "requeued.ckpt")
    assert (trainer.global_step, data.state_dict()["position"]) == (8, 32)
    assert torch.load(tmp_path / "requeued.ckpt", weights_only=True)["global_step"] == 4
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": GRPO()}, r"`model.objective` GRPO learns from rewards, .* use `SFT`"),
        ({"train": None}, r"`data.train` is not set"),
        ({"batch_size": 0}, r"`batch_size` must be at least 1"),
    ],
)
def test_what_cannot_be_learned_is_refused(
    settings: dict[str, Any], message: str, policy_path: str, tmp_path: Path
) -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        make_trainer(tmp_path).fit(*make(policy_path, ROWS, **settings))
