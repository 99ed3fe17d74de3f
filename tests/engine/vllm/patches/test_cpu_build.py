"""A fault of vLLM's CPU build, and its repair. Once a release has mended it, a test here says so: drop the repair."""

import pytest
import torch

from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.patches import cpu_build

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU kernels in place and its sampler as it comes, whatever ran before in this process."""
    if not internals.is_cpu_build():
        pytest.skip("only the CPU build has this fault")
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", lambda *args, **kwargs: None)


def test_vllm_0_32_loses_the_temperatures_of_drafts() -> None:
    assert cpu_build.expands_wrongly()


def test_vllm_0_32_fails_under_top_k_without_drafts() -> None:
    """Why `sample_plainly_without_drafts` is more than a matter of speed."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    with pytest.raises((RuntimeError, IndexError)):
        apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)


def test_the_repair_expands_right() -> None:
    from vllm.v1.sample import rejection_sampler

    cpu_build.repair_cpu_sampling()
    assert not cpu_build.expands_wrongly()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    expand = rejection_sampler.expand_batch_to_tokens
    temperatures = expand(torch.tensor([0.7, 1.0, 0.0]), ends, 5, replace_from=0, replace_to=1)
    assert torch.equal(temperatures, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))
    ks = expand(torch.tensor([3, 9, 4], dtype=torch.int32), ends, 5)
    assert torch.equal(ks, torch.tensor([3, 3, 4, 4, 4], dtype=torch.int32))
