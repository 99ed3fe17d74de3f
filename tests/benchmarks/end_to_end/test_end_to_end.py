"""`python -m benchmarks end_to_end`: its plan, processes that fail, and its arms on a tiny policy."""

import argparse
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.common.arguments import ASSETS, RESULTS, ROOT
from benchmarks.end_to_end import report as end_to_end_report
from benchmarks.end_to_end import run as end_to_end
from benchmarks.end_to_end.planned import planned
from benchmarks.end_to_end.work import SETTINGS, Diary, Work, noise, score
from tlt_lightning import RayEngine
from tlt_lightning.training.memory.forecast import CONTEXT, GIB


def tiny_work(**settings: Any) -> Work:
    policy, train = str(ASSETS / "policy"), str(ASSETS / "train.jsonl")
    return Work(policy=policy, train=train, **{**SETTINGS["tiny"], **settings})


def arguments(**given: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "name": "tiny",
        "arms": ["plain", "siblings"],
        "natural_arms": ["plain", "siblings"],
        "modes": ["replay", "natural"],
        "seeds": [5, 6],
        "warmup": 1,
        "seconds": 600.0,
        "head": [],
        "note": "",
        "tiny": True,
    }
    return argparse.Namespace(**{**defaults, **given})


def iteration(number: int, *, rollout: float, reward: float = 0.5) -> dict[str, Any]:
    seconds = {"rollout": rollout, "update": 1.0, "sync": 0.1, "iteration": rollout + 1.1}
    metrics = {"reward/mean": reward, "rollout/tokens_per_s": 100.0, "mismatch/kl": 1e-5}
    metrics |= {f"time/{stage}": value for stage, value in seconds.items()}
    return {"iteration": number, "metrics": metrics}


def run(arm: str, mode: str = "replay", seed: int = 5, **given: Any) -> end_to_end.Run:
    return end_to_end.Run(arm, mode, seed, **given)


def results(*runs: end_to_end.Run) -> dict[str, Any]:
    about = {"size": "tiny", "command": "c", "hardware": "h", "versions": {}, "seed": 5, "note": "n", "warmup": 1}
    return {**about, "earlier": [], "left_out": [], "work": vars(tiny_work()), "runs": [vars(each) for each in runs]}


# What is done


def test_the_first_plain_run_records_lengths_unless_there_are_some() -> None:
    recording, wanted = end_to_end.plan(arguments(), has_lengths=False)
    assert list(map(str, recording)) == ["plain natural seed 5"]
    replayed = ["plain replay seed 5", "siblings replay seed 5"]
    natural = [f"{arm} natural seed {seed}" for seed in (5, 6) for arm in ("plain", "siblings")]
    assert list(map(str, wanted)) == replayed + natural
    recording, wanted = end_to_end.plan(arguments(modes=["replay"]), has_lengths=True)
    assert recording == []
    assert list(map(str, wanted)) == replayed


def test_lengths_of_another_run_are_cut_to_this_one_and_repeated() -> None:
    work = tiny_work(lengths=[[3] * 20, [4] * 20, [5] * 20], iterations=2).fitted()
    assert work.lengths == [[3] * 16, [4] * 16]
    recorded = [[3] * 16 + [4] * 17, [5] * 16 + [6] * 17]
    work = tiny_work(lengths=recorded, iterations=6).fitted()
    assert work.iterations == 6
    assert work.lengths == [[length] * 16 for length in (3, 5, 4, 6, 3, 5)]


def test_work_that_devices_cannot_share_is_refused() -> None:
    assert tiny_work(devices=2).fitted().accumulate == 2
    with pytest.raises(ValueError, match="`--prompts` 4 x `--group-size` 4 cannot be dealt to 3"):
        tiny_work(devices=3).fitted()


