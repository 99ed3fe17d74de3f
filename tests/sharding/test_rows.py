"""Rows of a sharded tensor, as the second of two ranks reads them."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tlt_lightning.sharding.rows import Rows, sharded_as

WHOLE = torch.arange(10.0).reshape(5, 2)


@pytest.fixture
def second() -> Iterator[DTensor]:
    """A tensor of the shape of `WHOLE`, sharded over two ranks; this one has the last two of five rows."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    yield DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], shape=WHOLE.shape, stride=WHOLE.stride())
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("saved", [WHOLE, Rows([WHOLE]), Rows([WHOLE[:1], WHOLE[1:4], WHOLE[4:]])], ids=["", "1", "3"])
def test_a_rank_takes_its_own_rows_however_they_were_saved(saved: Rows | torch.Tensor, second: DTensor) -> None:
    own = sharded_as(saved, second)
    assert own.to_local().tolist() == [[6, 7], [8, 9]]
    assert (own.shape, own.placements, own.device_mesh) == (WHOLE.shape, second.placements, second.device_mesh)
    assert sharded_as(own, second) is own


def test_rows_are_read_across_parts() -> None:
    rows = Rows([WHOLE[:3], WHOLE[3:]])
    assert torch.equal(rows.whole(), WHOLE)
    assert rows.between(2, 4).tolist() == WHOLE[2:4].tolist()
