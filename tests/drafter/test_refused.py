"""Arguments of a drafter, heads and targets that are refused before anything is trained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import save_policy
from tests.support.drafters.draft_texts import make_drafter
from tlt_lightning.drafter.module import DrafterModule


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "nowhere/at-all"}, "`head`.*neither a directory"),
        ({"head": "/nowhere/at/all"}, "`head`.*neither a directory"),
        ({"layer_ids": (0, 1, 3)}, "`layer_ids`.*0 to 2"),
        ({"layer_ids": (2, 1, 0)}, "`layer_ids`.*ascending"),
        ({"layer_ids": 3}, "`layer_ids` must be a list of whole numbers or None, got 3"),
        ({"layer_ids": ("a", "b", "c")}, "`layer_ids` must be a list of whole numbers"),
        ({"draft_vocab_size": 33}, "`draft_vocab_size`.*32"),
        ({"draft_vocab_size": "a"}, "`draft_vocab_size` must be a whole number .* got 'a'"),
        ({"head": 3}, "`head` must be a string or None, got 3"),
        ({"teaching": "a"}, "`teaching` must be a Teaching, got 'a'"),
        ({"export_dir": 3}, "`export_dir` must be a string or None, got 3"),
        ({"seed": "a"}, "`seed` must be a whole number, got 'a'"),
        ({"loss": "mse"}, "`loss`.*mse.*kl_div"),
        ({"loss": {}}, "`loss`.*nothing"),
        ({"loss": 3}, "`loss` must be a string or a dict, got 3"),
        ({"loss": {"ce": "a"}}, r"`loss\.ce` must be a number, got 'a'"),
        ({"num_draft_tokens": 0}, "`num_draft_tokens`"),
        ({"num_draft_tokens": 2.5}, "`num_draft_tokens` must be a whole number .* got 2.5"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            "`optimizer` must be a function or a class .* got a",
        ),
        ({"target": 3}, r"`target` must be a string, got 3"),
        ({"optimizer": ""}, "`optimizer` must be a function or a class or None, got ''"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(policy_path: str, arguments: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        DrafterModule(**{"target": policy_path, **arguments})


def test_heads_that_do_not_fit_are_refused(policy_path: str, tmp_path: Path) -> None:
    drafter = make_drafter(policy_path)
    head = drafter.export(tmp_path / "head")
    with pytest.raises(ValueError, match=r"`layer_ids` is .* leave it out"):
        DrafterModule(drafter.target, head=str(head), layer_ids=(0, 1, 1))
    other = save_policy(tmp_path / "policy", vocab_size=40)
    with pytest.raises(ValueError, match="vocabulary of 32 tokens against 40"):
        DrafterModule(str(other), head=str(head))
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "fc_norm": True}))
    with pytest.raises(ValueError, match="fc_norm, which is not supported"):
        make_drafter(drafter.target, head=str(head))
    (head / "config.json").write_text(json.dumps(config))
    tensors = load_file(head / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"files lack fc\.weight"):
        make_drafter(drafter.target, head=str(head))
    save_file(tensors | {"fc.weight": tensors["fc.weight"] / 0}, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"NaN or infinite numbers, in fc\.weight"):
        make_drafter(drafter.target, head=str(head))
    for name, tensor in (("fc.weight", tensors["fc.weight"][:, :-1]), ("foo.weight", torch.zeros(3))):
        save_file(tensors | {name: tensor.contiguous()}, head / "model.safetensors")
        with pytest.raises(ValueError, match=f"config\\.json speaks of, but others: .*{name}"):
            make_drafter(drafter.target, head=str(head))
    shutil.rmtree(head)
    head.mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        DrafterModule(drafter.target, head=str(head))


def test_targets_of_other_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 32}')
    with pytest.raises(ValueError, match=r"gpt2.*qwen2, qwen3, llama"):
        DrafterModule(str(tmp_path))
