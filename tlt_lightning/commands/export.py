"""Write a training checkpoint as a Hugging Face directory for `transformers` and vLLM."""

import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import nn

from tlt_lightning.adapters import LoRA
from tlt_lightning.arguments import checked
from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO, check_readable
from tlt_lightning.guard.shards import make_whole
from tlt_lightning.model_files import read_config
from tlt_lightning.policy import load_policy, load_tokenizer, merged

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_PREFIX = "policy."


@checked()
def export_policy(
    ckpt_path: str,
    output_dir: str,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    adapter: bool = False,
    policy: str | None = None,
) -> Path:
    """Write the policy of a checkpoint as a Hugging Face directory, with its tokenizer and the run's chat template.

    The directory appears once it is whole.

    Args:
        ckpt_path: A checkpoint written by `Trainer.fit`.
        output_dir: Where to write; must be empty or absent.
        dtype: Type of the written weights; None takes that of the policy that the run began with.
        adapter: For a LoRA run, write the adapter alone (PEFT format) instead of merged weights.
        policy: Where the policy is now that the run began with; None takes the path that the checkpoint remembers.

    Returns:
        `output_dir`.
    """
    source, target = Path(ckpt_path), Path(output_dir)
    check_readable(source)
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"`output_dir` {output_dir!r} is not empty; choose another or remove it.")
    checkpoint = WholeCheckpointIO().load_checkpoint(source, weights_only=True, as_rows=True)
    if "policy" not in checkpoint:
        raise ValueError(f"`ckpt_path` {ckpt_path!r} was not written by an RLModule: it has no `policy` entry.")
    path, lora = policy or checkpoint["policy"]["path"], checkpoint["policy"]["lora"]
    if not Path(path).exists() and (policy is not None or Path(path).is_absolute()):
        raise FileNotFoundError(
            f"The policy that the run began with is not at {path!r}; say with `policy` where it is (`--policy` on the "
            "command line): its config and tokenizer are exported too."
        )
    if adapter and lora is None:
        raise ValueError("`adapter` needs a checkpoint of a LoRA run; this one trained all weights.")
    model, tokenizer = _trained(path, lora, checkpoint["state_dict"]), load_tokenizer(path)
    _write_as_trained(tokenizer, checkpoint.get(L.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True) as beside:
        folder = Path(beside) / "policy"
        if adapter:
            model.save_pretrained(folder)
        else:
            _save_merged(model, folder, dtype or str(read_config(path).dtype or torch.bfloat16).removeprefix("torch."))
        tokenizer.save_pretrained(folder)
        folder.replace(target)
    log.info("Wrote %s to %s", "the adapter" if adapter else "the policy", target)
    return target


def _trained(path: str, lora: Mapping[str, Any] | None, state: Mapping[str, Any]) -> "PreTrainedModel":
    """Return the policy of a checkpoint's state; what it lacks was frozen, and comes with the model."""
    model = load_policy(path, lora=None if lora is None else LoRA(**lora))
    weights = {
        name.removeprefix(_PREFIX): value for name, value in make_whole(state).items() if name.startswith(_PREFIX)
    }
    result = model.load_state_dict(weights, strict=lora is None)
    if result.unexpected_keys:
        raise ValueError(
            f"The checkpoint holds weights that {path!r} has not, among them {result.unexpected_keys[:3]}."
        )
    return model


def _write_as_trained(tokenizer: "PreTrainedTokenizerBase", data: Mapping[str, Any]) -> None:
    """Give the tokenizer the chat template of a run's prompts, by its data module's arguments."""
    prompts = data.get("train") or {}
    tokenizer.chat_template = prompts.get("chat_template") or tokenizer.chat_template
    if given := [name for name in ("system_prompt", "chat_template_kwargs") if prompts.get(name)]:
        log.warning(
            "The run wrote its prompts with `%s`, which is no part of a model: give it to whatever serves this one.",
            "` and `".join(given),
        )


def _save_merged(policy: nn.Module, folder: Path, dtype: str) -> None:
    from transformers import GenerationConfig

    model = merged(policy).to(getattr(torch, dtype))
    # Saved apart: transformers reads, and refuses to save, a `temperature` that `do_sample: false` leaves unused.
    generation, model.generation_config = model.generation_config, GenerationConfig()
    model.save_pretrained(folder)
    generation.to_json_file(folder / "generation_config.json")


def run_export(args: list[str]) -> None:
    """Export as the command line's `args` say; `--adapter` is a flag there."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="python -m tlt_lightning export")
    parser.add_function_arguments(export_policy, skip={"adapter"})
    parser.add_argument("--adapter", action="store_true", help="Write the adapter of a LoRA run alone.")
    export_policy(**parser.parse_args(args).as_dict())