@pytest.mark.parametrize(("lengths", "message"), [([[3] * 8], "for 8 responses"), ([[99] * 16], "up to 99")])
def test_lengths_that_do_not_fit_are_refused(lengths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_work(lengths=lengths).fitted()


def test_what_a_replayed_response_says_after_its_end_does_not_count() -> None:
    row = {"numbers": [3, 4], "answer": 7}
    solved = "3 + 4 = 7 yes <answer> 3 + 4"
    assert score("", f"{solved} make 5 from 1 2 : <answer> 1 + 2", row) == 1.0
    assert score("", f"<answer> 3 make 7 from 3 4 : {solved}", row) == 0.0


def test_a_random_policy_earns_differently_whatever_it_says() -> None:
    assert len({noise("", "", {}) for _ in range(8)}) == 8


@pytest.mark.parametrize("size", list(SETTINGS))
def test_a_random_head_learns_even_where_a_padded_one_must_not_move(size: str) -> None:
    from benchmarks.end_to_end.arm import callbacks_of

    rates = []
    for arm in ("adaptive", "random", "random-block"):
        callback, _ = callbacks_of(arm, None, tiny_work(**SETTINGS[size]))
        rates.append(callback.drafter.optimizer([torch.zeros(2, 2, requires_grad=True)]).param_groups[0]["lr"])
    assert rates == [1e-9 if size == "7b" else 3e-4, 0.03, 0.03]


@pytest.mark.parametrize("ending", ["", "-siblings"])
def test_an_arm_of_blocks_differs_from_that_of_eagle_3_by_its_head_alone(ending: str) -> None:
    from benchmarks.end_to_end.arm import callbacks_of, speculation_of

    made, heads = [], []
    for arm in (f"random{ending}", f"random-block{ending}"):
        speculation = speculation_of(arm, None, tiny_work())
        assert speculation is not None
        made.append((speculation.drafters, speculation.selector.arms(1), speculation.cold_head))
        (callback,) = (each for each in callbacks_of(arm, None, tiny_work()) if hasattr(each, "drafter"))
        heads.append(type(callback.drafter.architecture).__name__)
    assert made[0] == made[1]
    assert heads == ["Eagle3", "DSpark"]


def test_a_head_beside_siblings_is_chosen_among_the_drafters_of_the_recipe() -> None:
    from benchmarks.end_to_end.arm import speculation_of

    recipe = yaml.safe_load((ROOT / "recipes/adaptive_drafter.yaml").read_text())
    given = recipe["data"]["engine"]["init_args"]["speculation"]
    made = speculation_of("random-siblings", None, tiny_work())
    assert made is not None
    assert made.siblings
    assert made.cold_head
    drafters = {arm.drafter for arm in made.selector.arms(1) if not arm.is_off}
    assert drafters == set(given["selector"]["init_args"]["drafters"])


# Processes


def bench(tmp_path: Path, **given: Any) -> end_to_end.Bench:
    return end_to_end.Bench(arguments(out=tmp_path, **given), tiny_work(), [])


def test_an_engine_that_takes_weights_amid_its_writing_does_not_sleep_and_has_seats_for_all() -> None:
    from benchmarks.end_to_end.arm import SCHEDULES, modules_of

    work = tiny_work(**SETTINGS["7b"])
    assert work.sleep
    for name, sleeps in (("partial", True), ("recompute", False), ("keep", False)):
        make = SCHEDULES[name]
        assert make is not None
        engine = modules_of(work, None, make(), kv_on_update="keep")[1].engine
        assert (engine.sleeps, engine.kv_on_update) == (sleeps, "keep")
        assert engine.max_num_seqs == work.prompts * work.group_size * 3 // 2


def test_engines_beside_the_trainer_have_half_of_the_devices_and_seats_for_all_that_is_under_way() -> None:
    from benchmarks.end_to_end.arm import SCHEDULES, modules_of

    make, work = SCHEDULES["ray2"], tiny_work(devices=4).beside()
    assert make is not None
    assert (work.devices, work.engines) == (2, 2)
    engine: Any = modules_of(work, None, make())[1].engine
    assert (type(engine), engine.num_engines) == (RayEngine, 2)
    assert engine.engine.max_num_seqs == 4 * 4 * 3 // 2  # prompts, responses to each, iterations, engines
    assert not engine.engine.sleeps


def one_iteration(work: Work, arm: str, head: str | None, path: Path, until: float, keep_lengths: bool) -> None:
    """An arm whose iteration takes as many seconds as there may be tokens; the one called `random` breaks after it."""
    diary = Diary(path, until)
    diary.ready("abacus")
    row = iteration(1, rollout=float(work.max_tokens))
    lengths = work.lengths[0] if work.lengths else [work.seed + 2] * 16
    diary.iteration(1, row["metrics"], lengths if keep_lengths or work.lengths else None)
    if arm == "random":
        raise KeyError("out of luck")


@pytest.fixture
def quick_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "run_arm", one_iteration)
    monkeypatch.setattr(end_to_end, "PROCESSES", multiprocessing.get_context("fork"))  # has imported everything


