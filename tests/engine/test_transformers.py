"""What the reference engine does beside the duties of every engine."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.conftest import WORDS, save_policy, save_tokenizer
from tlt_lightning.engine import TransformersEngine
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Sampling

PROMPT = [12, 13, 3, 15, 4]


def test_what_a_checkpoint_says_about_generation_does_not_change_what_is_sampled(tmp_path: Path) -> None:
    path = save_policy(tmp_path / "policy")
    model = load_policy(str(path))
    model.generation_config = GenerationConfig(repetition_penalty=1.5, top_k=2, min_p=0.3, do_sample=True)
    own = model.generation_config
    engine = TransformersEngine()
    engine.setup(str(path), max_model_len=96, seed=0)
    engine.attach(model)
    engine.update_weights(PolicyWeights(model), 0)
    (response,) = engine.generate([Request(id=0, prompt_ids=PROMPT)], Sampling(max_tokens=8), seed=0)
    tokens = list(response.token_ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
    assert list(response.logps) == pytest.approx(expected.tolist(), abs=1e-4)
    assert model.generation_config is own


def test_a_policy_that_could_see_images_writes_text(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(WORDS), "num_key_value_heads": 1, "head_dim": 32}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config={**sizes, "image_size": 28})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model, engine = load_policy(str(tmp_path)), TransformersEngine()
    engine.setup(str(tmp_path), max_model_len=96, seed=0)
    engine.attach(model)
    engine.update_weights(PolicyWeights(model), 0)
    (response,) = engine.generate([Request(id=0, prompt_ids=PROMPT)], Sampling(max_tokens=8), seed=0)
    assert 0 < len(response.token_ids) <= 8


def test_a_policy_goes_on_training_and_requests_of_one_length_have_noise_of_their_own(tmp_path: Path) -> None:
    path = save_policy(tmp_path / "policy")
    model, engine = load_policy(str(path)).train(), TransformersEngine()
    engine.setup(str(path), max_model_len=96, seed=0)
    engine.attach(model)
    engine.update_weights(PolicyWeights(model), 0)
    requests = [Request(id=i, prompt_ids=PROMPT, seed=seed) for i, seed in enumerate((5, 6, 5))]
    first, other, again = (response.token_ids for response in engine.generate(requests, Sampling(max_tokens=8), seed=0))
    assert first == again != other
    assert model.training


def test_generate_before_any_weights_is_an_error() -> None:
    engine = TransformersEngine()
    with pytest.raises(RuntimeError, match="no current weights"):
        next(engine.generate([Request(id=0, prompt_ids=PROMPT)], Sampling(), seed=0))
