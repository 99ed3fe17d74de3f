"""Runs of a tiny policy under each schedule: what they learn from, and that they resume exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conftest import Paths
from tests.runs.test_resume import STEPS, SaveAt, run
from tests.support.rl_runs import Recorder, make_data, make_engine
from tlt_lightning import (
    PartialRollout,
    RewardTerm,
    RolloutSchedule,
    Sampling,
    Speculation,
    SynchronousSchedule,
    TailBatching,
    VLLMEngine,
)
from tlt_lightning.data.iteration_settings import DynamicSampling
from tlt_lightning.data.prompts import PromptCursor
from tlt_lightning.rollout import Rollout
from tlt_lightning.speculation import FixedSelector

RUNS = [
    pytest.param("transformers", TailBatching(0.5), id="tail", marks=pytest.mark.slow),
    pytest.param("vllm", PartialRollout(0.5, 1), id="partial", marks=pytest.mark.vllm),
    pytest.param("drafts", PartialRollout(0.5, 1), id="partial, drafts", marks=pytest.mark.vllm),
]


def data_of(name: str, schedule: RolloutSchedule | None, **settings: Any) -> dict[str, Any]:
    engine = make_engine("transformers" if name == "transformers" else "vllm")
    if isinstance(engine, VLLMEngine):
        if name == "drafts":  # of every look-up
            engine.speculation = Speculation(selector=FixedSelector(3, "sibling"), siblings=True, ngram=True)
        settings |= {"sampling": Sampling(max_tokens=40, stop_token_ids=(12, 13, 14)), "micro_batch_tokens": 128}
    return {"engine": engine, "schedule": schedule, **settings}


def texts(recorder: Recorder, iterations: slice) -> list[tuple[int, tuple[int, ...]]]:
    rollouts: list[Rollout] = [rollout for it in recorder.rollouts[iterations] for rollout in it]
    return sorted((rollout.prompt.index, tuple(rollout.response.token_ids)) for rollout in rollouts)


def test_a_cycle_of_tail_batching_learns_once_from_each_prompt_by_the_weights_of_now(paths: Paths) -> None:
    recorder, schedule = Recorder(), TailBatching(0.5)  # two short iterations, one long
    _, history, _ = run(paths, recorder, data=data_of("transformers", schedule), limit_val_batches=0)
    assert recorder.versions == [(STEPS * n, {STEPS * n}) for n in range(3)]
    drawn = PromptCursor(len(Path(paths[1]).read_text().splitlines()), 11).peek(12)
    assert sorted(prompt for prompt, _ in texts(recorder, slice(3))) == sorted(4 * drawn)
    assert [history[n]["schedule/deferred"] for n in (1, 2, 3)] == [2, 4, 0]
    assert [history[n]["schedule/waited"] for n in (1, 2, 3)] == [0, 0, 2]
    assert [{rollout.deferrals for rollout in recorder.rollouts[n]} for n in range(3)] == [{0}, {0}, {1}]
    assert not {"schedule/age", "schedule/tokens_thrown_away"} & history[3].keys()


def test_a_schedule_that_chooses_too_few_ends_the_run(paths: Paths) -> None:
    class First(SynchronousSchedule):
        def choose(self, demand: Any, groups: Any, complete: Any) -> Any:
            return complete[:1]

    with pytest.raises(ValueError, match=r"`First\.choose` returned \[\d\] where .* `demand\.wanted` of these, 4,"):
        run(paths, data=data_of("transformers", First()), limit_val_batches=0)


@pytest.mark.parametrize(("engine", "schedule"), RUNS)
def test_a_run_with_prompts_put_aside_resumes_exactly(
    engine: str, schedule: RolloutSchedule, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    def go(*callbacks: Any, ckpt: Path | None = None) -> Any:
        return run(paths, *callbacks, ckpt=ckpt, data=data_of(engine, schedule), limit_val_batches=0)

    saves = {hook: SaveAt(paths[2] / f"{hook}.ckpt", hook, 1) for hook in ("progress", "scored")}
    recorder = Recorder()
    whole, history, _ = go(recorder, *saves.values())
    for save in saves.values():
        resumed, rest, _ = go(ckpt=save.path)
        for name, tensor in whole.items():
            assert torch.equal(tensor, resumed[name]), (save.path, name)
        for iteration, metrics in rest.items():
            assert metrics == pytest.approx(history[iteration])
    if engine == "drafts":
        assert history[3]["speculation/proposed_sibling"] > 0
    if engine != "transformers" and isinstance(schedule, PartialRollout):
        waiting = torch.load(saves["progress"].path, weights_only=True)["RolloutDataModule"]["ranks"][0]["deferred"]
        assert any(response["finish_reason"] == "unfinished" for group in waiting for response in group["responses"])
        assert history[2]["schedule/continued"] > 0
        assert 0 < history[2]["schedule/age"] < 1 == history[2]["schedule/age_max"]
        versions = {rollout.response.policy_versions for rollout in recorder.rollouts[1]}
        assert (0, STEPS) in versions
        assert "samples from another policy" not in caplog.text


@pytest.mark.vllm
def test_ages_are_counted_in_iterations_though_these_had_another_number_of_steps(paths: Paths) -> None:
    def go(num_minibatches: int, *callbacks: Any, **other: Any) -> Any:
        data = data_of("vllm", PartialRollout(0.5, 1), num_minibatches=num_minibatches)
        return run(paths, *callbacks, data=data, limit_val_batches=0, **other)[1]

    save = ModelCheckpoint(paths[2], "end", save_on_train_epoch_end=True)
    go(2, save, max_epochs=1, enable_checkpointing=True)
    history = go(1, ckpt=Path(save.best_model_path))
    assert 0 < history[2]["schedule/age"] < 1
    assert [history[iteration]["schedule/age_max"] for iteration in (2, 3)] == [1, 1]


def first_is_even(prompt: str, response: str, row: dict[str, Any]) -> float:
    """A reward that all responses of a group often share."""
    return float(response[:1] in {*"02468"})


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(TailBatching(0.5), id="tail", marks=pytest.mark.slow),
        pytest.param(PartialRollout(0.5), id="partial"),
    ],
)
def test_dynamic_sampling_works_under_a_schedule(schedule: RolloutSchedule, paths: Paths) -> None:
    recorder = Recorder()
    dynamic = DynamicSampling(max_rounds=20)
    data = data_of("transformers", schedule, dynamic_sampling=dynamic, rewards=[RewardTerm(function=first_is_even)])
    _, history, _ = run(paths, recorder, data=data, limit_val_batches=0)
    assert max(metrics["rollout/groups_drawn"] for metrics in history.values()) > 4
    assert {metrics["rollout/groups_without_signal_kept"] for metrics in history.values()} == {0}
    for batch in recorder.batches:
        assert batch.rewards.view(4, 4).std(1).min() > 0


def test_a_schedule_is_given_by_its_class(prompts_path: str) -> None:
    assert make_data(prompts_path).backlog.schedule.stops is False
    schedule = PartialRollout(0.25, 3)
    assert make_data(prompts_path, schedule=schedule).backlog.schedule is schedule