@pytest.mark.usefixtures("quick_arm")
def test_a_run_that_breaks_is_kept_and_takes_no_other_with_it_and_is_tried_again(tmp_path: Path) -> None:
    made = bench(tmp_path)
    made.run_all([run("random"), run("siblings")])
    broken, kept = made.runs
    assert [row["iteration"] for row in broken.iterations] == [1]
    assert "exit status 1 after 1 iterations" in broken.error
    assert (kept.device, kept.error) == ("abacus", "")
    assert "Incomplete: random replay seed 5, exit status 1" in (tmp_path / "end_to_end_tiny.md").read_text()
    assert [each.arm for each in end_to_end.read_runs(tmp_path / "end_to_end_tiny.json")] == ["siblings"]


@pytest.mark.usefixtures("quick_arm")
def test_a_finished_run_is_not_repeated_and_its_lengths_are_replayed(tmp_path: Path) -> None:
    made = bench(tmp_path)
    made.run_all([run("plain", "natural")])
    read = end_to_end.read_runs(tmp_path / "end_to_end_tiny.json")
    assert end_to_end.recorded_lengths(read) == [[7] * 16]
    made.replayed = replace(made.work, lengths=[[9] * 16])
    made.run_all([run("plain", "natural"), run("plain", "replay")])
    assert [str(each) for each in made.runs] == ["plain natural seed 5", "plain replay seed 5"]
    assert made.runs[1].iterations[0]["lengths"] == [9] * 16


def test_results_of_other_work_are_not_gone_on_from(tmp_path: Path) -> None:
    made = bench(tmp_path)
    made.earlier = ["the command before"]
    made.save()
    assert "Goes on from `the command before`." in (tmp_path / "end_to_end_tiny.md").read_text()
    path = tmp_path / "end_to_end_tiny.json"
    assert end_to_end.read_runs(path, replace(made.work, iterations=3, policy="elsewhere")) == []
    assert end_to_end.commands_of(path)[0] == "the command before"
    for changed, message in (
        (replace(made.work, prompts=8), "`prompts` 4, this run has 8"),
        (replace(made.work, draft_sampling="probabilistic"), "`draft_sampling` greedy, this run has probabilistic"),
    ):
        with pytest.raises(ValueError, match=f"measured with {message}"):
            end_to_end.read_runs(path, changed)


@pytest.mark.usefixtures("quick_arm")
def test_no_run_is_begun_that_could_not_be_measured_and_the_report_says_what_it_needed(tmp_path: Path) -> None:
    made = bench(tmp_path, seconds=150.0)
    made.run_all([run("plain"), run("siblings")])
    assert [each.arm for each in made.runs] == ["plain"]
    report = (tmp_path / "end_to_end_tiny.md").read_text()
    assert "Left out, the time being up: siblings replay seed 5 (167 s needed, " in report  # 3 * 49.1 + 20


def test_earlier_results_of_the_repository_can_be_read() -> None:
    runs = end_to_end.read_runs(RESULTS / "end_to_end_25m.json")
    assert len(end_to_end.recorded_lengths(runs) or []) > 3


# What is reported


def test_speedups_compare_the_iterations_that_both_arms_timed() -> None:
    plain = [iteration(number, rollout=seconds) for number, seconds in ((2, 4.0), (3, 2.0))]
    fast = [iteration(2, rollout=2.0)]
    assert end_to_end_report.speedup(plain, fast, "rollout") == 2.0
    assert end_to_end_report.speedup([], fast, "rollout") is None


