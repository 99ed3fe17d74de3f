"""8-bit rollouts: layers compute what their 8-bit weights say, updates requantize them in place, drafts stay lossless.

The policy that is sampled from is the quantized one, and its log-probs are returned: every text of a tiny vocabulary is
counted against a policy that is quantized here, without vLLM. On a GPU the same runs with CUDA graphs.
"""

import itertools
import json
import logging
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conftest import save_policy
from tests.engine.vllm.lossless.test_distribution import HORIZON, NUM_DRAWS, PROMPT, VOCAB, chi_square_p, text_logps
from tests.support.architectures import save_architecture
from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import (
    ScriptedSelector,
    engine_of,
    save_endless_policy,
    save_trained_head,
    siblings,
    write,
)
from tlt_lightning.engine import Quantization, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy, policy_shapes
from tlt_lightning.rollout import Request, Response, Sampling

pytestmark = pytest.mark.vllm

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("small")
    return str(save_policy(path, vocab_size=VOCAB, num_hidden_layers=4, initializer_range=0.1))


def rounded(x: Tensor) -> Tensor:
    """Return the part that e4m3 with a scale a row leaves of `x`, in float32."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class RoundedLinear(nn.Module):
    """Computes a linear layer in 8 bit, as vLLM should."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = None if layer.bias is None else layer.bias.float()
        self.weight = rounded(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(rounded(x), self.weight, self.bias).to(x.dtype)


def rounded_policy(path: str) -> nn.Module:
    """Return the policy in bfloat16 with its layers' linear parts in 8 bit."""
    model = load_policy(path).bfloat16().eval()
    for block in model.get_submodule("model.layers").modules():
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, RoundedLinear(layer))
    return model


