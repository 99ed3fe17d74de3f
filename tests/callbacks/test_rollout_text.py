from tests.support.rollout_loop import make_rollout, progress
from tlt_lightning.callbacks.rollout_text import (
    best_and_worst,
    completions_table,
    progress_text,
    shorten,
    summary_line,
)
from tlt_lightning.speculation.strategy import Strategy


def test_speculation_is_shown_while_it_is_on() -> None:
    assert progress_text(progress(waiting=0)) == "running 2, 300 tok/s, longest 128"
    text = progress_text(progress(strategy=Strategy(4), acceptance_length=2.5))
    assert text.endswith("longest 128, K 4, accept 2.50")


def test_summary_line_leaves_out_what_was_not_logged() -> None:
    assert summary_line(7, None, {}) == "iteration 7"
    speculation = {"speculation/acceptance_length": 2.0}
    assert summary_line(1, -1, speculation) == "iteration 1  accept 2.00"
    assert summary_line(1, -1, {**speculation, "schedule/age": 0.75}) == "iteration 1  age 0.75  accept 2.00"
    assert summary_line(1, -1, {**speculation, "speculation/off_share": 1.0}) == "iteration 1"


def test_summary_line_names_each_of_several_rewards() -> None:
    statistics = {"reward/mean": 0.5, "reward/std": 0.25, "reward/zero_std_groups": 0.0}
    one = {**statistics, "reward/math": 0.4, "reward/math_errors": 0.0, "reward/math_timeouts": 0.0}
    assert summary_line(1, 3, one) == "iteration 1/3  reward 0.500 ± 0.250"
    line = summary_line(1, 3, {**one, "reward/format": 0.1, "reward/format_errors": 2.0})
    assert line == "iteration 1/3  reward 0.500 ± 0.250 (math 0.400 format 0.100)"


def test_summary_line_names_the_stages_that_take_a_twentieth() -> None:
    seconds = {"iteration": 10.0, "other": 0.6, "rollout": 6.0, "sync": 0.4, "drafter": 1.0, "update": 2.0}
    times = {f"time/{stage}": value for stage, value in seconds.items()}
    line = summary_line(1, -1, {**times, "train/mfu": 0.413})
    assert line == "iteration 1  mfu 41%  10.0 s (rollout 6.0 update 2.0 drafter 1.0 other 1.0)"


def test_best_and_worst_takes_both_ends_once() -> None:
    rollouts = [make_rollout(reward) for reward in (0.1, 0.9, 0.5, 0.3, 0.7)]
    assert [rollout.reward for rollout in best_and_worst(rollouts, 3)] == [0.9, 0.7, 0.1]
    assert len(best_and_worst(rollouts, 100)) == 5


def test_completions_table_shows_text_as_it_is_and_shortens_it() -> None:
    rollout = make_rollout(0.25, text="[bold]start[/nope] " + "x " * 2000 + "the end", cut=True)
    table = completions_table([rollout], "rollout 1/3")
    assert "0.250" in table
    assert "cut" in table
    assert "[bold]start[/nope]" in table
    assert "the end" in table
    assert len(table) < 5000


def test_shorten_keeps_both_ends_within_the_limit() -> None:
    assert shorten("a\n  b", 10) == "a b"
    text = shorten("0123456789" * 10, 25)
    assert len(text) == 25
    assert text.startswith("0123456789 ...")
    assert text.endswith("0123456789")
