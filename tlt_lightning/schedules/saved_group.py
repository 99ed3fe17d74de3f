"""Pack an open group into tensors and primitives, and unpack it.

Lists of all its tokens would hold a run up at each checkpoint: copying and reading them takes seconds a million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from tlt_lightning.rollout import Response
from tlt_lightning.schedules.base import OpenGroup


def pack(group: OpenGroup) -> dict[str, Any]:
    """Return a group as a checkpoint holds it."""
    return {**_fields_of(group), "responses": [_pack_response(response) for response in group.responses]}


def unpack(state: Mapping[str, Any]) -> OpenGroup:
    """Return the group that `pack` packed."""
    return OpenGroup(**{**state, "responses": tuple(_unpack_response(each) for each in state["responses"])})


def _pack_response(response: Response) -> dict[str, Any]:
    drafters = sorted({drafter for _, drafter, _, _ in response.drafts})
    drafts = [(at, drafters.index(drafter), drafted, kept) for at, drafter, drafted, kept in response.drafts]
    return _fields_of(response) | {
        "token_ids": torch.tensor(response.token_ids, dtype=torch.int32),
        "logps": torch.tensor(response.logps, dtype=torch.float64),
        "drafts": torch.tensor(drafts, dtype=torch.int32),
        "drafters": drafters,
    }


def _unpack_response(state: Mapping[str, Any]) -> Response:
    values = dict(state)
    drafters = values.pop("drafters")
    drafts = [(at, drafters[number], drafted, kept) for at, number, drafted, kept in values["drafts"].tolist()]
    values |= {"token_ids": values["token_ids"].tolist(), "logps": values["logps"].tolist(), "drafts": drafts}
    return Response(**values)


def _fields_of(instance: OpenGroup | Response) -> dict[str, Any]:
    return {item.name: getattr(instance, item.name) for item in fields(instance)}
