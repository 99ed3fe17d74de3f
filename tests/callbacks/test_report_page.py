"""The page of a run: nothing in it runs that the policy wrote, nothing is fetched, and a browser shows what it must."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.report_pages import dom_of, read_page
from tests.support.rollout_loop import make_rollout, progress
from tlt_lightning.callbacks.drafted_text import completion
from tlt_lightning.callbacks.report_page import MAX_DETAILED, columns, kept_details, page, rounded
from tlt_lightning.callbacks.rollout_timeline import RolloutTimeline
from tlt_lightning.speculation.strategy import OFF, Strategy

HOSTILE = (
    "</script><script>document.title='owned'</script><!--<script> <img src=URL onerror=owned()> & &lt; \u2028 \ud800"
)


def hostile_completion(url: str, reward: float) -> dict[str, Any]:
    text = HOSTILE.replace("URL", url)
    rollout = make_rollout(reward, length=12)
    rollout.prompt.text, rollout.prompt.answer = text, text
    drafts = [(0, "sibling", 4, 4), (5, "learned", 3, 1)]
    object.__setattr__(rollout.response, "drafts", drafts)
    return completion(rollout, lambda ids: f"{text} " * len(ids))


def make_data(url: str = "http://127.0.0.1:9", iterations: int = 3) -> dict[str, Any]:
    names = ["reward/mean", "reward/a", "reward/b", "val/accuracy", "val/pass@2", "train/loss", "rollout/truncated"]
    names += ["train/approx_kl", "mismatch/kl"]
    names += [f"rollout/length_{name}" for name in ("p50", "p90", "p99", "max")]
    names += [f"time/{name}" for name in ("rollout", "idle", "update", "own_stage")]
    names += [f"memory/peak_{name}" for name in ("rollout", "update")]
    names += [
        "rollout/tokens_per_s",
        "train/tokens_per_s",
        "train/mfu",
        "rollout/tokens",
        "speculation/acceptance_length",
        "speculation/kept_sibling",
    ]
    names += ["schedule/age", "schedule/age_max", "schedule/deferred", "mismatch/effective_sample_size"]
    names += ["drafter/acceptance_before", "drafter/acceptance_after", "drafter/published", "rollout/policy_drift"]
    history = {i: dict.fromkeys(names, 1.0 + i / 7) for i in range(1, iterations + 1)}
    history[2]["train/loss"] = float("nan")
    timeline = RolloutTimeline()
    for step in range(40):
        strategy = OFF if step % 3 else Strategy(3, "sibling")
        timeline.add(progress(0, 8, 0, tokens=8 * step, elapsed=0.1 * (step + 1), strategy=strategy))
    detail = {
        "timeline": timeline.spans(),
        "ranks": [[("rollout", 2.0), ("idle, used", 0.25), ("idle", 0.5), ("rollout", 0.5)], [("rollout", 3.25)]],
        "engines": {"engine 0": [("writing", 3.0), ("weights", 0.25)], "engine 1": [("waiting", 3.25)]},
        "completions": [hostile_completion(url, 0.5), hostile_completion(url, 1.5)],
    }
    return {
        "title": HOSTILE.replace("URL", url),
        "state": "interrupted by KeyboardInterrupt",
        "written": "2026-01-01 12:00",
        "seconds": 5000,
        "planned": 100,
        "before": 0.25,
        "facts": {"policy": "some/model", "objective": HOSTILE.replace("URL", url)},
        "config": f"text: {HOSTILE}",
        "iterations": sorted(history),
        "metrics": columns({i: rounded(row) for i, row in history.items()}),
        "details": dict.fromkeys(kept_details(history), detail),
    }


def write(path: Path, data: dict[str, Any]) -> str:
    text = page(data)
    (path / "report.html").write_bytes(text.encode("utf-8", "replace"))
    return text


def test_the_page_holds_the_data_whatever_markup_is_in_it(tmp_path: Path) -> None:
    data = make_data()
    text = write(tmp_path, data)
    assert "owned" in text
    assert len(re.findall("<script|<!--", text)) == len(re.findall("<script|<!--", page({})))  # the template's own
    expected = json.loads(json.dumps(data).replace("\\ud800", "?"))
    assert read_page(tmp_path) == expected
    assert expected["metrics"]["train/loss"][1] is None


def test_the_page_forbids_and_has_nothing_to_fetch() -> None:
    template = page({})
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\"" in template
    assert re.findall(r"https?:|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp|innerHTML|eval\(", template) == []


def test_the_page_of_a_thousand_iterations_is_bounded() -> None:
    history = {i: {f"metric/{number}": i / 7 for number in range(80)} for i in range(1, 1001)}
    details = {i: {} for i in kept_details(history)}
    assert len(details) <= MAX_DETAILED
    assert (
        len(page({"metrics": columns({i: rounded(row) for i, row in history.items()}), "details": details})) < 1_000_000
    )


def test_details_are_spread_over_the_run_and_what_is_dropped_is_never_wanted_again() -> None:
    kept: set[int] = set()
    for iteration in range(1, 1001):
        kept = kept_details(kept | {iteration})
        assert kept == kept_details(range(1, iteration + 1))
        assert {1, *range(max(1, iteration - 3), iteration + 1)} <= kept
    assert len(kept) == 20 <= MAX_DETAILED
    assert max(b - a for a, b in zip(sorted(kept), sorted(kept)[1:], strict=False)) == 64


@pytest.fixture
def requests() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the paths that anybody asks of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/x", asked
    server.shutdown()
    server.server_close()


def test_a_browser_shows_the_run_and_neither_runs_nor_fetches_what_is_written_in_it(
    tmp_path: Path, requests: tuple[str, list[str]]
) -> None:
    url, asked = requests
    write(tmp_path, make_data(url))
    dom = dom_of(tmp_path / "report.html", tmp_path / "profile")
    main = dom[dom.index("<main") : dom.index("</main>")]
    headings = re.findall("<h[23][^>]*>(.*?)</h[23]>", main)
    assert [title for title in headings if title in SECTIONS] == SECTIONS
    assert {"How far the policy moves", "Engine against trainer"} <= set(headings)
    assert {"Reward of the rollouts", "On held-out prompts", "Length", "Cut off at the length limit"} <= set(headings)
    assert {
        "Where the seconds went",
        "Use of the GPU in the update",
        "Most memory held on the GPU",
        "Tokens that a drafter proposed",
        "Drift of the policy",
    } <= set(headings)
    assert {"Requests running", "Seconds of each rank and engine"} <= set(headings)
    assert {"Age of what is learned from", "Effective sample", "Prompts that wait"} <= set(headings)
    assert "Tokens thrown away" not in headings  # none were
    assert 'title="weights: 0.250 s"' in main
    for text in (
        "engine 1",
        "own_stage",
        "rank 1",
        "p90",
        "pass@2",
        ">v1<",
        "from 25%",
        "interrupted by KeyboardInterrupt",
    ):
        assert text in main
    assert main.count("<path") > 20
    assert 'class="kept" title="drafted by a sibling, and kept" style="--who: var(--green);">&lt;/script' in main
    assert "a draft by the head was refused here" in main
    assert re.findall(r"reward </span><b>(.*?)</b>", main) == ["1.50"]  # the newest iteration's best is open
    # What is hostile is text: neither an element nor run nor fetched.
    assert "<img" not in main
    assert "&lt;img src=" in main
    assert "<title>owned" not in dom
    assert asked == []


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node on this machine")
def test_an_axis_of_time_is_labelled_in_whole_units() -> None:
    script = files("tlt_lightning.callbacks").joinpath("report.js").read_text()
    parts = [
        re.search(pattern, script, re.DOTALL)[0]
        for pattern in (r"const grouped.*?(?=const has)", r"const MINUTES.*?\n}\n")
    ]  # type: ignore[index]
    parts += [
        "for (const end of [30, 350, 5000]) console.log(ticks(0, end, 4, duration).map(duration).map(short).join());"
    ]
    done = subprocess.run(["node", "-e", "".join(parts)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 s,10 s,20 s,30 s", "0 s,2 min,4 min", "0 s,30 min,60 min"]


def test_a_browser_shows_details_that_an_older_page_of_the_run_had(tmp_path: Path) -> None:
    data = make_data()
    ranks = [{"rollout": 2.0}, {"idle": 2.0}]
    data["details"] = {i: {**each, "ranks": ranks, "engines": None} for i, each in data["details"].items()}
    write(tmp_path, data)
    dom = dom_of(tmp_path / "report.html", tmp_path / "profile")
    assert "Seconds of each rank<" in dom
    assert "rank 1" in dom[dom.index("<main") : dom.index("</main>")]


SECTIONS = [
    "Learning",
    "Responses",
    "Time",
    "Schedule",
    "Speculation",
    "Inside an iteration",
    "Completions",
    "Any metric",
    "The run",
]
