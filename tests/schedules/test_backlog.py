"""A group in a checkpoint: all of it, in few pieces."""

from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from tlt_lightning.rollout import Response
from tlt_lightning.schedules.backlog import pack, unpack
from tlt_lightning.schedules.base import PendingGroup

LENGTH = 1000
RESPONSES = (
    Response(
        request_id=3,
        token_ids=list(range(LENGTH)),
        logps=[-1 / (1 + n) for n in range(LENGTH)],
        finish_reason="unfinished",
        policy_versions=(4, 6),
        drafts=[(n, ("ngram", "learned")[n % 2], 3, n % 4) for n in range(0, LENGTH, 3)],
        version_tokens=(LENGTH - 1, 1),
        observed=((10, 5), (900, 100)),
    ),
    Response(4, [], [], "unfinished", (6,)),
)
GROUP = PendingGroup(prompt=7, draw=19, drawn_in=2, begun_in=3, deferrals=1, responses=RESPONSES, expected_tokens=8.5)


def test_a_group_comes_back_whole_from_a_file(tmp_path: Path) -> None:
    torch.save(pack(GROUP), tmp_path / "group")
    group = unpack(torch.load(tmp_path / "group", weights_only=True))
    assert group == GROUP
    assert [response.drafts for response in group.responses] == [response.drafts or [] for response in RESPONSES]


def test_a_group_is_saved_in_few_pieces() -> None:
    assert len(tree_leaves(pack(GROUP))) < 30  # each is copied and read by itself