class BrokenStream(PolicyWeights):
    """Ends within the first layer of attention."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from itertools.islice(super().__iter__(), 4)
        raise OSError("nobody sends any more")


def linear(engine: VLLMEngine, name: str) -> Any:
    return engine.inspect().model_runner.get_model().get_submodule(name)


def test_layers_compute_in_8_bit_with_the_newest_weights_though_an_update_broke(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = load_policy(policy)
    caplog.set_level(logging.INFO)
    quantization = Quantization(layers_in_16_bit=["model.layers.0.*"])
    with engine_of(policy, None, dtype="bfloat16", quantization=quantization) as engine:
        assert engine.compute_dtype == "fp8"
        assert re.search(r"Layers in fp8: mlp.down_proj: 3 .*; in 16 bit: embed", caplog.text)
        before = write(engine, siblings(prompts=[PROMPT]))
        addresses = [each.data_ptr() for each in engine.inspect().model_runner.get_model().parameters()]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.3)
        with pytest.raises(OSError, match="nobody sends"):
            engine.update_weights(BrokenStream(module), 1)
        with pytest.raises(RuntimeError, match="holds no current weights"):
            write(engine, siblings(prompts=[PROMPT]))
        engine.update_weights(PolicyWeights(module), 1)
        assert [each.data_ptr() for each in engine.inspect().model_runner.get_model().parameters()] == addresses
        for layer in range(4):
            own, theirs = module.get_submodule(f"model.layers.{layer}.mlp.down_proj"), f"model.layers.{layer}.mlp"
            quantized = linear(engine, f"{theirs}.down_proj")
            x = torch.randn(5, own.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
            found = quantized.quant_method.apply(quantized, x.to(engine.inspect().model_runner.device))
            weight = own.weight.detach().bfloat16()
            wanted = rounded(x) @ rounded(weight).T if layer else x @ weight.T
            assert (found.float().cpu() - wanted.float()).norm() < 0.006 * wanted.float().norm()
        assert write(engine, siblings(prompts=[PROMPT])) != before
        engine.update_weights(PolicyWeights(load_policy(policy)), 2)
        assert write(engine, siblings(prompts=[PROMPT])) == before


@pytest.fixture(params=[pytest.param(False, id="eager"), pytest.param(True, id="graphs", marks=pytest.mark.gpu)])
def speculating(request: pytest.FixtureRequest, policy: str, tmp_path: Path) -> Iterator[VLLMEngine]:
    head = save_head(make_head(policy, seed=3), tmp_path)
    selector = ScriptedSelector(longest=3)
    speculation = Speculation(
        selector=selector, head=head, max_draft_tokens=3, steps_per_choice=1, draft_sampling="probabilistic"
    )
    settings: Any = {"dtype": "bfloat16", "max_num_seqs": 128, "enforce_eager": not request.param}
    with engine_of(policy, speculation, quantization="fp8", **settings) as engine:
        engine.inspect().controller.alarm.window = 10**9  # the head is meant to be wrong
        yield engine


def share_of_the_way(found: dict[tuple[int, ...], float], policy: str) -> float:
    """Return where log-probs of texts lie from the policy in 16 bit, 0, to the one in 8 bit, 1, by least squares."""
    wide, narrow = (
        {text: sum(values) for text, values in text_logps(model, Sampling(max_tokens=HORIZON)).items()}
        for model in (load_policy(policy).bfloat16().eval(), rounded_policy(policy))
    )
    way = {text: narrow[text] - wide[text] for text in found}
    return sum((found[text] - wide[text]) * way[text] for text in found) / sum(each**2 for each in way.values())


def draw(engine: VLLMEngine, seed: int) -> list[Response]:
    num_draws = NUM_DRAWS if ON_GPU else NUM_DRAWS // 4  # 3 s a step
    requests = [Request(id=i, prompt_ids=PROMPT) for i in range(num_draws)]
    return list(engine.generate(requests, Sampling(max_tokens=HORIZON), seed=seed))


def test_drafts_leave_every_text_as_likely_as_the_quantized_policy_finds_it(
    speculating: VLLMEngine, policy: str
) -> None:
    selector: Any = speculating.speculation.selector  # type: ignore[union-attr]
    plain = draw(speculating, seed=1) + draw(speculating, seed=2)
    selector.at_random(0)
    drafted = draw(speculating, seed=3) + draw(speculating, seed=4)
    assert speculating.stats()["speculation/acceptance_length"] > 1
    logps = defaultdict(list)
    for response in plain:
        logps[tuple(response.token_ids)].append(sum(response.logps))
    for response in drafted:  # in bfloat16, whose rounding depends on how many tokens a pass reads
        text = tuple(response.token_ids)
        if text in logps:
            assert sum(response.logps) == pytest.approx(fmean(logps[text]), abs=0.25)
        logps[text].append(sum(response.logps))
    probabilities = {text: math.exp(fmean(values)) for text, values in logps.items()}
    assert 0.85 < sum(probabilities.values()) < 1.03
    for responses in (plain, drafted):
        assert chi_square_p(Counter(tuple(each.token_ids) for each in responses), probabilities) > 1e-4
    found = {text: fmean(values) for text, values in logps.items()}
    assert 0.6 < share_of_the_way(found, policy) < 1.4


@pytest.mark.gpu
def test_the_update_after_a_sleep_brings_the_same_texts(tmp_path: Path) -> None:
    policy = save_endless_policy(tmp_path / "policy")
    head = save_trained_head(policy, tmp_path / "head")
    command = [sys.executable, "-m", "tests.support.sleeping_engine", policy, head, "fp8"]
    finished = subprocess.run(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in finished.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    assert found["accepted"][1] == pytest.approx(found["accepted"][0], rel=0.15)
    same = [one[:8] == other[:8] for one, other in zip(*found["texts"], strict=True)]
    assert sum(same) >= 0.75 * len(same)  # rounding depends on how many tokens a pass reads


def test_what_nobody_has_proven_is_refused(policy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'model\.layers\.9\.\*', the name of no layer: \['model.*q_proj"):
        Quantization("fp8", ["model.layers.9.*"]).check(policy_shapes(policy))
    experts = policy_shapes(str(save_architecture("qwen3_moe", tmp_path)))
    for shapes, num_ranks in ((policy_shapes(policy), 2), (experts, 1)):
        with pytest.raises(ValueError, match="not proven for experts, nor for `tensor_parallel` above 1"):
            Quantization().check(shapes, num_ranks)
    Quantization(None).check(experts, 2)


def test_vllm_says_what_it_cannot_quantize(policy: str) -> None:
    for settings, message in (
        ({"dtype": "float32", "quantization": "fp8"}, r"torch\.float32 is not supported for quantization"),
        ({"dtype": "bfloat16", "quantization": Quantization("fp8", ["*.1.mlp.up_proj"])}, "all to use the same scheme"),
    ):
        engine = VLLMEngine(kv_cache_gib=0.0625, enforce_eager=True, **settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            engine.setup(policy, max_model_len=64, seed=0)
