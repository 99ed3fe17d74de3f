"""Sizes of a head as its configuration gives them, and policies that it fits."""

import json
from pathlib import Path
from typing import Any

import pytest

from tlt_lightning.speculation.eagle3_files import check_head, read_head

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 40, "hidden_size": 16}


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
    for draft_vocab_size in (40, 41):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": draft_vocab_size}))
        head = read_head(str(tmp_path))
        if draft_vocab_size == 40:
            check_head(head, str(policy))
        else:
            with pytest.raises(ValueError, match="draft vocabulary of 41 tokens, more than the 40 there are"):
                check_head(head, str(policy))
