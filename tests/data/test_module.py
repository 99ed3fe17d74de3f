"""RolloutDataModule takes what Python users have, and refuses the rest in words."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support.rl_runs import Recorder, evenness, make_data, make_module, make_trainer
from tlt_lightning import PartialRollout, PromptSource, Sampling, TransformersEngine
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.data import module as data_module
from tlt_lightning.training.memory import pass_size
from tlt_lightning.training.resume import PROMPTS


def test_functions_and_rows_are_enough_to_train(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    L.seed_everything(11)
    rows = [json.loads(line) for line in Path(prompts_path).read_text().splitlines()][:3]
    recorder = Recorder()
    data = make_data(prompts_path, train=rows, val=prompts_path, rewards=[evenness])
    make_trainer(tmp_path, recorder, max_epochs=1).fit(make_module(policy_path), data)
    assert {rollout.prompt.index for rollout in recorder.rollouts[0]} == {0, 1, 2}
    assert all(rollout.reward == rollout.rewards["evenness"] for rollout in recorder.rollouts[0])


def test_a_token_at_which_the_chat_template_alone_ends_an_answer_is_named(
    policy_path: str, prompts_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}{{ m.content }} {{ '<unk>' if m.role == 'assistant' }}{% endfor %}"
    source = PromptSource(path=prompts_path, chat_template=template)
    for stop, held_out, count in ((), None, 1), ((2,), None, 0), ((2,), (), 1), ((2,), (2,), 0):
        sampling = {"sampling": Sampling(max_tokens=4, stop_token_ids=stop)}
        if held_out is not None:
            sampling["val_sampling"] = Sampling(max_tokens=4, stop_token_ids=held_out)
        data = make_data(prompts_path, train=source, val=source, **sampling)
        make_trainer(tmp_path, max_epochs=1).fit(make_module(policy_path), data)
        assert caplog.text.count("ends an answer with '<unk>' (token 2)") == count
        caplog.clear()


def test_checkpoints_do_not_read_all_prompts_again(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, crc32 = bytearray(), zlib.crc32

    def record(data: bytes, *start: int) -> int:
        hashed.extend(data if data.startswith(b"[") else b"")  # seeds are hashed, too
        return crc32(data, *start)

    monkeypatch.setattr(zlib, "crc32", record)
    data, checkpoints = make_data(prompts_path), IterationCheckpoint(str(tmp_path / "all"), every_minutes=0)
    make_trainer(tmp_path, checkpoints, max_epochs=3, enable_checkpointing=True).fit(make_module(policy_path), data)
    prompts = b"".join(repr([*prompt.ids]).encode() for prompt in data.train_prompts)
    assert hashed == prompts
    saved = torch.load(tmp_path / "all/last.ckpt", weights_only=True)["RolloutDataModule"]["settings"]
    assert saved[PROMPTS] == crc32(prompts)


class Change(Recorder):
    """Sets what `changes` says of an iteration, in the hook that is named."""

    def __init__(self, hook: str, changes: Callable[[int], dict[str, Any]]) -> None:
        super().__init__()
        setattr(self, hook, lambda trainer, module, *_: vars(trainer.datamodule).update(changes(trainer.current_epoch)))


def test_a_callback_changes_the_sampling_of_an_iteration(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    given = [Sampling(max_tokens=8), Sampling(max_tokens=3, temperature=0.5), Sampling(max_tokens=6, temperature=2.0)]
    change = Change("on_train_epoch_start", lambda iteration: {"sampling": given[iteration]})
    trainer = make_trainer(tmp_path, change, max_epochs=3, limit_val_batches=4, num_sanity_val_steps=0)
    trainer.fit(make_module(policy_path), make_data(prompts_path, val_sampling=Sampling(max_tokens=8)))
    assert [batch.temperature for batch in change.batches] == [1.0, 0.5, 2.0]
    assert [batch.response_mask.shape[1] for batch in change.batches] == [8, 3, 6]
    held_out = [max(len(each.response.token_ids) for each in rollouts) for rollouts in change.rollouts[1::2]]
    assert held_out == [8, 8, 8]
    assert trainer.callback_metrics["mismatch/logp_abs_diff"] < 1e-5


@pytest.mark.parametrize(
    ("hook", "change", "message"),
    [
        ("on_train_epoch_start", {"group_size": 2}, r"changed `data.group_size`, which this iteration would ignore"),
        (
            "on_rollout_start",
            {"sampling": Sampling(max_tokens=4)},
            r"changed `data.sampling`.* in `on_train_epoch_start`",
        ),
        (
            "on_train_epoch_start",
            {"sampling": Sampling(max_tokens=4, stop_strings=("x",)), "_environments": ()},
            "`environment` goes on with requests",
        ),
        ("on_engine_setup", {"group_size": 2}, r"changed `data.group_size`, which this iteration would ignore"),
        ("on_train_epoch_start", {"sampling": {"max_tokens": 4}}, r"`sampling` must be a Sampling, got \{"),
        ("on_train_epoch_start", {"sampling": Sampling(max_tokens=8, temperature=0)}, "temperature` 0 writes the same"),
    ],
)
def test_a_change_that_a_run_would_ignore_ends_it(
    hook: str, change: dict[str, Any], message: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, Change(hook, lambda iteration: change), max_epochs=1)
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.fit(make_module(policy_path), make_data(prompts_path))


@pytest.mark.parametrize("given", [Sampling(max_tokens=8), Sampling()])  # the latter is fitted to the policy's context
def test_a_schedule_that_continues_responses_keeps_to_one_sampling(
    given: Sampling, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    def fit(change: dict[str, Any]) -> None:
        data = make_data(prompts_path, schedule=PartialRollout(), sampling=given, micro_batch_tokens=None, group_size=2)
        trainer = make_trainer(tmp_path, Change("on_train_epoch_start", lambda iteration: change), max_epochs=1)
        trainer.fit(make_module(policy_path), data)

    fit({"sampling": Sampling(max_tokens=8)} if given.max_tokens == 8 else {})  # an equal one is no other
    with pytest.raises(ValueError, match="PartialRollout continues responses of earlier iterations"):
        fit({"sampling": Sampling(max_tokens=7)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(["group_size", "inner_epochs", "val_group_size"], ["8", None, 0.5, 0]),
        *product(["micro_batch_tokens", "max_prompt_tokens"], ["8", 0.5, 0]),
    ],
)
def test_sizes_that_are_no_counts_are_refused_by_name(name: str, value: Any, prompts_path: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must be .*(whole number|at least 1).*, got {value!r}"):
        make_data(prompts_path, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": TransformersEngine}, "`engine` must be a RolloutEngine or None, got the class TransformersEngine"),
        ({"sampling": {"max_tokens": 8}}, r"`sampling` must be a Sampling, got \{"),
        ({"train": 5}, "a path, a list of dictionaries or one split of a `datasets.Dataset`, got int"),
    ],
)
def test_arguments_of_another_type_are_refused_in_words(
    arguments: dict[str, Any], message: str, prompts_path: str
) -> None:
    with pytest.raises(TypeError, match=message):
        make_data(prompts_path, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "sizes", "chosen"), [(None, [1024], 1024), (None, [1024], 24), (64, [64], 64)])
def test_an_update_has_passes_of_the_chosen_size(
    given: int | None,
    sizes: list[int],
    chosen: int,
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[int]] = []

    def choose(trainer: L.Trainer, engine: Any, sizes: list[int], **lengths: int) -> int:
        asked.append(sizes)
        assert lengths == {"longest": 24, "max_model_len": 46}
        return chosen

    monkeypatch.setattr(data_module, "choose_on_device", choose)
    data = make_data(prompts_path, micro_batch_tokens=given, num_minibatches=1, val_sampling=Sampling(max_tokens=30))
    make_trainer(tmp_path, limit_val_batches=1).validate(make_module(policy_path), data, verbose=False)
    assert asked == []  # there is no update to choose for
    for _ in range(2):
        trainer = make_trainer(tmp_path, max_epochs=1)
        trainer.fit(make_module(policy_path), data)
    assert asked == [sizes, sizes]
    assert data.micro_batch_tokens == data.hparams["micro_batch_tokens"] == given
    assert bool(trainer.callback_metrics["train/passes"] > 1) is (chosen < 100)


@pytest.mark.slow
def test_passes_without_a_gpu_hold_the_longest_sequence(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_size, "CPU_SIZE", 32)
    data, trainer = make_data(prompts_path, micro_batch_tokens=None), make_trainer(tmp_path, max_epochs=1)
    sizes: list[tuple[int, int]] = []
    begin = data_module.PolicyIteration.__init__

    def spy(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        sizes.append((self.settings.micro_batch_tokens, self.settings.sampling.max_tokens))

    monkeypatch.setattr(data_module.PolicyIteration, "__init__", spy)
    trainer.fit(make_module(policy_path), data)
    data.sampling = Sampling(max_tokens=40)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(make_module(policy_path), data)
    assert sizes == [(32, 8), (56, 40)]


def test_a_reward_that_scores_nothing_ends_the_run(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    def broken(prompt: str, response: str, row: dict[str, Any]) -> float:
        return row["ground_truth"]

    trainer = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match=r"`broken` scored none of the last 16 responses\. .*test_module\.py:\d+"):
        trainer.fit(make_module(policy_path), make_data(prompts_path, rewards=[broken]))
    assert trainer.global_step == 0


def test_engines_are_told_how_long_answers_to_a_prompt_were(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[int, ...], float]] = []
    generate, recorder = TransformersEngine.generate, Recorder()

    def spy(self: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        asked.extend((tuple(each.prompt_ids), each.expected_tokens) for each in requests)
        return generate(self, requests, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", spy)
    make_trainer(tmp_path, recorder, max_epochs=3).fit(
        make_module(policy_path), make_data(prompts_path)
    )  # 12 draws of 9 prompts
    lengths: dict[tuple[int, ...], float] = {}
    for draw, rollouts in zip(range(0, 48, 16), recorder.rollouts, strict=True):
        for prompt, expected in asked[draw : draw + 16]:
            assert expected == lengths.get(prompt, 0.0)
        for prompt, _ in asked[draw : draw + 16]:
            own = [len(each.response.token_ids) for each in rollouts if tuple(each.prompt.ids) == prompt]
            lengths[prompt] = sum(own) / len(own)
    assert max(expected for _, expected in asked) > 0


def test_a_checkpoint_that_one_worker_wrote_alone_is_resumed_with_a_warning_or_refused(
    policy_path: str, prompts_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(make_module(policy_path), make_data(prompts_path))
    trainer.save_checkpoint(path := tmp_path / "alone.ckpt")
    saved = torch.load(path, weights_only=False)
    state = saved["RolloutDataModule"]
    state["settings"]["number of workers"] = 2  # as Lightning's OnExceptionCheckpoint leaves it
    torch.save(saved, path)
    resumed = make_trainer(tmp_path, max_epochs=2)
    resumed.fit(make_module(policy_path), make_data(prompts_path), ckpt_path=path, weights_only=False)
    assert resumed.current_epoch == 2
    assert "saved after an error, by 1 of 2 ranks: what a schedule had deferred on the others is lost" in caplog.text
