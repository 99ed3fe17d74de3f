"""Warm-ups that Ctrl-C or SIGTERM ends: what they save, what they say, and that a resumed one goes on exactly."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import save_policy
from tlt_lightning.__main__ import main
from tlt_lightning.commands.cli import run_drafter_cli

pytestmark = pytest.mark.slow

CONTEXT = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).parents[2]
EPOCHS, PACKS, HELD_OUT = 2, 6, 2


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a warm-up that takes seconds."""
    folder = tmp_path_factory.mktemp("texts")
    save_policy(folder / "policy", num_hidden_layers=4)
    draw = random.Random(0)
    rows = [
        {"prompt_ids": [2 + number] * 3, "response_ids": [draw.randrange(2, 32) for _ in range(60)]}
        for number in range(16)
    ]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = folder / "small.yaml"
    config.write_text(
        f"trainer: {{accelerator: cpu, max_epochs: {EPOCHS}, enable_progress_bar: false}}\n"
        f"model: {{target: {folder / 'policy'}}}\n"
        f"data: {{completions: {folder / 'texts.jsonl'}, num_tokens: 128, val_share: 0.25}}\n"
    )
    return ["fit", "-c", str(ROOT / "recipes/drafter_warmup.yaml"), "-c", str(config)]


def head_of(folder: Path) -> bytes:
    return (folder / "head/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    """The head that an uninterrupted warm-up leaves, and what its README says of it."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = run_drafter_cli([*options, "--trainer.default_root_dir", str(folder)]).trainer
    assert (trainer.num_training_batches, trainer.num_val_batches) == (PACKS, [HELD_OUT])
    return head_of(folder), (folder / "head/README.md").read_text()


def be_command(arguments: list[str], said: Path) -> None:
    """Run the command line as a process of its own does, and write its stderr to a file."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    sys.argv = ["tlt-lightning", *arguments]
    main()


@pytest.mark.parametrize(
    ("number", "stage", "batch", "num_steps"),
    [(signal.SIGINT, "train", 1, PACKS + 2), (signal.SIGTERM, "validation", 0, 2 * PACKS)],
)
def test_a_signal_saves_the_head_and_the_resumed_warm_up_equals_the_uninterrupted_one(
    number: int,
    stage: str,
    batch: int,
    num_steps: int,
    whole: tuple[bytes, str],
    options: list[str],
    tmp_path: Path,
) -> None:
    root, told = tmp_path / "run", tmp_path / "told"
    arguments = [*options, "--trainer.default_root_dir", str(root)]
    waits = {"stage": stage, "epoch": 1, "batch": batch, "told": str(told)}
    callback = {"class_path": "tests.support.drafters.waiting.Waits", "init_args": waits}
    arguments += ["--trainer.callbacks+", json.dumps(callback)]
    run = CONTEXT.Process(target=be_command, args=(["drafter", *arguments], tmp_path / "said"))
    run.start()
    try:
        end = time.monotonic() + 120
        while not told.exists() and run.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        assert run.pid is not None
        os.kill(run.pid, number)
        told.unlink()
        run.join(150)
    finally:
        run.kill()
    said = (tmp_path / "said").read_text()
    assert run.exitcode == (1 if number == signal.SIGINT else 143), said
    last = root / "checkpoints/last.ckpt"
    assert last.resolve().name == "interrupted.ckpt"
    assert f"after {num_steps} optimizer steps. To go on, give `--ckpt_path` {last}, which holds {num_steps}" in said
    assert not (root / "head").exists()
    run_drafter_cli([*arguments[:-2], "--ckpt_path", str(last)])
    assert head_of(root) == whole[0]
    assert (root / "head/README.md").read_text() == whole[1]
    assert not (root / "checkpoints/interrupted.ckpt").exists()
