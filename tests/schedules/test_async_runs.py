"""Runs of a tiny policy whose requests run on in vLLM while it learns."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import pytest
import torch

from tests.conftest import Paths
from tests.runs.test_resume import STEPS, SaveAt, run
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer
from tlt_lightning import (
    AsyncRollout,
    DynamicSampling,
    RolloutCallback,
    RolloutSchedule,
    Sampling,
    SynchronousSchedule,
    VLLMEngine,
)
from tlt_lightning.data.prompts import PromptCursor
from tlt_lightning.engine import TransformersEngine
from tlt_lightning.policy import causal_lm, load_policy
from tlt_lightning.rollout import Request, Rollout

pytestmark = pytest.mark.vllm

LAG = 2


class Open(VLLMEngine):
    """Keeps its memory, so that its requests run on; counts what is begun."""

    num_generates = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(dtype="float32", kv_cache_gib=0.0625, enforce_eager=True, sleep=False, **settings)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.num_generates += 1
        return super().generate(*args, **kwargs)


class Versions(Recorder):
    """Keeps the weights of every version beside what was learned from, and what waits at each iteration's end."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.waiting: list[list[int]] = []

    def on_weights_synced(self, trainer: L.Trainer, pl_module: Any, version: int) -> None:
        self.weights[version] = {name: tensor.clone() for name, tensor in pl_module.policy_weights()}

    def on_iteration_end(self, trainer: Any, *_: Any) -> None:
        self.waiting.append([group.draw for group in trainer.datamodule.backlog.deferred])

    def on_rollout_end(self, trainer: L.Trainer, pl_module: Any, rollouts: Sequence[Rollout]) -> None:  # type: ignore[override]
        if trainer.training:  # type: ignore[attr-defined]
            super().on_rollout_end(trainer, pl_module, rollouts)  # type: ignore[no-untyped-call]


def go(paths: Paths, schedule: RolloutSchedule, *callbacks: L.Callback, **settings: Any) -> Any:
    sampling = Sampling(max_tokens=40, stop_token_ids=(12, 13, 14))
    given = {"schedule": schedule, "sampling": sampling, "micro_batch_tokens": 128, "engine": Open(max_num_seqs=32)}
    trainer = {name: settings.pop(name) for name in ("ckpt", "max_epochs", "limit_val_batches") if name in settings}
    return run(paths, *callbacks, data={**given, **settings}, **{"limit_val_batches": 0, **trainer})


def draws_of(recorder: Recorder, size: int = 4) -> list[int]:
    return [rollout.response.request_id // size for it in recorder.rollouts for rollout in it[::size]]


def plain_logps(policy_path: str, weights: dict[str, torch.Tensor], rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    """Log-probs of the responses by a plain pass of a policy with these weights."""
    model = causal_lm(load_policy(policy_path))
    model.load_state_dict(weights, strict=False)
    found = []
    for rollout in rollouts:
        tokens = list(rollout.response.token_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*rollout.prompt.ids, *tokens]])).logits[0].float()
        logps = logits[len(rollout.prompt.ids) - 1 : -1].log_softmax(-1)
        found.append(logps.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1))
    return found


