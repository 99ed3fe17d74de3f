"""Requests as every engine takes them, and what is left of one that goes on."""

from dataclasses import replace

import pytest

from tlt_lightning import Sampling
from tlt_lightning.engine.requests import check_requests, noise_seed, tokens_left
from tlt_lightning.rollout import Request, Response

NEW = Request(id=0, prompt_ids=[0, 31], seed=17)
WRITTEN = Response(0, [5, 6, 7], [-1.0] * 3, "unfinished", (0,))


def test_tokens_have_to_be_of_the_policys_vocabulary() -> None:
    check_requests([NEW], Sampling(stop_token_ids=(0, 31)), vocab_size=32)
    for token in (-1, 32):
        with pytest.raises(ValueError, match=rf"token {token} in a prompt"):
            check_requests([NEW, Request(id=1, prompt_ids=[5, token])], Sampling(), vocab_size=32)
        with pytest.raises(ValueError, match=rf"token {token} in `stop_token_ids`"):
            check_requests([NEW], Sampling(stop_token_ids=(5, token)), vocab_size=32)


def test_what_is_written_counts_in_the_limit_and_is_not_written_again_by_the_same_noise() -> None:
    on, on_further = (replace(NEW, written=replace(WRITTEN, token_ids=[5] * number)) for number in (3, 4))
    limits = [tokens_left(request, Sampling(max_tokens=10)) for request in (NEW, on, replace(on, max_tokens=4))]
    assert limits == [10, 7, 1]
    assert noise_seed(NEW) == 17
    assert len({noise_seed(request) for request in (NEW, on, on_further)}) == 3
    assert noise_seed(replace(on, seed=None)) is None
