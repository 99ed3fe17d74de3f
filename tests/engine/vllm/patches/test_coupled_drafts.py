"""A head's drafts are drawn with the noise of verification in engines that ask for it, and in no others."""

import inspect
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_lightning.engine.vllm.patches import coupled_drafts

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("is_coupled", [True, False])
def test_drafts_share_the_noise_of_verification_where_the_engine_asks_for_it(
    is_coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.sample import gumbel
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    drawn = inspect.signature(gumbel.gumbel_sample)
    asked: list[dict[str, Any]] = []

    def gumbel_sample(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(dict(drawn.bind(*args, **kwargs).arguments))
        return torch.tensor([1, 2])

    monkeypatch.setattr(gumbel, "gumbel_sample", gumbel_sample)
    vllms_own = DraftModelSpeculator.sample_draft
    with ExitStack() as undone:
        undone.enter_context(coupled_drafts.PATCH.applied())
        assert inspect.signature(DraftModelSpeculator.sample_draft) == inspect.signature(vllms_own)
        ours, theirs = (inspect.signature(each).parameters for each in (coupled_drafts.sample_coupled, vllms_own))
        assert list(ours)[1:] == list(theirs)[1:]
        speculator: Any = SimpleNamespace(
            vllm_config=SimpleNamespace(additional_config=dict(coupled_drafts.COUPLED) if is_coupled else {}),
            use_local_argmax_reduction=False,
            use_fp64_gumbel=True,
            compute_draft_logits=lambda hidden, step: torch.tensor([[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]),
            _maybe_predict_acceptance=lambda *args: None,
        )
        positions, rows, temperature, seeds = torch.tensor([6, 9]), torch.tensor([1, 0]), torch.ones(2), torch.ones(2)
        drafts = DraftModelSpeculator.sample_draft(
            speculator, torch.zeros(2, 4), positions, rows, temperature, seeds, torch.tensor(0), None
        )
    assert DraftModelSpeculator.sample_draft is vllms_own
    assert drafts.tolist() == ([1, 2] if is_coupled else [1, 0])
    assert len(asked) == is_coupled
    if is_coupled:
        (call,) = asked
        assert [id(call[n]) for n in ("pos", "expanded_idx_mapping", "seed")] == list(map(id, (positions, rows, seeds)))
        assert (call["is_drafting"], call["apply_temperature"], call["use_fp64"]) == (False, True, True)
        assert call.get("logits_cache") is None
