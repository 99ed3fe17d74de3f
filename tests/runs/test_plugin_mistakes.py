"""Mistakes of plugins that only a run can see are refused at their first use, by the plugin's name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import Response, TransformersEngine

Fit = Callable[..., L.Trainer]


@pytest.fixture
def fit(policy_path: str, prompts_path: str, tmp_path: Path) -> Fit:
    """Fit one iteration with callbacks and arguments of the data, the module and the Trainer."""

    def run(*callbacks: L.Callback, module: Any = None, trainer: Any = None, **data: Any) -> L.Trainer:
        made = make_trainer(tmp_path, *callbacks, **{"max_epochs": 1, **(trainer or {})})
        made.fit(make_module(policy_path, **(module or {})), make_data(prompts_path, **data))
        return made

    return run


class Mine(TransformersEngine):
    """Spoils its answers by `spoil`, which None drops."""

    spoil: Any = None

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[Response]:
        for response in super().generate(*args, **kwargs):
            if (spoilt := self.spoil(response)) is not None:
                yield spoilt


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: replace(r, logps=r.logps[:-1]), r"answered request \d+ with (\d+) `token_ids` and \d `logps`: give"),
        (lambda r: replace(r, token_ids=torch.tensor(r.token_ids)), r"`token_ids` tensor\(\[.*: give a list"),
        (lambda r: replace(r, logps=None), r"`logps` None: give a list"),
        (lambda r: replace(r, token_ids="text"), "`token_ids` 'text': give a list"),
        (lambda r: replace(r, finish_reason="eos"), "`finish_reason` 'eos': give one of 'stop', 'length'"),
        (lambda r: replace(r, policy_versions=()), r"`policy_versions` \(\): give the versions"),
        (lambda r: replace(r, request_id=99), "answered request 99, which was not asked or has been answered"),
        (lambda r: replace(r, request_id=0), "answered request 0, which was not asked or has been answered"),
        (lambda r: {"token_ids": r.token_ids}, r"has to yield a `Response` to each request, got \{"),
    ],
)
def test_an_answer_that_breaks_the_contract_of_engines_is_refused(fit: Fit, spoil: Any, message: str) -> None:
    """Among them are tensors, whose end of sequence no reward would be spared, and a log-prob too few."""
    engine = Mine()
    engine.spoil = spoil
    with pytest.raises((TypeError, ValueError), match=rf"`Mine\.generate` .*{message}"):
        fit(engine=engine)


def test_an_engine_that_yields_nothing_is_refused(fit: Fit) -> None:
    class Forgetful(TransformersEngine):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            list(super().generate(*args, **kwargs))

    with pytest.raises(TypeError, match=r"`Forgetful\.generate` has to yield responses.*got None"):
        fit(engine=Forgetful())


def test_an_engine_that_does_not_note_its_weights_is_refused(fit: Fit) -> None:
    """Nothing would compare its log-probs with the policy's: its responses are of no weights that there are."""

    class Unversioned(TransformersEngine):
        def update_weights(self, named_tensors: Any, version: int) -> None: ...

    with pytest.raises(RuntimeError, match=r"`Unversioned\.update_weights` was given version 0 and left .* at -1: set"):
        fit(engine=Unversioned())
