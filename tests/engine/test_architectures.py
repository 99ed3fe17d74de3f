"""Every architecture of the table is rolled out by vLLM, synchronised, speculated with and trained with adapters.

`python -m tests.engine.test_architectures` writes the table into docs/models.md.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.architectures import save_architecture
from tests.support.speculation_engines import PROMPTS
from tlt_lightning.adapters import LoRA
from tlt_lightning.drafter.target import read_target
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.architectures import ARCHITECTURES, Architecture, check_architecture
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Sampling
from tlt_lightning.speculation import FixedSelector

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
TEXT = """# Models

Policies that are rolled out with vLLM 0.32. Each row is proven by `tests/engine/test_architectures.py`, which makes
this page: a tiny random model is loaded, its weights are replaced by those of another one, with and without an adapter,
and the log-probs of what the engine writes are compared with the trainer's. All others are refused before the engine
loads; `TransformersEngine` rolls out any of them with the trainer's own model. Logits must be the output of a linear
head: policies whose config scales or caps them (Gemma 2, Cohere, most Granite) are refused when they are loaded.
An adaptive drafter trains an EAGLE-3 head or, on a GPU, a DSpark head (`recipes/block_drafter.yaml`).

"""

ROUNDING = 1e-2 if torch.cuda.is_available() else 1e-4  # vLLM's kernels on a GPU take TF32 for float32


def disagreement(engine: VLLMEngine, policy: torch.nn.Module) -> float:
    """Largest difference of a written token's log-prob from the trainer's."""
    requests = [Request(id=i, prompt_ids=prompt, group=i) for i, prompt in enumerate(PROMPTS)]
    worst = 0.0
    for response in engine.generate(requests, Sampling(max_tokens=16), seed=0):
        prompt = PROMPTS[response.request_id]
        ids = torch.tensor([[*prompt, *response.token_ids]])
        with torch.no_grad():
            logps = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logps.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(list(response.logps))).abs().max()))
    return worst


@pytest.mark.vllm
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.model_type)
def test_an_architecture_of_the_table_writes_with_the_weights_it_is_given(
    architecture: Architecture, tmp_path: Path
) -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3

    path, other = (save_architecture(architecture.model_type, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert check_architecture(path) == architecture
    speculation = Speculation(selector=FixedSelector(2, drafter="ngram"), ngram=True, max_draft_tokens=2)
    engine = VLLMEngine(
        dtype="float32", kv_cache_gib=0.03, max_num_seqs=4, enforce_eager=True, sleep=False, speculation=speculation
    )
    engine.setup(path, max_model_len=64, seed=0)
    try:
        policy = load_policy(other)
        engine.update_weights(PolicyWeights(policy), 0)
        assert disagreement(engine, policy) < ROUNDING
        adapted = load_policy(path, lora=LoRA(rank=2))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        engine.update_weights(PolicyWeights(adapted), 1)
        assert disagreement(engine, adapted) < ROUNDING
        model = internals.live_model_runner(engine.inspect().engine).get_model()
        is_own = not type(model).__name__.startswith("Transformers")
        assert architecture.takes_head == (is_own and supports_eagle3(model))
    finally:
        engine.close()
    if architecture.has_drafter:
        read_target(path)
    else:
        with pytest.raises(ValueError, match="draft heads are for"):
            read_target(path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_neox", "opt", "mixtral", "falcon_h1"])
def test_other_architectures_are_refused_with_the_way_out_before_vllm_loads(model_type: str, tmp_path: Path) -> None:
    path = save_architecture(model_type, tmp_path)
    engine = VLLMEngine(kv_cache_gib=0.03)
    with pytest.raises(ValueError, match=r"not proven; they are for Qwen2.*TransformersEngine"):
        engine.setup(path, max_model_len=64, seed=0)


def test_a_head_for_an_architecture_that_takes_none_is_refused(tmp_path: Path) -> None:
    path = save_architecture("gemma3_text", tmp_path)
    with pytest.raises(ValueError, match=r"Gemma3ForCausalLM .* hands no hidden states to one; speculate by look-ups"):
        check_architecture(path, with_head=True)


@pytest.mark.vllm
def test_a_head_size_that_the_build_cannot_run_is_refused_before_it_loads(tmp_path: Path) -> None:
    if not internals.is_cpu_build():
        pytest.skip("a limit of the CPU build")
    path = save_architecture("qwen2", tmp_path, num_attention_heads=4)
    with pytest.raises(ValueError, match=r"heads of size 16; vLLM's CPU build runs only \[32, 64"):
        VLLMEngine(kv_cache_gib=0.03).setup(path, max_model_len=64, seed=0)


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 96), ("vocab_size", 20)])
def test_a_config_that_is_not_the_weights_is_refused(name: str, value: int, policy_path: str, tmp_path: Path) -> None:
    path = tmp_path / "policy"
    shutil.copytree(policy_path, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, name: value}))
    engine = VLLMEngine(kv_cache_gib=0.03)
    with pytest.raises(ValueError, match=r"holds \((\d+, )?64,?\); config and weights are not of one model"):
        engine.setup(str(path), max_model_len=64, seed=0)


def page() -> str:
    rows = [
        "| architecture | rollouts, full and LoRA | look-ups | EAGLE-3 head | adaptive drafter |",
        "|---|---|---|---|---|",
    ]
    for each in ARCHITECTURES:
        head, drafter = ("yes" if flag else "no" for flag in (each.takes_head, each.has_drafter))
        rows.append(f"| `{each.name}` | yes | yes | {head} | {drafter} |")
    return TEXT + "\n".join(rows) + "\n"


def test_the_page_of_models_is_the_table_of_this_test() -> None:
    assert DOCUMENT.read_text() == page()


if __name__ == "__main__":
    DOCUMENT.write_text(page())


def test_a_drafter_whose_target_is_nowhere_is_told_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"`target` 'assets/my/policy' .* looked for from {re.escape(str(tmp_path))}"):
        read_target("assets/my/policy")
