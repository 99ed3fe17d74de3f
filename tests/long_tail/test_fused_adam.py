"""A drafter's Adam on a GPU, and where it goes on from."""

from copy import deepcopy

import pytest
import torch

from tests.long_tail.test_trainer import OneWeight, make_buffer, make_trainer, steps, weight
from tlt_lightning.long_tail.trainer import DrafterTrainer


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_of_an_adam_that_counts_on_the_host_is_gone_on_from_on_a_gpu(offload: bool) -> None:
    (saved := make_trainer()).train(steps(3))
    device = torch.device("cuda")
    trainer = DrafterTrainer(OneWeight(), make_buffer(), pack_tokens=128, device=device, offload=offload)  # type: ignore[arg-type]
    trainer.load_state_dict(deepcopy(saved.state_dict()))  # on the host both would write to the same tensors
    for each in (saved, trainer):
        each.begin(0)
        each.train(steps(3))
    assert weight(trainer) == pytest.approx(weight(saved), rel=1e-5)