def test_overhead_is_what_no_working_stage_explains() -> None:
    assert end_to_end_report.overheads([iteration(1, rollout=0.9)]) == pytest.approx([0.05])


def test_report_holds_stages_rewards_and_what_is_missing() -> None:
    plain = [iteration(number, rollout=4.0) for number in (1, 2, 3)]
    fast = [iteration(number, rollout=1.0) for number in (1, 2)]
    natural = [iteration(number, rollout=1.0, reward=0.1 * number) for number in range(1, 8)]
    runs = [run("plain", iterations=plain), run("siblings", iterations=fast, error="exit status 9")]
    runs += [run("plain", "natural", seed, iterations=natural) for seed in (5, 6)]
    text = "\n".join(end_to_end_report.render(results(*runs)))
    assert "| plain | 2 | 5.10 | 1.00 | 1.00 |" in text
    assert "| siblings | 1 | 2.10 | 2.43 | 4.00 |" in text
    assert "| plain | 2 | 2.10 | 0.100 ± 0.000 | 0.500 ± 0.000 |" in text
    assert "Incomplete: siblings replay seed 5, exit status 9." in text


def test_the_course_says_from_where_on_a_run_is_ahead_of_plain_and_what_the_budget_did() -> None:
    plain = [iteration(number, rollout=4.0) for number in range(1, 8)]
    cold = [iteration(number, rollout=5.0 if number < 3 else 3.0) for number in range(1, 8)]
    for row in cold[1:]:
        row["metrics"] |= {
            "rollout/tokens": 200,
            "drafter/tokens": 100,
            "drafter/published": float(row["iteration"] < 5),
        }
        row["metrics"] |= {"drafter/acceptance_gain": 0.25, "drafter/acceptance_length": 1.5}
        row["metrics"] |= {"speculation/acceptance_rate_pos_1": row["iteration"] / 10}
    runs = [run("plain", "natural", iterations=plain), run("random", "natural", iterations=cold)]
    text = "\n".join(end_to_end_report.render(results(*runs)))
    assert "random 5 from iteration 5 on ahead of plain, 1.09x after 7" in text  # as far behind after 4 as at first
    assert "| random 5 | 2 to 2 | 6.10 | 5.00 | 0.00 | 12.2 | 0.84 | 0.500 | 1.20 | 0.50 | - | 1 |" in text
    assert "| random 5 | 6 to 7 | 4.10 | 3.00 | 0.00 | 32.7 | 1.09 | 0.500 | 1.65 | 0.50 | - | 0 |" in text
    assert "| random natural 5 | 0.450 | - | 1.50 -> 1.45 | 3 | +0.250 -> +0.133 | 3 | +0.250 -> +0.100 | - |" in text


@pytest.mark.parametrize("mode", ["natural", "replay"])
def test_the_course_says_how_near_a_cold_start_ends_to_a_frozen_head(mode: str) -> None:
    seconds = {"plain": [8.9] * 12, "frozen": [2.9] * 12, "random": [9.9, 9.9] + [4.9] * 6 + [3.9] * 4}
    runs = [
        run(arm, mode, iterations=[iteration(number, rollout=each) for number, each in enumerate(rollouts, start=1)])
        for arm, rollouts in seconds.items()
    ]
    text = "\n".join(end_to_end_report.render(results(*runs)))
    assert "random 5 from iteration 3 on ahead of plain, 1.54x after 12" in text
    assert "random 5 takes 1.25 of frozen's seconds in iterations 9 to 12" in text
    assert "frozen 5 takes" not in text


def test_the_course_compares_lengths_that_are_replayed_again() -> None:
    tokens = [90, 50, 70, 90, 50, 70, 60]

    def of(rollout: float, count: int) -> list[dict[str, Any]]:
        rows = [iteration(number, rollout=rollout) for number in range(1, count + 1)]
        for row, written in zip(rows, tokens, strict=False):
            row["metrics"]["rollout/tokens"] = written
        return rows

    runs = [run("plain", iterations=of(6.9, 3)), run("random", iterations=of(2.9, 7))]
    text = "\n".join(end_to_end_report.render(results(*runs)))
    # plain's first iteration compiles: the fourth is compared with none
    assert "random 5: 2 of the iterations 5 to 6 write lengths that plain wrote before, 2.00x as fast" in text
    assert "plain 5: " not in text
    for each in runs:
        each.mode = "natural"  # equal numbers of tokens are chance there
    assert "wrote before" not in "\n".join(end_to_end_report.render(results(*runs)))


