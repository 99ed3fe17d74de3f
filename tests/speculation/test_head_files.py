"""Sizes of a head as its configuration gives them, and policies that it fits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from tlt_lightning.speculation.head_files import EAGLE3, check_head, read_head

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 40, "hidden_size": 16}
NAMES = [f"{part.replace('layers.0.', 'midlayer.')}.weight" for part in EAGLE3.parts(1)]


@pytest.mark.parametrize(("named", "draft_vocab_size"), [({}, 40), ({"draft_vocab_size": 24}, 24)])
def test_a_head_that_names_no_draft_vocabulary_drafts_all_tokens(
    named: dict[str, int], draft_vocab_size: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | named))
    assert read_head(str(tmp_path)).draft_vocab_size == draft_vocab_size


def test_a_head_of_the_whole_vocabulary_fits_and_a_larger_one_does_not(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 8})
    )
    save_file({name: torch.zeros(16) for name in NAMES}, tmp_path / "model.safetensors")
    for draft_vocab_size in (40, 41):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": draft_vocab_size}))
        head = read_head(str(tmp_path))
        if draft_vocab_size == 40:
            check_head(head, str(policy))
        else:
            with pytest.raises(ValueError, match="draft vocabulary of 41 tokens, more than the 40 there are"):
                check_head(head, str(policy))


def test_a_head_as_the_first_were_published_is_read_and_one_without_weights_is_refused(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 8})
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": 24}))
    torch.save({"not": "weights"}, tmp_path / "training_args.bin")
    with pytest.raises(ValueError, match=r"no weights in \*\.safetensors or pytorch_model\*\.bin"):
        check_head(read_head(str(tmp_path)), str(policy))
    tensors = {name: torch.ones(16).half() for name in NAMES} | {"d2t": torch.zeros(24, dtype=torch.long)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    head = read_head(str(tmp_path))
    assert head.tensors == dict.fromkeys(NAMES, (16,)) | {"d2t": (24,)}
    check_head(head, str(policy))


WHOLE = save({"norm.weight": torch.zeros(16)})


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": b'{"architectures": '},
        {"config.json": b"[1]"},
        {"config.json": json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}).encode()},
        {"model.safetensors": WHOLE[:-8]},
        {"model.safetensors": b""},
        {"model.safetensors": b"version https://git-lfs.github.com/spec/v1"},
        {"pytorch_model.bin": b"version https://git-lfs.github.com/spec/v1"},
    ],
)
def test_broken_files_of_a_head_are_refused_with_its_place(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"`head` '{tmp_path}' cannot be read: .*download it again\.$"):
        read_head(str(tmp_path))
