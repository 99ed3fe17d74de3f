"""A DSpark head goes through what trains, judges, publishes and saves any head."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from tests.support.drafters.draft_texts import make_drafter, random_sequence
from tests.support.drafters.one_weight import steps
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.long_tail.publishing import DrafterPublisher
from tlt_lightning.long_tail.trainer import DrafterTrainer


def trainer_of(policy: str) -> DrafterTrainer:
    drafter = make_drafter(policy, architecture=DSpark(num_layers=2, block_size=5, markov_rank=8, anchors=32))
    buffer = DrafterBuffer(1 << 30)
    texts = [random_sequence(length, 5) for length in (40, 70, 200, 300)]
    buffer.add([replace(t, states=t.states.bfloat16(), last_states=t.last_states.bfloat16()) for t in texts])
    return DrafterTrainer(drafter, buffer, pack_tokens=128, device=torch.device("cpu"))


@pytest.mark.slow
def test_a_block_head_is_trained_judged_and_gone_on_from_exactly(policy_path: str) -> None:
    trainer = trainer_of(policy_path)
    assert trainer.try_step().step > 0
    publisher = DrafterPublisher(trainer)
    trainer.begin(0)
    trainer.train(steps(4))
    decision = publisher.publish_if_better()
    assert decision is not None
    assert len(decision.quality.accepted) == 4
    again = trainer_of(policy_path)
    again.load_state_dict(deepcopy(trainer.state_dict()))
    for each in (trainer, again):
        each.begin(1)
        each.train(steps(3))
    for name, weight in trainer.weights().items():
        assert torch.equal(weight, again.weights()[name]), name
