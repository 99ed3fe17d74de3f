"""A drafter that is trained on a GPU: what is compiled for it when, and where its Adam goes on from."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.drafters.draft_texts import make_drafter, random_sequence
from tests.support.drafters.one_weight import OneWeight, make_buffer, make_trainer, steps, weight
from tlt_lightning.drafter.quality import AcceptanceRule
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.publishing import DrafterPublisher
from tlt_lightning.long_tail.trainer import DrafterTrainer

pytestmark = pytest.mark.gpu


def test_a_checkpoint_of_an_adam_that_counts_on_the_host_is_gone_on_from_on_a_gpu() -> None:
    (saved := make_trainer()).train(steps(3))
    device = torch.device("cuda")
    trainer = DrafterTrainer(OneWeight(), make_buffer(), pack_tokens=128, device=device)  # type: ignore[arg-type]
    trainer.load_state_dict(deepcopy(saved.state_dict()))  # on the host both would write to the same tensors
    for each in (saved, trainer):
        each.begin(0)
        each.train(steps(3))
    assert weight(trainer) == pytest.approx(weight(saved), rel=1e-5)


@pytest.mark.parametrize(("samples_drafts", "shares_noise"), [(False, False), (True, False), (True, True)])
def test_nothing_is_compiled_after_the_step_that_is_tried(
    policy_path: str, samples_drafts: bool, shares_noise: bool
) -> None:
    drafter, buffer = make_drafter(policy_path), DrafterBuffer(1 << 30)
    drafter.acceptance = AcceptanceRule(samples_drafts, 0.7, shares_noise)
    texts = [random_sequence(length, 5, seed=length) for length in (40, 70, 200, 300, 500, 1400, 2200)]
    buffer.add([replace(t, states=t.states.bfloat16(), last_states=t.last_states.bfloat16()) for t in texts])
    trainer = DrafterTrainer(drafter, buffer, pack_tokens=1024, device=torch.device("cuda"))
    publisher = DrafterPublisher(trainer)
    trainer.try_step()
    num_graphs = counters["stats"]["unique_graphs"]
    for seed in range(2):
        trainer.begin(seed)
        trainer.train(steps(6))
        publisher.publish_if_better()
        trainer.note_quality(float(drafter.num_draft_tokens))
    assert trainer.num_pending == 0  # there was text to judge by
    assert counters["stats"]["unique_graphs"] == num_graphs
