"""A drafter's Adam on a GPU, and where it goes on from."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.long_tail.test_trainer import OneWeight, make_buffer, make_trainer, steps, weight
from tlt_lightning.long_tail.trainer import DrafterTrainer, fuse_adam


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": False}], ids=str)
def test_adam_is_fused_unless_its_settings_say_how_and_goes_on_from_one_that_was_not(options: dict[str, Any]) -> None:
    def learn(optimizer: torch.optim.Adam) -> None:
        (weight,) = optimizer.param_groups[0]["params"]
        for number in range(3):
            weight.grad = torch.tensor([1.0, -3.0, 0.1 * number])
            optimizer.step()

    first, second = (torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1, **options) for _ in range(2))
    learn(first)
    learn(second)
    fuse_adam(second, torch.device("cpu"))
    assert second.param_groups[0]["fused"] is (options.get("fused", None if options else True))
    learn(first)
    learn(second)
    torch.testing.assert_close(second.state_dict()["state"], first.state_dict()["state"])
    torch.testing.assert_close(second.param_groups[0]["params"], first.param_groups[0]["params"])


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_of_an_adam_that_counts_on_the_host_is_gone_on_from_on_a_gpu(offload: bool) -> None:
    (saved := make_trainer()).train(steps(3))
    device = torch.device("cuda")
    trainer = DrafterTrainer(OneWeight(), make_buffer(), pack_tokens=128, device=device, offload=offload)  # type: ignore[arg-type]
    trainer.load_state_dict(saved.state_dict())
    for each in (saved, trainer):
        each.begin(0)
        each.train(steps(3))
    assert weight(trainer) == pytest.approx(weight(saved), rel=1e-5)