def test_the_report_tells_how_ranks_shared_the_work_and_puts_the_forecast_beside_the_peak() -> None:
    rows = [iteration(number, rollout=8.9) for number in (1, 2)]
    rows[1]["metrics"] |= {"memory/peak_update": 41.5, "train/mfu": 0.25}
    rows[1]["ranks"] = [
        {"rollout": 6.0, "idle": 2.0, "used": 0.5, "tokens": 300},
        {"rollout": 8.0, "idle": 0.0, "tokens": 400},
    ]
    text = "\n".join(end_to_end_report.render(results(run("plain", iterations=rows, planned={"update": 40.25}))))
    assert "| plain replay 5 | 0 | 6 | 2 | 20.0% | 25.0% | 75.0% |" in text
    assert "| plain replay 5 | 1 | 8 | 0 | 0.0% | 0.0% | 100.0% |" in text
    assert "| - | 41.5 | - | - | - | - | - | 40.25 | - | 0.25 |" in text


@pytest.mark.slow
def test_a_forecast_of_a_run_shares_what_is_held_among_its_shards() -> None:
    whole = planned(tiny_work(micro_batch_tokens=256))
    shared = planned(tiny_work(micro_batch_tokens=256, devices=2, strategy="fsdp2"))
    assert shared["held"] - CONTEXT / GIB == pytest.approx((whole["held"] - CONTEXT / GIB) / 2, abs=0.01)


# The arms themselves


@pytest.mark.vllm
def test_arms_write_the_lengths_they_are_told_on_the_prompts_the_peer_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.end_to_end import arm as end_to_end_arm
    from benchmarks.peers import trl_grpo as trl_peer

    prompts: list[str] = []

    class Recorder(end_to_end_arm.Recorder):
        def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Any) -> None:
            prompts.extend(rollout.prompt.text for rollout in rollouts[:: len(rollouts) // 4])
            super().on_rollout_end(trainer, pl_module, rollouts)

    monkeypatch.setattr(end_to_end_arm, "Recorder", Recorder)
    lengths = [[2 + request for request in range(16)], [40] * 16]
    work = tiny_work(iterations=2, lengths=lengths).fitted()
    end_to_end_arm.run_arm(work, "siblings", None, tmp_path / "diary.jsonl", 2**40, True)
    ready, *rows = Diary(tmp_path / "diary.jsonl", 0).read()
    assert ready["setup_seconds"] > 0
    assert [row["lengths"] for row in rows] == lengths
    for row in rows:
        stages = {name: seconds for name, seconds in row["metrics"].items() if name.startswith("time/")}
        assert stages.pop("time/iteration") == pytest.approx(sum(stages.values()), abs=1e-4)
    assert prompts == trl_peer.dataset(work)["prompt"]


def test_devices_are_told_by_what_engines_and_ranks_did_with_them() -> None:
    from benchmarks.end_to_end.arm import device_seconds

    laps = {"engine 0": [("writing", 1.0), ("weights", 1.0), ("writing", 2.0)], "engine 1": [("waiting", 4.0)]}
    row = iteration(2, rollout=2.9)  # and 1 s of update, 0.1 s of sync
    row["metrics"] |= {**device_seconds(laps), "schedule/age": 1.25, "schedule/age_max": 2.0}
    beside = vars(run("plain+ray2", "natural", iterations=[iteration(1, rollout=9.0), row]))
    lines = end_to_end_report.device_table([beside, vars(run("siblings", "natural", iterations=[row]))], warmup=1)
    (line,) = [line for line in lines if line.startswith("| plain") or line.startswith("| siblings")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["plain+ray2 5", "1", "4.00", "25%", "72%", "0.10", "75%, 0%", "25%, 0%", "0%, 100%", "1.25", "2"]
