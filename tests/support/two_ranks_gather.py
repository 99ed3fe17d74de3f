"""Run by test_drafter_ranks.py, once per rank: rank one hands what it holds to rank zero, and then dies."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tlt_lightning.long_tail.checkpoint import gather_others, make_group


def state_of(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    moments = torch.randn(3, 2, generator=generator).T  # not contiguous
    states = torch.randn(5, 4, generator=generator).bfloat16()
    return {
        "trainer": {
            "weights": {"fc": torch.zeros(2)},
            "optimizer": {"state": {0: {"step": torch.tensor(3.0 + rank), "exp_avg": moments}}, "lr": 0.1},
            "buffer": {"newest": [{"states": states, "prompt_length": rank}], "held_out": []},
            "num_pending": rank,
        },
        "drift": {"masks": [torch.tensor([True, False]), torch.empty(0)]},
        "history": {1: {"drafter/loss": 2.0}},
    }


def main(path: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    group = make_group()
    others = gather_others(state_of(rank), group)
    if rank:
        assert others == []
        os._exit(0)
    expected = state_of(1)
    del expected["trainer"]["weights"], expected["history"]
    torch.testing.assert_close(others, [expected], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="onnection"):
        gather_others(state_of(rank), group)
