"""Score responses with a Hugging Face reward model: a sequence classifier with one output."""

import threading
from pathlib import Path
from typing import Any

from tlt_lightning.arguments import Count, checked

# One for all instances: a lock in the instance could not be deep-copied, which Lightning does with hyperparameters.
LOADING = threading.Lock()


class RewardModel:
    """Scores responses by the raw logit of a sequence classifier with one output.

    The first call loads the model; calls from several threads are safe. A tokenizer with a chat template makes prompt
    and response two messages, else they are concatenated: the prompt must be the plain question.

    Args:
        model: Folder or hub name of the reward model.
        device: Where it runs, such as `cpu` or `cuda:1`.
        max_length: Longest prompt plus response in tokens of the reward model; longer ones are an error, because the
            score of a truncated answer means something else.

    Example:
        >>> reward = RewardModel("Skywork/Skywork-Reward-V2-Qwen3-0.6B", device="cuda")
        >>> reward("What is 2 + 2?", "4", {})  # doctest: +SKIP
        7.5
    """

    @checked()
    def __init__(self, model: str, device: str = "cpu", max_length: Count = 4096) -> None:
        self.model = str(Path(model).expanduser()) if model.startswith("~") else model
        self.device = device
        self.max_length = max_length
        self._loaded: tuple[Any, Any] | None = None

    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> float:
        """Return the model's logit for `response` as an answer to `prompt`."""
        import torch

        tokenizer, model = self.load()
        if tokenizer.chat_template is None:
            text = prompt + response
        else:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        # Chat templates write the special tokens themselves.
        ids = tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
        if len(ids) > self.max_length:
            raise ValueError(
                f"Prompt and response have {len(ids)} tokens, more than `max_length` {self.max_length}; raise it, as "
                "far as the reward model's context allows, or shorten the policy's responses."
            )
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids], device=self.device)).logits.float().item()

    def load(self) -> tuple[Any, Any]:
        """Return tokenizer and model, loaded once."""
        with LOADING:
            if self._loaded is None:
                self._loaded = load_reward_model(self.model, self.device)
            return self._loaded


def load_reward_model(name: str, device: str) -> tuple[Any, Any]:
    """Load tokenizer and model at path or hub name `name`.

    Raises:
        ValueError: It has several outputs, or its files lack the one.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from tlt_lightning.model_files import load_whole, read_config

    num_outputs = read_config(name, "model").num_labels
    if num_outputs != 1:
        raise ValueError(f"`model` must be a sequence classifier with one output, but {name!r} has {num_outputs}.")
    model: Any = load_whole(AutoModelForSequenceClassification, name, "model", may_hold_more=True)
    return AutoTokenizer.from_pretrained(name), model.to(device).eval()
