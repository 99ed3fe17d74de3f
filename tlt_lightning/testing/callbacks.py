"""Check a callback in a small run."""

import tempfile
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from tlt_lightning.data.module import RolloutDataModule
from tlt_lightning.engine.transformers import TransformersEngine
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.metrics import IterationLog
from tlt_lightning.module import RLModule
from tlt_lightning.objectives import GRPO
from tlt_lightning.rewards.term import RewardTerm
from tlt_lightning.rollout import Sampling
from tlt_lightning.testing.plugin import POLICY, named, saved

LIKENESS = 0.78
"""Of a method's name to a hook's, by `difflib`, above which it is a mistake: on_rollout_finished, not on_game_end."""


class _WatchedLog(IterationLog):
    """Notes which names the package logs (False), and which a callback (True)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_callbacks, self.names = False, {True: set[str](), False: set[str]()}

    def _note(self, kind: str, name: str, value: float | Tensor) -> None:
        self.names[self.is_callbacks].add(name)
        super()._note(kind, name, value)

    def call(self, hook: Callable[..., Any], *args: Any, **more: Any) -> None:
        """Call a callback's hook."""
        self.is_callbacks = True
        hook(*args, **more)
        self.is_callbacks = False


def check_callback(callback: L.Callback, policy: str = POLICY) -> None:
    """Check a callback in a run of two iterations with validation.

    Args:
        callback: Fresh from its constructor; the run is its own.
        policy: Path or hub name of a small policy.
    """
    own, hooks = ([name for name in dir(each) if name.startswith("on_")] for each in (type(callback), RolloutCallback))
    for name in own:
        meant = [] if name in hooks else get_close_matches(name, hooks, 1, LIKENESS)
        assert not meant, f"{named(callback, name)} is no hook, and no run calls it: is {meant[0]} meant?"
    log = _WatchedLog()
    for name in own:
        setattr(callback, name, partial(log.call, getattr(callback, name)))
    _fit(log, callback, policy)
    for name in own:
        delattr(callback, name)
    both = sorted(log.names[True] & log.names[False])
    assert not both, f"`{type(callback).__name__}` logs {both}, as the package does: choose other names, as `mine/...`."
    state = saved(callback)
    callback.load_state_dict(state)
    is_loaded = repr(saved(callback)) == repr(state)
    assert is_loaded, f"{named(callback, 'load_state_dict')} leaves another state than it was given: load all of it."


def _fit(log: IterationLog, callback: L.Callback, policy: str) -> None:
    module = RLModule(policy, GRPO(), optimizer=partial(torch.optim.AdamW, lr=1e-4))
    module.iteration_log = log
    rows: Any = [{"prompt": f"make {7 * i} from 7 {i} :", "answer": 7 * i} for i in range(2, 6)]
    reward = RewardTerm(function=lambda prompt, response, row: 1 / (1 + len(response)), name="brevity")
    sizes: dict[str, Any] = {"group_size": 2, "prompts_per_iteration": 4, "num_minibatches": 1, "max_prompt_tokens": 32}
    sizes["sampling"] = Sampling(max_tokens=8)
    data = RolloutDataModule([reward], rows, rows, TransformersEngine(), **sizes)
    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with tempfile.TemporaryDirectory() as root:
        trainer = L.Trainer(accelerator="cpu", callbacks=[callback], max_epochs=2, default_root_dir=root, **off)
        trainer.fit(module, data)
