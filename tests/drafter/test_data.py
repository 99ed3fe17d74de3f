"""`Trainer.fit(DrafterModule, DrafterDataModule)`: from completions on disk to a head on disk."""

import json
import random
import shutil
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from safetensors.torch import load_file, save_file

from tests.conftest import save_policy
from tests.data.test_formats import messages, save_target
from tests.support.drafters.draft_texts import read_by_target
from tests.support.speculation_engines import greedy_texts, save_endless_policy
from tlt_lightning.commands.cli import run_drafter_cli
from tlt_lightning.drafter.data import DrafterDataModule
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.teaching import Teaching
from tlt_lightning.drafter.texts.states import StateReader
from tlt_lightning.drafter.texts.texts import split_by_prompt
from tlt_lightning.drafter.vocabulary import drafted_tokens
from tlt_lightning.speculation.head_files import read_head
from tlt_lightning.training.lr_schedule import WarmupCosine

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "drafter_warmup.yaml"
NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_endless_policy(tmp_path_factory.mktemp("drafter") / "policy")


def write_completions(policy: str, path: Path) -> str:
    """Texts of the policy, with greedy search and to many lengths."""
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 32) for _ in range(4)] for _ in range(NUM_PROMPTS)]
    rows = []
    for prompt, text in zip(prompts, greedy_texts(policy, 60, prompts), strict=True):
        length = draw.randrange(10, 60)
        rows.append({"prompt_ids": prompt, "response_ids": text[4 : 4 + length], "reward": 1.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def completions(policy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_completions(policy, tmp_path_factory.mktemp("completions") / "completions.jsonl")


def save_forgetful_policy(path: Path) -> str:
    """A policy whose next token depends on the last one alone: what is learned on some prompts holds for others."""
    save_endless_policy(path)
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor * (0 if "o_proj" in name else 1) for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def make_trainer(path: Path, **options: Any) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": path,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**defaults, **options})


def make_module(policy: str, **arguments: Any) -> DrafterModule:
    return DrafterModule(policy, optimizer=lambda params: torch.optim.Adam(params, 3e-3), **arguments)


def weights(module: DrafterModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.trainable_tensors()}


def test_warm_up_raises_acceptance_on_held_out_prompts_and_leaves_a_head(tmp_path: Path) -> None:
    policy = save_forgetful_policy(tmp_path / "policy")
    completions = write_completions(policy, tmp_path / "completions.jsonl")
    module = make_module(policy, export_dir=str(tmp_path / "head"))
    data = DrafterDataModule(completions, num_tokens=128, val_share=0.25)
    trainer = make_trainer(tmp_path, max_epochs=6)
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data)
    after = trainer.callback_metrics
    assert before["val/acceptance_length"] < 1.3
    assert after["val/acceptance_length"] > before["val/acceptance_length"] + 0.4
    assert after["val/top1_pos_1"] > before["val/top1_pos_1"] + 0.3
    assert after["drafter/loss"].isfinite()
    assert read_head(str(tmp_path / "head")).layer_ids == module.layer_ids
    assert f"{after['val/acceptance_length']:.2f} tokens per step" in (tmp_path / "head/README.md").read_text()


def test_a_reduced_vocabulary_is_chosen_from_what_the_training_texts_hold(
    policy: str, completions: str, tmp_path: Path
) -> None:
    module = make_module(policy, draft_vocab_size=12)
    data = DrafterDataModule(completions, num_tokens=128)
    make_trainer(tmp_path, max_epochs=1).fit(module, data)
    counts = data.token_counts()
    drafted = set(drafted_tokens(module.head.d2t).tolist())
    others = set(range(32)) - drafted
    assert min(counts[token] for token in drafted - {1}) >= max(counts[token] for token in others)  # 1 ends a text
    written = [token for text in data.train_texts for token in text.answers]
    assert int(counts[9]) == written.count(9)


def test_texts_are_those_of_the_configuration_and_held_out_by_the_seed(
    policy: str, completions: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(completions, folder / "texts.jsonl")
    (folder / "README.md").write_text("---\nconfigs:\n- {config_name: mine, data_files: texts.jsonl}\n---\n")
    held_out = []
    for seed in (0, 0, 1):
        data = DrafterDataModule(str(folder), config="mine", num_tokens=128, seed=seed)
        make_trainer(tmp_path).validate(make_module(policy), data, verbose=False)
        held_out.append([text.ids for text in data.val_texts])
    assert held_out[0] == held_out[1] != held_out[2]
    with pytest.raises(ValueError, match=r"`config` .other., `split` .train.\) cannot be read"):
        make_trainer(tmp_path).validate(make_module(policy), DrafterDataModule(str(folder), config="other"))


def test_a_reduced_vocabulary_needs_texts_to_be_chosen_from(policy: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"`draft_vocab_size` 12 needs texts.*DrafterDataModule, or set it to 32"):
        make_trainer(tmp_path, max_epochs=1).fit(make_module(policy, draft_vocab_size=12), [])


def test_a_resumed_run_ends_with_the_same_weights(policy: str, completions: str, tmp_path: Path) -> None:
    whole, first, second = (DrafterModule(policy) for _ in range(3))
    make_data = lambda: DrafterDataModule(completions, num_tokens=128)  # noqa: E731
    make_trainer(tmp_path, max_epochs=4).fit(whole, make_data())
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(first, make_data())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    make_trainer(tmp_path, max_epochs=4).fit(second, make_data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second).items())
    assert not torch.equal(expected["fc.weight"], weights(first)["fc.weight"])
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == set(expected)  # the target's own weights are not in it


class Rates(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        (WarmupCosine, None),
        (WarmupCosine, WarmupCosine),
        (WarmupCosine, partial(WarmupCosine, warmup_share=0.5)),
    ],
)
def test_another_learning_rate_on_resume_is_used_as_if_it_had_been_there(
    before: Any, after: Any, policy: str, completions: str, tmp_path: Path
) -> None:
    def fit(scheduler: Any, lr: float, max_epochs: int, ckpt_path: Path | None = None) -> tuple[L.Trainer, list[float]]:
        module = DrafterModule(policy, optimizer=partial(torch.optim.AdamW, lr=lr), lr_scheduler=scheduler)
        trainer = make_trainer(tmp_path, max_epochs=max_epochs, limit_val_batches=0, callbacks=[rates := Rates()])
        data = DrafterDataModule(completions, num_tokens=128)
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
        return trainer, rates.seen

    fit(before, 1e-3, 1)[0].save_checkpoint(tmp_path / "half.ckpt")
    (_, rest), (_, whole) = fit(after, 1e-4, 2, tmp_path / "half.ckpt"), fit(after, 1e-4, 2)
    assert rest == pytest.approx(whole[len(whole) // 2 :])


def test_texts_that_come_otherwise_on_resume_are_named(
    policy: str, completions: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(max_epochs: int, ckpt_path: Path | None = None, **settings: Any) -> L.Trainer:
        trainer = make_trainer(tmp_path, max_epochs=max_epochs, limit_val_batches=0)
        data = DrafterDataModule(completions, **{"num_tokens": 128, **settings})
        trainer.fit(make_module(policy), data, ckpt_path=ckpt_path, weights_only=True)
        return trainer

    path = tmp_path / "one.ckpt"
    fit(1).save_checkpoint(path)
    fit(2, path)
    assert "goes on otherwise" not in caplog.text
    fit(2, path, num_tokens=256)
    assert "wrote the checkpoint: data.num_tokens was 128 and is 256." in caplog.text
    fit(2, path, val_share=0.5)
    assert "data.val_share was 0.1 and is 0.5; tokens of the training texts was" in caplog.text


def test_a_head_that_a_resumed_run_does_not_begin_from_is_named(
    policy: str, completions: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(max_epochs: int, ckpt_path: Path | None = None, head: str | None = None) -> DrafterModule:
        module = make_module(policy, head=head)
        trainer = make_trainer(tmp_path, max_epochs=max_epochs, limit_val_batches=0)
        trainer.fit(module, DrafterDataModule(completions, num_tokens=128), ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{max_epochs}.ckpt")
        return module

    path, head = tmp_path / "1.ckpt", fit(1).export(tmp_path / "head")
    fit(2, path)
    assert "is not used" not in caplog.text
    fit(2, path, str(head))
    assert f"`ckpt_path` goes on from random weights: `head`, now {head}, is not used." in caplog.text
    caplog.clear()
    fit(1, head=str(head))
    fit(2, path, str(head.rename(tmp_path / "moved")))
    assert "is not used" not in caplog.text


def test_a_checkpoint_of_another_optimizer_is_refused_in_words(policy: str, completions: str, tmp_path: Path) -> None:
    trainer, data = make_trainer(tmp_path, max_epochs=1), DrafterDataModule(completions, num_tokens=128)
    trainer.fit(make_module(policy), data)
    trainer.save_checkpoint(tmp_path / "adam.ckpt")
    with pytest.raises(ValueError, match=r"`optimizer` is no MuonWithAuxAdam: .* Resume with the optimizer of the run"):
        make_trainer(tmp_path).fit(DrafterModule(policy), data, ckpt_path=tmp_path / "adam.ckpt", weights_only=True)


def test_a_checkpoint_for_other_tokens_or_layers_is_refused(policy: str, completions: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(make_module(policy, draft_vocab_size=12), DrafterDataModule(completions, num_tokens=128))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    others = make_module(policy, draft_vocab_size=12), make_module(policy, draft_vocab_size=12, layer_ids=(0, 2, 4))
    others[0].choose_vocabulary(torch.arange(32))
    for other, message in zip(others, ("drafts other tokens", r"reads layers \[1, 2, 3\].*\[0, 2, 4\]"), strict=True):
        data = DrafterDataModule(completions, num_tokens=128)
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path).fit(other, data, ckpt_path=tmp_path / "one.ckpt", weights_only=True)


def test_features_are_those_of_each_text_alone(policy: str, completions: str, tmp_path: Path) -> None:
    module, data = make_module(policy), DrafterDataModule(completions, num_tokens=128)
    make_trainer(tmp_path, max_epochs=0).fit(module, data)
    data.setup("fit")
    sequences = StateReader(data.target, module.layer_ids, 128).read(data.train_texts)
    for text, sequence in zip(data.train_texts, sequences, strict=True):
        (expected,) = read_by_target(policy, [text.ids], text.prompt_length, module.layer_ids)
        assert torch.equal(sequence.input_ids, expected.input_ids)
        assert sequence.prompt_length == 4
        torch.testing.assert_close(sequence.states.float(), expected.states, atol=0.03, rtol=0.01)  # bfloat16
        torch.testing.assert_close(sequence.last_states.float(), expected.last_states, atol=0.03, rtol=0.01)


def test_the_learning_rate_of_a_run_falls_to_zero_with_its_last_step(
    policy: str, completions: str, tmp_path: Path
) -> None:
    class Seen(L.Callback):
        rates: list[float]

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
            self.rates = [*getattr(self, "rates", []), trainer.optimizers[0].param_groups[0]["lr"]]

    seen, module = Seen(), make_module(policy, lr_scheduler=lambda each: WarmupCosine(each, warmup_share=0.2))
    trainer = make_trainer(tmp_path, callbacks=[seen], max_epochs=3)
    trainer.fit(module, DrafterDataModule(completions, num_tokens=128))
    assert len(seen.rates) == trainer.global_step == 3 * trainer.num_training_batches
    assert seen.rates[0] < 3e-3 == max(seen.rates)
    assert 0 < seen.rates[-1] < 1e-4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0)


def test_conversations_of_a_hub_teach_all_their_answers(policy: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(policy, target)
    save_target(target)
    turns = [("user", "1"), ("assistant", "2 + 3 * 4"), ("user", "5"), ("assistant", "6 - 7 / 8")]
    rows = [{"messages": [{"role": "user", "content": str(n)}, *messages(turns)]} for n in range(12)]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    module = make_module(str(target))
    trainer = make_trainer(tmp_path, max_epochs=4)
    data = DrafterDataModule(str(path), num_tokens=128, split="train[:8]")
    trainer.fit(module, data)
    assert len(data.train_texts) + len(data.val_texts) == 8
    assert 2 < module.quality.num_steps <= 2 * 5  # entries of two answers of six tokens
    assert trainer.callback_metrics["drafter/loss"].isfinite()


class FailsAt(L.Callback):
    def __init__(self, index: int) -> None:
        self.index = index

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == self.index:
            raise ZeroDivisionError


class Seen(L.Callback):
    def __init__(self) -> None:
        self.packs: list[list[int]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        self.packs.append(batch.input_ids[0].tolist())


def test_texts_come_in_another_order_in_each_epoch(policy: str, completions: str, tmp_path: Path) -> None:
    seen = Seen()
    trainer = make_trainer(tmp_path, callbacks=[seen])
    trainer.fit(make_module(policy), DrafterDataModule(completions, num_tokens=128))
    half = trainer.num_training_batches
    first, second = seen.packs[:half], seen.packs[half:]
    assert len(first) == len(second) > 3
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))


def test_packs_to_overfit_are_the_same_in_each_epoch(policy: str, completions: str, tmp_path: Path) -> None:
    seen = Seen()
    trainer = make_trainer(tmp_path, callbacks=[seen], overfit_batches=3)
    trainer.fit(make_module(policy), DrafterDataModule(completions, num_tokens=128))
    assert len(seen.packs) == 6
    assert seen.packs[:3] == seen.packs[3:]


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 5, "val_check_interval": 2}])
def test_a_run_resumed_within_an_epoch_reads_on(
    limits: dict[str, Any], policy: str, completions: str, tmp_path: Path
) -> None:
    def fit(*callbacks: L.Callback, ckpt_path: Path | None = None) -> tuple[L.Trainer, list[list[int]]]:
        seen, data = Seen(), DrafterDataModule(completions, num_tokens=128)
        trainer = make_trainer(tmp_path, callbacks=[*callbacks, seen], **limits)
        trainer.fit(make_module(policy), data, ckpt_path=ckpt_path, weights_only=True)
        return trainer, seen.packs

    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer, packs = fit(keep)
    for step in (2, trainer.num_training_batches):  # within the first epoch, and at its end
        assert fit(ckpt_path=tmp_path / f"step={step}.ckpt")[1] == packs[step:]
    with pytest.raises(ZeroDivisionError):
        fit(FailsAt(3), OnExceptionCheckpoint(tmp_path, "failed"))
    assert fit(ckpt_path=tmp_path / "failed.ckpt")[1] == packs[3:]  # also the one that was read before it failed


def test_responses_to_one_prompt_stay_on_one_side() -> None:
    keys = [prompt for prompt in range(20) for _ in range(5)]
    train, held_out = split_by_prompt(keys, 0.1, seed=0)
    assert len(held_out) == 2 * 5
    assert sorted(train + held_out) == list(range(100))
    assert not {keys[row] for row in train} & {keys[row] for row in held_out}
    assert split_by_prompt(keys, 0.1, seed=1)[1] != held_out
    for share in (0.001, 0.999):  # of two prompts one is on each side
        assert [len(part) for part in split_by_prompt(keys[:10], share, seed=0)] == [5, 5]


def test_mistakes_are_found_before_anything_is_loaded(completions: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        DrafterDataModule([completions, str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(ValueError, match="`val_share`"):
        DrafterDataModule(completions, val_share=1.0)
    with pytest.raises(ValueError, match="`num_tokens`"):
        DrafterDataModule(completions, num_tokens=100)
    with pytest.raises(ValueError, match="1 prompt"):
        split_by_prompt([1], 0.1, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("completions", 3),
        ("completions", [3]),
        ("split", None),
        ("config", 3),
        ("num_tokens", "a"),
        ("val_share", "a"),
        ("seed", "a"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any, completions: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be "):
        DrafterDataModule(**{"completions": completions, name: value})


def test_the_recipe_trains_a_head_and_keeps_the_one_before(
    completions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    save_policy(tmp_path / "recipes/assets/countdown/policy", num_hidden_layers=4)
    (tmp_path / "outputs/quickstart").mkdir(parents=True)
    (tmp_path / "outputs/quickstart/completions.jsonl").write_text(Path(completions).read_text())
    options = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    run_drafter_cli(["fit", "-c", str(RECIPE), *options])
    head = tmp_path / "outputs/drafter/head"
    assert read_head(str(head)).draft_vocab_size == 32
    assert (tmp_path / "outputs/drafter/checkpoints/last.ckpt").is_file()
    first = {path.name: path.read_bytes() for path in head.iterdir()}
    assert "earlier run" not in caplog.text
    run_drafter_cli(["fit", "-c", str(RECIPE), *options, "--trainer.max_epochs", "1"])
    assert {path.name: path.read_bytes() for path in (head / "earlier_0").iterdir()} == first
    assert f"{head.relative_to(tmp_path)} held the drafter of an earlier run, kept in earlier_0" in caplog.text
    assert (head / "model.safetensors").read_bytes() != first["model.safetensors"]


def test_teaching_and_losses_are_chosen_in_yaml(policy: str, completions: str) -> None:
    given = {"model.target": policy, "data.completions": completions}

    def parse(**more: Any) -> Any:
        options = [f"--{name}={value}" for name, value in {**given, **more}.items()]
        return run_drafter_cli(options, run=False).model

    single = parse(**{"model.teaching.num_steps": 1, "model.teaching.decay": 0.5, "model.loss": "tv"})
    assert (single.teaching, single.loss_spec) == (Teaching(num_steps=1, decay=0.5), "tv")
    mixed = parse(**{"model.loss": '{"ce": 0.1, "nla": 0.9}'})
    assert json.loads(mixed.loss_spec) == {"ce": 0.1, "nla": 0.9}
