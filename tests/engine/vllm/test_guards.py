"""What is refused before anything is loaded, each with an error that says how to go on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import load_file, save_file

from tests.conftest import save_policy
from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.rl_runs import make_data, make_module, make_trainer
from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.patches.coupled_drafts import COUPLED
from tlt_lightning.engine.vllm.speculation import Speculation, speculation_args
from tlt_lightning.rollout import Sampling
from tlt_lightning.speculation import CostModelSelector, FixedSelector
from tlt_lightning.speculation.head_files import check_head, read_head


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy"), num_hidden_layers=4))


def test_a_selector_in_the_place_of_speculation_is_refused_in_words() -> None:
    selector: Any = FixedSelector(3, "sibling")
    with pytest.raises(TypeError, match=r"`speculation` must be a Speculation or None, got a FixedSelector\."):
        VLLMEngine(speculation=selector)
    kind: Any = FixedSelector
    with pytest.raises(TypeError, match=r"`speculation\.selector` must be a StrategySelector, got the class FixedS"):
        Speculation(selector=kind, siblings=True)


def test_arms_that_nobody_drafts_are_refused(policy: str, tmp_path: Path) -> None:
    head = save_head(make_head(policy), tmp_path / "head")
    for selector, drafters, has in (
        (FixedSelector(9, "ngram"), {"ngram": True}, r"\['ngram'\] and at most 7 draft tokens"),
        (FixedSelector(3), {"siblings": True}, r"\['sibling'\] and at most 7"),
        (FixedSelector(3), {}, r"\[\] and at most 7"),
        (FixedSelector(3), {"cold_head": True}, r"\[\] and at most 7 .* add LongTailIdleCallback, which trains a head"),
        (FixedSelector(3, "mixed"), {"head": head}, r"\['learned'\] and at most 7"),
    ):
        with pytest.raises(
            ValueError, match=rf"`speculation\.selector` may ask for Strategy\(.* batch of 1, but .*{has}"
        ):
            Speculation(selector=selector, **drafters).check(policy, 4)  # type: ignore[arg-type]
    Speculation(selector=ScriptedSelector(("sibling", "ngram")), siblings=True, ngram=True).check(policy, 4)
    Speculation(selector=ScriptedSelector(("sibling",)), siblings=True, ngram=True).check(policy, 4)


def test_a_head_that_fits_is_accepted(policy: str, tmp_path: Path) -> None:
    for draft_vocab_size in (None, 16):
        head = read_head(save_head(make_head(policy, draft_vocab_size=draft_vocab_size), tmp_path / "head"))
        check_head(head, policy)
        assert head.draft_vocab_size == (draft_vocab_size or 32)
        assert head.tensors["fc.weight"] == (64, 192)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 40, "draft_vocab_size": 40}, "vocabulary of 40 tokens against 32"),
        ({"target_hidden_size": 128}, "width 128 against 64"),
        ({"draft_vocab_size": 64}, "draft vocabulary of 64 tokens, more than the 32"),
        ({"draft_vocab_size": 16}, "without `d2t`"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}, r"reads layers \[1, 3, 9\], of which the policy has 4"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"reads layers \[2, 2, 1\]"),
    ],
)
def test_a_head_for_another_policy_is_refused(
    policy: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = save_head(make_head(policy), tmp_path / "head", **changes)
    speculation = Speculation(selector=FixedSelector(3), head=path)
    with pytest.raises(ValueError, match=message) as caught:
        speculation.check(policy, 4)
    assert path in str(caught.value)
    assert policy in str(caught.value)


def test_a_head_with_biases_is_refused(policy: str, tmp_path: Path) -> None:
    path = save_head(make_head(policy), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    save_file(load_file(file) | {"layers.0.self_attn.q_proj.bias": torch.zeros(64)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"biases, which `update_drafter` does not know: layers\.0\.self_attn\.q_proj"):
        check_head(read_head(path), policy)


def test_a_head_without_some_of_its_weights_is_refused(policy: str, tmp_path: Path) -> None:
    path = save_head(make_head(policy), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    parts = {name: tensor for name, tensor in load_file(file).items() if "fc." not in name and "up_proj" not in name}
    save_file(parts, file, metadata={"format": "pt"})  # as if one of several files had not been copied
    with pytest.raises(ValueError, match=r"its files lack fc\.weight, layers\.0\.mlp\.up_proj\.weight"):
        check_head(read_head(path), policy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_with_a_number_that_is_not_finite_is_refused(value: float, policy: str, tmp_path: Path) -> None:
    head = make_head(policy)
    with torch.no_grad():
        head.norm.weight[3] = value
    with pytest.raises(ValueError, match=r"its files hold NaN or infinite numbers, in norm\.weight\. Use the head"):
        Speculation(selector=FixedSelector(3), head=save_head(head, tmp_path / "head")).check(policy, 4)


def test_what_is_no_head_is_refused(policy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_head(str(tmp_path))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM"):
        read_head(policy)


def test_the_format_of_speculators_is_read(policy: str, tmp_path: Path) -> None:
    path = Path(save_head(make_head(policy), tmp_path))
    flat = json.loads((path / "config.json").read_text())
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "transformer_layer_config": {name: flat[name] for name in ("vocab_size", "hidden_size")},
    }
    (path / "config.json").write_text(json.dumps(nested))
    head = read_head(str(path))
    check_head(head, policy)
    assert (head.vocab_size, head.target_hidden_size, head.layer_ids) == (32, 64, (1, 2, 3))


@pytest.mark.vllm
def test_vllm_is_asked_for_standard_verification_alone(policy: str, tmp_path: Path) -> None:
    path = save_head(make_head(policy), tmp_path)
    for is_v2 in (False, True):
        for speculation in (
            Speculation(selector=FixedSelector(3), head=path, draft_sampling="probabilistic"),
            Speculation(selector=FixedSelector(3, "ngram"), ngram=True),
        ):
            config = speculation_args(speculation, is_v2=is_v2)["speculative_config"]
            assert config["rejection_sample_method"] == "standard"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("is_v2", "draft_sampling", "siblings", "asked"),
    [
        (True, "probabilistic", True, ("greedy", True)),
        (True, "probabilistic", False, ("probabilistic", False)),
        (True, "greedy", True, ("greedy", False)),
        (False, "probabilistic", True, ("probabilistic", False)),
    ],
)
def test_sampled_drafts_share_their_noise_where_look_ups_draft_too(
    is_v2: bool, draft_sampling: Any, siblings: bool, asked: tuple[str, bool], policy: str, tmp_path: Path
) -> None:
    path = save_head(make_head(policy), tmp_path)
    speculation = Speculation(selector=FixedSelector(3), head=path, draft_sampling=draft_sampling, siblings=siblings)
    arguments = speculation_args(speculation, is_v2=is_v2)
    shares_noise = arguments.get("additional_config") == COUPLED
    assert (arguments["speculative_config"]["draft_sample_method"], shares_noise) == asked
    assert speculation.couples_drafts(is_v2=is_v2) is shares_noise


@pytest.mark.vllm
@pytest.mark.parametrize("parameter", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_vllm_refuses_the_sampling_parameters_that_speculation_does_not_honour(parameter: dict[str, Any]) -> None:
    """Behind `check_exact`, should it ever miss one."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        SamplingParams(**parameter)._validate_spec_decode(speculative_config=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("parameter", [{"min_p": 0.1}, {"min_tokens": 2}])
