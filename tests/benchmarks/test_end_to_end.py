"""`python -m benchmarks end_to_end`: its plan, processes that fail, and its arms on a tiny policy."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.sizes import ASSETS
from benchmarks.end_to_end import picture as end_to_end_picture
from benchmarks.end_to_end import report as end_to_end_report
from benchmarks.end_to_end import run as end_to_end
from benchmarks.end_to_end.work import FINISHED, ITERATION, RUNGS, STARTED, Work, score


def tiny_work(**settings: Any) -> Work:
    policy, train = str(ASSETS / "policy"), str(ASSETS / "train.jsonl")
    return Work(policy=policy, train=train, **{**RUNGS["tiny"], **settings})


def arguments(**given: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "name": "tiny",
        "arms": ["plain", "siblings"],
        "natural_arms": ["plain", "siblings"],
        "modes": ["replay", "natural"],
        "seeds": [5, 6],
        "warmup": 1,
        "devices": 1,
        "parallel": 1,
        "seconds": 60.0,
        "head": None,
        "note": "",
    }
    return argparse.Namespace(**{**defaults, **given})


def iteration(number: int, *, rollout: float, reward: float = 0.5, memory: float | None = None) -> dict[str, Any]:
    seconds = {"rollout": rollout, "update": 1.0, "sync": 0.1, "iteration": rollout + 1.1}
    metrics = {"reward/mean": reward, "rollout/tokens_per_s": 100.0, "mismatch/kl": 1e-5}
    metrics |= {f"time/{stage}": value for stage, value in seconds.items()}
    peaks = {} if memory is None else {"rollout": {"used": memory, "allocated": 1.0}}
    return {"iteration": number, "metrics": metrics, "memory": peaks}


def run(arm: str, mode: str = "replay", seed: int = 5, **given: Any) -> end_to_end.Run:
    return end_to_end.Run(arm, mode, seed, **given)


def results(*runs: end_to_end.Run) -> dict[str, Any]:
    about = {"rung": "tiny", "command": "c", "hardware": "h", "versions": {}, "seed": 5, "note": "n", "warmup": 1}
    return {**about, "work": vars(tiny_work()), "runs": [vars(each) for each in runs]}


# What is done


def test_the_first_plain_run_records_lengths_unless_there_are_some() -> None:
    first, second = end_to_end.plan(arguments(), has_lengths=False)
    assert [each.name for each in first] == ["plain natural seed 5"]
    names = ["plain replay seed 5", "siblings replay seed 5", "siblings natural seed 5", "plain natural seed 6"]
    assert [each.name for each in second] == [*names, "siblings natural seed 6"]
    first, second = end_to_end.plan(arguments(modes=["replay"]), has_lengths=True)
    assert [each.name for each in first] == []
    assert [each.arm for each in second] == ["plain", "siblings"]


def test_with_several_runs_at_a_time_natural_runs_do_not_wait_for_the_recording() -> None:
    first, second = end_to_end.plan(arguments(parallel=4), has_lengths=False)
    assert len(first) == 4
    assert {each.mode for each in second} == {"replay"}


def test_lengths_of_a_larger_run_are_cut_to_this_one() -> None:
    work = tiny_work(lengths=[[3] * 20, [4] * 20, [5] * 20], iterations=2).fitted()
    assert work.lengths == [[3] * 16, [4] * 16]
    assert tiny_work(lengths=[[3] * 16], iterations=9).fitted().iterations == 1


def test_work_that_devices_cannot_share_is_refused() -> None:
    assert tiny_work(devices=2).fitted().accumulate == 2
    with pytest.raises(ValueError, match="`--prompts` 4 x `--group-size` 4 cannot be dealt to `--devices` 3"):
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


# Processes


def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, **given: Any) -> end_to_end.Bench:
    """A bench whose arms are `script`, which finds what was asked of it in `spec`."""
    (tmp_path / "scripted_arm.py").write_text(f"import json, os, sys\nspec = json.load(open(sys.argv[1]))\n{script}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(end_to_end, "OURS", "scripted_arm")
    monkeypatch.setattr(end_to_end, "PEER", "scripted_arm")
    return end_to_end.Bench(arguments(out=str(tmp_path), **given), tiny_work(), [])


def says(kind: str, content: Any) -> str:
    return f"print({kind!r}, json.dumps({content!r}), flush=True)"


BEGIN = says(STARTED, {"setup_seconds": 2.0, "device": "abacus"})


def test_iterations_of_a_run_that_breaks_are_kept_and_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = iteration(1, rollout=2.0)
    made = bench(tmp_path, monkeypatch, f"{BEGIN}\nprint('noise')\n{says(ITERATION, row)}\nsys.exit(3)")
    made.run_all([run("siblings")])
    (kept,) = made.runs
    assert kept.iterations == [row]
    assert kept.device == "abacus"
    assert "exit status 3 after 1 iterations" in kept.error
    written = json.loads((tmp_path / "end_to_end_tiny.json").read_text())
    assert written["runs"][0]["iterations"] == [row]
    assert end_to_end.read_runs(str(tmp_path / "end_to_end_tiny.json")) == []


def test_a_finished_run_is_not_repeated_and_its_lengths_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**iteration(1, rollout=2.0), "lengths": [7] * 16}
    made = bench(tmp_path, monkeypatch, f"{BEGIN}\n{says(ITERATION, row)}\n{says(FINISHED, {})}")
    made.run_all([run("plain", "natural")])
    read = end_to_end.read_runs(str(tmp_path / "end_to_end_tiny.json"))
    assert end_to_end.recorded_lengths(read) == [[7] * 16]
    made.run_all([run("plain", "natural")])
    assert len(made.runs) == 1


def test_results_of_other_work_are_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(tmp_path, monkeypatch, "")
    made.earlier = ["the command before"]
    made.save()
    assert "Goes on from `the command before`." in (tmp_path / "end_to_end_tiny.md").read_text()
    path = str(tmp_path / "end_to_end_tiny.json")
    assert end_to_end.read_runs(path, replace(made.work, iterations=3, policy="elsewhere")) == []
    assert end_to_end.commands_of(path)[0] == "the command before"
    for changed, message in (
        (replace(made.work, prompts=8), "`prompts` 4, this run has 8"),
        (replace(made.work, draft_sampling="probabilistic"), "`draft_sampling` greedy, this run has probabilistic"),
    ):
        with pytest.raises(ValueError, match=f"measured with {message}"):
            end_to_end.read_runs(path, changed)


def test_results_of_a_padded_policy_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(tmp_path, monkeypatch, "")
    made.work = replace(made.work, policy=str(tmp_path))
    (tmp_path / "padded.json").write_text(json.dumps({"what": "policy of 7 weights"}))
    made.save()
    assert "Padded: policy of 7 weights that know" in (tmp_path / "end_to_end_tiny.md").read_text()


def test_each_mode_gets_its_lengths_and_each_seed_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = "print('FINISHED', 0); open(f\"{spec['work']['seed']}\", 'w').write(json.dumps(spec['work']['lengths']))"
    made = bench(tmp_path, monkeypatch, echo)
    monkeypatch.chdir(tmp_path)
    made.replayed = replace(made.work, lengths=[[7] * 16])
    made.run_all([run("plain", "replay", 8), run("plain", "natural", 9)])
    assert [json.loads((tmp_path / name).read_text()) for name in "89"] == [[[7] * 16], None]


def test_runs_at_a_time_each_see_a_gpu_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    note = "open(f\"{spec['work']['seed']}\", 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    meet = "import time\nwhile len({*'89'} & {*os.listdir()}) < 2: time.sleep(0.01)"
    made = bench(tmp_path, monkeypatch, f"{note}\n{meet}\nprint('FINISHED', 0)", parallel=2)
    monkeypatch.chdir(tmp_path)
    made.run_all([run("plain", "replay", 8), run("plain", "replay", 9)])
    assert {(tmp_path / name).read_text() for name in "89"} == {"4", "7"}


def test_a_peer_that_does_not_start_is_started_with_the_other_model_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    script = f"assert 'VLLM_USE_V2_MODEL_RUNNER' in os.environ\n{BEGIN}\n{says(ITERATION, iteration(1, rollout=2.0))}"
    made = bench(tmp_path, monkeypatch, f"{script}\n{says(FINISHED, {})}")
    made.run_all([run("trl"), run("plain")])
    assert [(each.error, bool(each.note)) for each in made.runs if each.arm == "trl"] == [("", True)]
    assert [bool(each.error) for each in made.runs if each.arm == "plain"] == [True]


def test_no_run_is_begun_that_could_not_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = iteration(1, rollout=60.0)
    made = bench(tmp_path, monkeypatch, f"{BEGIN}\n{says(ITERATION, row)}\n{says(FINISHED, {})}", seconds=100.0)
    made.run_all([run("plain"), run("siblings")])
    assert [each.arm for each in made.runs] == ["plain"]


def test_a_run_that_was_left_out_is_reported_with_what_it_would_have_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = iteration(1, rollout=60.0)
    made = bench(tmp_path, monkeypatch, f"{BEGIN}\n{says(ITERATION, row)}\n{says(FINISHED, {})}", seconds=100.0)
    made.run_all([run("plain"), run("siblings")])
    made.save()
    report = (tmp_path / "end_to_end_tiny.md").read_text()
    assert "Left out, the time being up: siblings replay seed 5 (205 s needed, " in report  # 2 + 3 * 61.1 + 20


def test_the_error_of_a_run_that_dies_is_seen_though_much_is_printed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    chatter = "import atexit\natexit.register(lambda: print('frame of C++\\n' * 200))"
    made = bench(tmp_path, monkeypatch, f"{chatter}\nraise KeyError('the real reason')")
    made.run_all([run("plain")])
    shown = capfd.readouterr().out
    assert "KeyError: 'the real reason'" in shown
    assert shown.count("frame of C++") == 20


def test_only_the_ends_of_the_first_tracebacks_are_kept() -> None:
    excerpt = end_to_end.Excerpt()
    for number in range(5):
        excerpt.add("[rank1]: Traceback (most recent call last):")
        for frame in range(40):
            excerpt.add(f"[rank1]:   frame {frame}")
        excerpt.add(f"[rank1]: ValueError: {number}")
        excerpt.add("noise")
    lines = excerpt.lines()
    assert [line for line in lines[:48] if "Error" in line] == [f"[rank1]: ValueError: {n}" for n in range(3)]
    assert "noise" not in lines[:48]
    assert lines[0] == "[rank1]:   frame 25"
    assert lines[-1] == "noise"


# What is reported


def test_speedups_compare_the_iterations_that_both_arms_timed() -> None:
    plain = [iteration(number, rollout=seconds) for number, seconds in ((2, 4.0), (3, 2.0))]
    fast = [iteration(2, rollout=2.0)]
    assert end_to_end_report.speedup(plain, fast, "rollout") == 2.0
    assert end_to_end_report.speedup([], fast, "rollout") is None


def test_overhead_is_what_no_working_stage_explains() -> None:
    assert end_to_end_report.overheads([iteration(1, rollout=0.9)]) == pytest.approx([0.05])


def test_report_holds_stages_memory_curves_and_what_is_missing(tmp_path: Path) -> None:
    plain = [iteration(number, rollout=4.0, memory=30.0 + number) for number in (1, 2, 3)]
    fast = [iteration(number, rollout=1.0, memory=40.0) for number in (1, 2)]
    natural = [iteration(number, rollout=1.0, reward=0.1 * number) for number in range(1, 8)]
    runs = [run("plain", iterations=plain), run("siblings", iterations=fast, error="exit status 9")]
    runs += [run("plain", "natural", seed, iterations=natural) for seed in (5, 6)]
    end_to_end_report.write_report(results(*runs), tmp_path)
    end_to_end_picture.draw(results(*runs), tmp_path / "end_to_end_tiny.png")
    text = (tmp_path / "end_to_end_tiny.md").read_text()
    assert "| plain | 2 | 5.10 | **1.00** | **1.00** |" in text
    assert "| siblings | 1 | 2.10 | **2.43** | **4.00** |" in text
    assert "| plain | 33.0 / 1.0 |" in text
    assert "| plain | 2 | 2.10 | 0.100 ± 0.000 | 0.500 ± 0.000 |" in text
    assert "Incomplete: siblings replay seed 5, exit status 9." in text
    curves = (tmp_path / "end_to_end_tiny.csv").read_text().splitlines()
    assert curves[-1] == "plain,natural,6,7,14.700,0.7000"
    assert (tmp_path / "end_to_end_tiny.png").stat().st_size > 10_000


# The arms themselves


@pytest.mark.vllm
def test_arms_write_the_lengths_they_are_told_on_the_prompts_the_peer_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.end_to_end import arm as end_to_end_arm
    from benchmarks.peers import trl_grpo as trl_peer

    prompts: list[str] = []

    class Recorder(end_to_end_arm.Recorder):
        def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Any) -> None:
            prompts.extend(rollout.prompt.text for rollout in rollouts[:: len(rollouts) // 4])
            super().on_rollout_end(trainer, pl_module, rollouts)

    monkeypatch.setattr(end_to_end_arm, "Recorder", Recorder)
    told: list[tuple[str, dict[str, Any]]] = []
    lengths = [[2 + request for request in range(16)], [40] * 16]
    work = tiny_work(iterations=2, lengths=lengths).fitted()
    end_to_end_arm.run_arm(
        work,
        "siblings",
        head=None,
        until=2**40,
        keep_lengths=True,
        tell=lambda kind, content: told.append((kind, content)),
    )
    assert [kind for kind, _ in told] == [STARTED, ITERATION, ITERATION, FINISHED]
    rows = [content for kind, content in told if kind == ITERATION]
    assert [row["lengths"] for row in rows] == lengths
    for row in rows:
        stages = {name: seconds for name, seconds in row["metrics"].items() if name.startswith("time/")}
        assert stages.pop("time/iteration") == pytest.approx(sum(stages.values()), abs=1e-4)
    assert prompts == trl_peer.dataset(work)["prompt"]
