"""A sampling that a callback gives the iteration that begins; tests/data/test_module.py has the runs."""

import pytest

from tlt_lightning import Sampling, TailBatching
from tlt_lightning.data.run_arguments import RunArguments


def test_responses_grow_again_to_the_length_that_the_run_began_with() -> None:
    arguments = RunArguments({"sampling": Sampling(max_tokens=8)})
    for max_tokens in (4, 8):
        arguments.take_sampling(Sampling(max_tokens=max_tokens), TailBatching())
        assert arguments.sampling.max_tokens == max_tokens
    with pytest.raises(ValueError, match="9 `max_tokens`, and the run has made room for 8: begin with the most"):
        arguments.take_sampling(Sampling(max_tokens=9), TailBatching())


def test_filters_that_a_callback_begins_with_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    arguments = RunArguments({"sampling": Sampling()})
    for top_p in (0.9, 0.8):
        arguments.take_sampling(Sampling(top_p=top_p), TailBatching())
    assert caplog.text.count("cuts the distribution") == caplog.text.count("(`top_p` 0.9) cuts") == 1