def test_sampling_that_drafts_would_change_is_refused_before_the_engine_loads(
    parameter: dict[str, Any], policy: str, prompts_path: str, tmp_path: Path
) -> None:
    speculating = VLLMEngine(speculation=Speculation(selector=FixedSelector(3, "sibling"), siblings=True))
    data = make_data(prompts_path, speculating, val_sampling=Sampling(max_tokens=8, **parameter))
    with pytest.raises(ValueError, match=rf"`sampling.{next(iter(parameter))}` cannot be combined with `speculation`"):
        make_trainer(tmp_path, max_epochs=1).fit(make_module(policy), data)
    with pytest.raises(RuntimeError, match="not set up"):
        speculating.inspect()
    VLLMEngine().check_sampling(data.val_sampling)  # without drafts it is exact


def test_speculation_is_configured_by_name() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(VLLMEngine, "engine", fail_untyped=False)
    config = {
        "class_path": "tlt_lightning.engine.VLLMEngine",
        "init_args": {
            "speculation": {
                "selector": {
                    "class_path": "CostModelSelector",
                    "init_args": {"drafters": ["sibling"], "num_draft_tokens": [2, 4]},
                },
                "siblings": True,
                "graph_pool": {"class_path": "BucketedGraphPool"},
            }
        },
    }
    engine = parser.instantiate_classes(parser.parse_object({"engine": config})).engine
    assert isinstance(engine.speculation.selector, CostModelSelector)
    assert [arm.num_draft_tokens for arm in engine.speculation.selector.arms(1)] == [0, 2, 4]
    assert engine.speculation.drafters == ("sibling",)