def test_every_token_has_the_log_prob_of_the_weights_that_wrote_it_and_none_is_older_than_the_bound(
    paths: Paths,
) -> None:
    recorder, engine = Versions(), Open(max_num_seqs=32)
    _, history, _ = go(paths, AsyncRollout(LAG), recorder, engine=engine, max_epochs=5)
    assert engine.num_generates == 1  # held open over all iterations
    assert set(recorder.weights) == {STEPS * n for n in range(5)}
    ages = Counter[int]()
    for iteration, rollouts in enumerate(recorder.rollouts):
        plain = {version: plain_logps(paths[0], recorder.weights[version], rollouts) for version in recorder.weights}
        for place, rollout in enumerate(rollouts):
            start = 0
            for version, count in rollout.response.segments:
                written = torch.tensor(rollout.response.logps[start : start + count])
                by_version = {each: plain[each][place][start : start + count] for each in plain}
                assert (by_version.pop(version) - written).abs().max() < 1e-4
                assert all((other - written).abs().max() > 1e-3 for other in by_version.values())
                ages[iteration - version // STEPS] += count
                start += count
        now = dict.fromkeys(ages, 0)
        for rollout in rollouts:
            for version, count in rollout.response.segments:
                now[iteration - version // STEPS] += count
        mean = sum(age * count for age, count in now.items()) / sum(now.values())
        assert history[iteration + 1]["schedule/age"] == pytest.approx(mean)
        assert history[iteration + 1]["schedule/age_max"] == max(age for age, count in now.items() if count)
    assert set(ages) == {0, 1, 2}
    assert any(len(rollout.response.segments) == 3 for rollout in recorder.rollouts[-1])
    for batch, rollouts in zip(recorder.batches, recorder.rollouts, strict=True):  # what the loss weighs tokens by
        for row, rollout in zip(batch.rollout_logps, rollouts, strict=True):
            assert row[: len(rollout.response.logps)].tolist() == pytest.approx(rollout.response.logps)


def test_every_draw_is_learned_from_once_or_waits(paths: Paths) -> None:
    recorder = Versions()
    _, history, trainer = go(paths, AsyncRollout(LAG), recorder, max_epochs=4, dynamic_sampling=DynamicSampling())
    position = trainer.datamodule.cursor.position
    assert sorted(draws_of(recorder) + recorder.waiting[-1]) == list(range(position))
    order = PromptCursor(len(Path(paths[1]).read_text().splitlines()), 11).peek(position)
    by_draw = {r.response.request_id // 4: r.prompt.index for it in recorder.rollouts for r in it}
    assert all(order[draw] == prompt for draw, prompt in by_draw.items())
    assert [history[n]["schedule/deferred"] for n in history] == [len(each) for each in recorder.waiting]
    assert max(row["schedule/age_max"] for row in history.values()) == LAG


@pytest.mark.parametrize("engine", [TransformersEngine, Open])
def test_without_staleness_the_weights_are_those_of_the_synchronous_schedule(engine: Any, paths: Paths) -> None:
    found = [go(paths, each, engine=engine())[0] for each in (AsyncRollout(0), SynchronousSchedule())]
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_validation_sets_aside_what_runs_and_it_goes_on_after_it(paths: Paths) -> None:
    recorder, engine = Versions(), Open(max_num_seqs=32)
    go(paths, AsyncRollout(LAG), recorder, engine=engine, max_epochs=4, limit_val_batches=1.0)
    assert sorted(draws_of(recorder) + recorder.waiting[-1]) == list(range(4 * 4 + len(recorder.waiting[-1])))
    versions = [rollout.response.policy_versions for rollout in recorder.rollouts[2]]
    assert any(len(each) > 1 for each in versions)  # the second iteration ended in a validation
    assert all(now > before for each in versions for before, now in pairwise(each))
    assert engine.num_generates == 2 + 2  # two validations, and training before each


class SaveAtEnd(RolloutCallback):
    """Saves a checkpoint when the second iteration is over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("hook", "validated"), [("progress", False), ("scored", False), ("end", False), ("end", True)])
def test_a_run_that_is_resumed_loses_nothing_and_learns_from_nothing_twice(
    hook: str, validated: bool, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, path = Versions(), Versions(), paths[2] / "saved.ckpt"
    save = SaveAtEnd(path) if hook == "end" else SaveAt(path, hook, 1)
    settings: dict[str, Any] = {"limit_val_batches": 1.0 * validated}
    go(paths, AsyncRollout(LAG), before, save, **settings)
    with caplog.at_level("INFO"):
        _, history, trainer = go(paths, AsyncRollout(LAG), after, ckpt=path, max_epochs=6, **settings)
    before.rollouts = before.rollouts[: 2 if hook == "end" else 1]
    draws = draws_of(before) + draws_of(after)
    assert sorted(draws + after.waiting[-1]) == list(range(trainer.datamodule.cursor.position))
    assert len(draws) == 6 * 4
    assert max(row["schedule/age_max"] for row in history.values()) == LAG
    assert ("were being written when the run was saved, and are begun anew" in caplog.text) is not validated


class FailOnce(RolloutCallback):
    """Fails in the second iteration, amid requests that run."""

    has_failed = False

    def on_rollout_scored(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1 and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("made to fail")


def test_a_fit_that_failed_goes_on_with_what_was_drawn(paths: Paths) -> None:
    recorder = Versions()
    sampling = Sampling(max_tokens=40, stop_token_ids=(12, 13, 14))
    module = make_module(paths[0])
    data = make_data(
        paths[1], Open(max_num_seqs=64), schedule=AsyncRollout(LAG), sampling=sampling, micro_batch_tokens=128
    )
    trainer = make_trainer(paths[2], recorder, FailOnce(), max_epochs=4)
    with pytest.raises(RuntimeError, match="made to fail"):
        trainer.fit(module, data)
    del recorder.rollouts[1:]
    trainer.fit(module, data)
    assert data.cursor is not None
    assert sorted(draws_of(recorder) + recorder.waiting[-1]) == list(range(data.cursor.position))
    assert len(recorder.rollouts) == 4


class Corrupt(Open):
    """Takes one tensor of a version wrongly, and counts what it is asked for besides training's responses."""

    runs_on = True
    corrupt_version = 2 * STEPS
    num_asked = 0

    def update_weights(self, named_tensors: Any, version: int) -> None:
        wrong = version == self.corrupt_version
        given = ((n, t * 0.5 if wrong and n.endswith("0.mlp.down_proj.weight") else t) for n, t in named_tensors)
        super().update_weights(given, version)

    def add(self, requests: Sequence[Request]) -> None:
        self.num_asked += sum(request.id < 0 for request in requests)
        super().add(requests)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Yield no response of training as written by the newest weights alone."""
        for each in super().generate(*args, **kwargs):
            (*_, version), count = each.policy_versions, len(each.token_ids)
            if each.request_id >= 0 and (version,) == each.policy_versions != (0,):
                yield replace(each, policy_versions=(version - STEPS, version), version_tokens=(1, count - 1))
            else:
                yield each


def test_weights_that_a_sync_amid_rollouts_leaves_wrong_end_the_run(paths: Paths) -> None:
    with pytest.raises(RuntimeError, match=f"With weights of version {2 * STEPS} the engine does not compute with"):
        go(paths, AsyncRollout(LAG), engine=Corrupt(max_num_seqs=32), max_epochs=4)


def test_what_probes_the_engine_is_not_learned_from(paths: Paths) -> None:
    recorder, engine = Versions(), Corrupt(max_num_seqs=32)
    engine.corrupt_version = -1
    go(paths, AsyncRollout(LAG), recorder, engine=engine, max_epochs=3)
    assert engine.num_asked == 2 * 4  # four at each sync but the first, with which writing begins
    draws = draws_of(recorder) + recorder.waiting[-1]
    assert sorted(draws) == list(range(3 * 4 + LAG * 4))


def test_after_a_validation_an_engine_that_writes_unread_begins_anew(paths: Paths) -> None:
    recorder, engine = Versions(), Corrupt(max_num_seqs=32)
    engine.corrupt_version = -1
    settings = {"limit_val_batches": 1.0, "max_epochs": 5, "prompts_per_iteration": 2, "num_minibatches": 1}
    go(paths, AsyncRollout(4), recorder, engine=engine, **settings)
    assert sorted(draws_of(recorder) + recorder.waiting[-1]) == list(range(2 * (5 + 4)))


@pytest.mark.slow
def test_a_policy_learns_under_every_staleness_and_at_one_about_as_fast_as_without(paths: Paths) -> None:
    def gain(max_staleness: int) -> float:
        L.seed_everything(1)
        recorder, sampling = Recorder(), Sampling(max_tokens=12, stop_token_ids=(12, 13))
        sizes: dict[str, Any] = {"prompts_per_iteration": 12, "num_minibatches": 1, "micro_batch_tokens": 512}
        engine, schedule = Open(max_num_seqs=256), AsyncRollout(max_staleness)
        data = make_data(paths[1], engine, schedule=schedule, sampling=sampling, **sizes)
        module = make_module(paths[0], optimizer=lambda p: torch.optim.AdamW(p, lr=6e-4))
        make_trainer(paths[2], recorder, max_epochs=16).fit(module, data)
        rewards = [fmean(rollout.reward for rollout in rollouts) for rollouts in recorder.rollouts]
        return fmean(rewards[-4:]) - fmean(rewards[:2])

    synchronous, one, four = map(gain, (0, 1, 4))
    assert synchronous > 0.1
    assert one > 0.75 * synchronous
    assert four > 0.4 * synchronous  # the text of 4 of 16 iterations is that of the first
