import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import PreTrainedTokenizerBase

from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning import LoRA, PromptSource, export_policy
from tlt_lightning.commands.export import run_export
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rollout import Request, Sampling

IDS = torch.arange(3, 11)[None]


def train(policy_path: str, prompts_path: str, root: Path, lora: LoRA | None) -> tuple[Path, torch.Tensor]:
    """Return a checkpoint and the logits of the policy in it."""
    module = make_module(policy_path, lora=lora, optimizer=lambda p: torch.optim.AdamW(p, lr=2e-2))
    trainer = make_trainer(root, ModelCheckpoint(root, filename="last"), enable_checkpointing=True)
    trainer.fit(module, make_data(prompts_path))
    with torch.no_grad():
        return root / "last.ckpt", module.policy(input_ids=IDS).logits


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_transformers_loads_the_trained_policy(
    lora: LoRA | None, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint, expected = train(policy_path, prompts_path, tmp_path, lora)
    path = export_policy(str(checkpoint), str(tmp_path / "exported"))
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    before = AutoModelForCausalLM.from_pretrained(policy_path)
    assert (logits(before) - expected).abs().max() > 1e-2
    assert load_tokenizer(str(path)).decode([13, 5]) == "1 +"


@pytest.mark.parametrize("written", ["bfloat16", "float32"])
def test_weights_keep_the_type_of_the_policy(written: str, policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    policy = shutil.copytree(policy_path, tmp_path / "policy")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"dtype": written}))
    checkpoint, _ = train(str(policy), prompts_path, tmp_path, None)
    path = export_policy(str(checkpoint), str(tmp_path / "exported"))
    assert json.loads((path / "config.json").read_text())["dtype"] == written


def test_peft_loads_the_adapter_alone(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    checkpoint, expected = train(policy_path, prompts_path, tmp_path, LoRA(rank=4))
    path = tmp_path / "adapter"
    run_export([f"--ckpt_path={checkpoint}", f"--output_dir={path}", "--adapter"])
    assert (path / "adapter_config.json").is_file()
    assert not (path / "model.safetensors").exists()
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(path)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.vllm
def test_vllm_loads_the_trained_policy(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    checkpoint, expected = train(policy_path, prompts_path, tmp_path, LoRA(rank=4))
    path = export_policy(str(checkpoint), str(tmp_path / "exported"), dtype="float32")
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625, max_num_seqs=4, enforce_eager=True)
    engine.setup(str(path), max_model_len=32, seed=0)
    try:
        engine.policy_version = 0  # here the weights to be looked at are those it loaded, not those of a sync
        request = Request(id=0, prompt_ids=IDS[0].tolist())
        (response,) = engine.generate([request], Sampling(max_tokens=1, temperature=0), seed=0)
    finally:
        engine.close()
    assert list(response.token_ids) == [expected[0, -1].argmax().item()]


def test_a_run_of_a_relative_policy_is_exported_from_another_folder(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(policy_path, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    checkpoint, _ = train("policy", prompts_path, tmp_path / "run", None)
    monkeypatch.chdir("/")
    assert (export_policy(str(checkpoint), str(tmp_path / "exported")) / "config.json").is_file()
    (tmp_path / "policy").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"is not at .*policy'; say with `policy`"):
        export_policy(str(checkpoint), str(tmp_path / "again"))
    path = export_policy(str(checkpoint), str(tmp_path / "again"), policy=str(tmp_path / "moved"))
    assert (path / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ckpt_path": "nowhere.ckpt"}, "nowhere.ckpt"),
        ({"dtype": "int8"}, "dtype"),
        ({"adapter": True}, "LoRA"),
        ({"output_dir": "."}, "not empty"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str, policy_path: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "full.ckpt"
    state = {"pytorch-lightning_version": "2", "state_dict": {}}
    torch.save({**state, "policy": {"path": policy_path, "lora": None}}, checkpoint)
    defaults = {"ckpt_path": str(checkpoint), "output_dir": str(tmp_path / "out")}
    with pytest.raises((ValueError, OSError), match=message):
        export_policy(**{**defaults, **arguments})


def test_a_generation_config_that_transformers_does_not_save_is_exported_as_it_is(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = shutil.copytree(policy_path, tmp_path / "policy")
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 7], "do_sample": false, "temperature": 0.9}')
    checkpoint, _ = train(str(path), prompts_path, tmp_path / "run", None)
    exported = export_policy(str(checkpoint), str(tmp_path / "exported"))
    written = json.loads((exported / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["temperature"]) == ([1, 7], 0.9)
    assert AutoModelForCausalLM.from_pretrained(exported).generation_config.eos_token_id == [1, 7]


def test_an_export_that_fails_leaves_nothing_in_the_way_of_the_next(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = train(policy_path, prompts_path, tmp_path / "run", None)
    output = tmp_path / "exported"
    output.mkdir()
    before = {*tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", Mock(side_effect=OSError("No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            export_policy(str(checkpoint), str(output))
    assert not any(output.iterdir())
    assert {*tmp_path.iterdir()} == before
    assert (export_policy(str(checkpoint), str(output)) / "tokenizer.json").is_file()


def test_the_chat_template_of_the_run_is_exported(
    policy_path: str, prompts_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    source = PromptSource(path=prompts_path, chat=True, chat_template=template, system_prompt="1 +")
    trainer = make_trainer(tmp_path)
    trainer.fit(make_module(policy_path), make_data(prompts_path, train=source))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    exported = export_policy(str(tmp_path / "last.ckpt"), str(tmp_path / "exported"))
    assert load_tokenizer(str(exported)).chat_template == template
    assert "wrote its prompts with `system_prompt`, which is no part of a model" in caplog.text
