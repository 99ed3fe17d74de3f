"""Gemma 3 270M, where `make models/gemma-3-270m/model.safetensors` made it: its weights come under own terms."""

from pathlib import Path

import pytest
import torch

from tests.test_policy import make_batch
from tlt_lightning import Sampling, VLLMEngine
from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer, response_logps
from tlt_lightning.rollout import Request

GEMMA = Path(__file__).parents[2] / "models/gemma-3-270m"
TEXT = "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"

pytestmark = pytest.mark.skipif(not (GEMMA / "model.safetensors").exists(), reason="its weights were not made here")


@pytest.mark.slow
def test_the_tokenizer_begins_every_text_and_reads_digit_by_digit() -> None:
    tokenizer = load_tokenizer(str(GEMMA))
    ids = tokenizer("is  1234\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "is", "▁▁", "1", "2", "3", "4", "\n"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "is  1234\n"


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_and_policy_agree_beyond_the_sliding_window() -> None:
    policy, tokenizer = load_policy(str(GEMMA)).eval(), load_tokenizer(str(GEMMA))
    window = policy.config.sliding_window
    ids = tokenizer(TEXT)["input_ids"]
    long = [*ids, *([*ids[1:]] * (window // len(ids) + 2))]
    assert len(long) > window + 20
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.25, max_num_seqs=4, enforce_eager=True)
    engine.setup(str(GEMMA), max_model_len=1024, seed=0)
    try:
        engine.update_weights(PolicyWeights(policy), 0)
        requests = [Request(id=number, prompt_ids=prompt) for number, prompt in enumerate((ids, long))]
        responses = sorted(engine.generate(requests, Sampling(max_tokens=8), seed=0), key=lambda each: each.request_id)
        (greedy,) = engine.generate(requests[:1], Sampling(max_tokens=4, temperature=0), seed=0)
    finally:
        engine.close()
    assert "Madrid" in tokenizer.decode(list(greedy.token_ids))
    for prompt, response in zip((ids, long), responses, strict=True):
        batch = make_batch([len(prompt)], [len(response.token_ids)])
        batch.temperature, batch.input_ids[0] = 1.0, torch.tensor([*prompt, *response.token_ids])
        with torch.no_grad():
            logps = response_logps(policy, batch)[0]
        assert (logps[0] - torch.tensor(response.logps)).abs().max() < 1e-3
