"""A head that has learned nothing."""

import pytest
import torch

from tests.support.drafters.drafter_runs import POLICY
from tlt_lightning.drafter.module import DrafterModule


@pytest.fixture(scope="session")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head of 64 of the policy's 115 tokens."""
    drafter = DrafterModule(POLICY, draft_vocab_size=64)
    drafter.choose_vocabulary(torch.arange(115, 0, -1))
    drafter.configure_model()
    return str(drafter.export(tmp_path_factory.mktemp("random")))
