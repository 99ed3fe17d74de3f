from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import RolloutBatch, RolloutCallback
from tlt_lightning.gallery.policy_drift import PolicyDrift, shortest
from tlt_lightning.policy import response_logps


class Reference(RolloutCallback):
    """Computes the same KL of the three shortest answers of the first batch by the package's own log-probs."""

    def __init__(self) -> None:
        self.logps: list[torch.Tensor] = []
        self.found: list[float] = []

    @torch.no_grad()
    def on_rollout_scored(self, trainer: Any, pl_module: Any, batch: RolloutBatch) -> None:
        if not self.logps:
            self.part = batch.select(batch.lengths.argsort(stable=True)[:3].tolist())
            self.part.response_mask[0, 1] = 0  # as a token of an environment
            self.mask = self.part.response_mask.bool()
        self.logps.append(response_logps(pl_module.policy, self.part).logps[self.mask])

    def on_iteration_end(self, trainer: Any, pl_module: Any, iteration: int, metrics: dict[str, float]) -> None:
        self.found.append(metrics["rollout/policy_drift"])


class MaskedDrift(PolicyDrift):
    """Keeps the three shortest answers, of one of which a token is masked."""

    @torch.no_grad()
    def on_rollout_scored(self, trainer: Any, pl_module: Any, batch: RolloutBatch) -> None:
        if self._first is None:
            self.max_tokens = 3 * int(batch.lengths.sort().values[2])
            batch.response_mask[batch.lengths.argsort(stable=True)[0], 1] = 0
        super().on_rollout_scored(trainer, pl_module, batch)


def test_the_drift_is_the_kl_from_the_first_policy_on_its_shortest_answers(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    drift, reference = MaskedDrift(), Reference()
    module = make_module(policy_path)
    make_trainer(tmp_path, reference, drift, max_epochs=3).fit(module, make_data(prompts_path))
    first = reference.logps[0]
    expected = [float(((now - first).exp() - 1 - (now - first)).mean()) for now in reference.logps]
    assert reference.found == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert reference.found[0] == 0 < min(reference.found[1:])
    trainer = make_trainer(tmp_path / "another", drift, max_epochs=1)
    trainer.fit(module, make_data(prompts_path))
    assert trainer.callback_metrics["rollout/policy_drift"] == 0  # from what the policy is by now
    resumed = PolicyDrift()
    resumed.load_state_dict(drift.state_dict())
    assert resumed.state_dict() is not None
    assert resumed._first is drift._first


def test_at_least_one_answer_is_scored_and_no_more_than_there_is_room_for() -> None:
    lengths = torch.tensor([9, 3, 5])
    batch: Any = RolloutBatch(
        input_ids=torch.zeros(3, 9, dtype=torch.long),
        prompt_lengths=torch.ones(3, dtype=torch.long),
        response_mask=(torch.arange(8) < lengths[:, None] - 1).float(),
        rollout_logps=torch.zeros(3, 8),
        rewards=torch.zeros(3),
        groups=torch.zeros(3),
        policy_versions=torch.zeros(3),
        truncated=torch.zeros(3),
    )
    for max_tokens, widths in ((1, (1, 3)), (9, (1, 3)), (10, (2, 5)), (27, (3, 9))):
        assert tuple(shortest(batch, max_tokens)["ids"].shape) == widths
