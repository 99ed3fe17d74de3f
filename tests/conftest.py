"""Tiny real models: a random Qwen2 and a random Llama with a word-level tokenizer, saved with `save_pretrained`."""

import os

# One thread a process: on two cores, spinning OpenMP barriers cost more than a second thread gains. Set before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import atexit
import functools
import gc
import importlib
import importlib.metadata
import json
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # of all packages, for each Trainer
gc.set_threshold(50_000)  # a collection looks at all that was ever imported
gc.disable()  # until all is imported that files of tests name: none of it becomes garbage

PRELOADED = (
    "tests.support.copied_in_checkpoint",
    "tlt_lightning.long_tail.callback",
    "tests.support.rl_runs",
    "transformers.models.qwen2.modeling_qwen2",
    "datasets",
    "peft",
    "torch.nn.attention.varlen",
)
WORDS = ["<pad>", "<eos>", "<unk>", "=", ":", "+", "-", "*", "/", "(", ")", "<answer>", *map(str, range(20))]


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(path)


def save_policy(path: Path, architecture: str = "qwen2", seed: int = 0, **overrides: object) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # peaked enough that greedy text does not hang on rounding
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(architecture, **{**shape, **overrides})
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    save_tokenizer(path)
    return path


def shared_by(file: Path) -> str | None:
    """Return what a file's tests share with others of the same worker: a cluster of Ray, or a process to fork from."""
    text = file.read_text()
    if "pytest.mark.ray" in text:
        return "ray"
    return "ranks" if "run_ranks" in text or "forkserver" in text else None


def pytest_configure() -> None:
    """Let Ctrl-C interrupt, which a shell has programs behind `&` ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long: a worker that begins a long file last works on alone."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def is_short(file: Path) -> bool:
        return not any(item.get_closest_marker(mark) for mark in ("slow", "vllm", "ray") for item in files[file])

    order = sorted(files, key=lambda file: (shared_by(file) is None, is_short(file)))
    items[:] = [item for file in order for item in files[file]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let ranks, and what is killed, be forked from a process that has imported what they need; vLLM takes longest."""
    has_vllm = any(item.get_closest_marker("vllm") for item in session.items)
    modules = ["tests.support.frozen_heap"] if has_vllm else [*PRELOADED]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one worker, and all tests that share what takes long to start."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return shared_by(config.rootpath / file) or file

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)  # an earlier test's, of `seed_everything`
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("vllm"):
        importlib.import_module("tests.support.frozen_heap")


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=False))


@pytest.fixture(scope="session")
def prompts_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"{i} {i + 1} = {2 * i + 1} :", "answer": f"{i} + {i + 1}"} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


Paths = tuple[str, str, Path]


@pytest.fixture
def paths(policy_path: str, prompts_path: str, tmp_path: Path) -> Paths:
    """Of a policy, of prompts, and of a folder to write to."""
    return policy_path, prompts_path, tmp_path
