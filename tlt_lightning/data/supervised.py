"""Make an epoch of optimizer steps of given texts: supervised fine-tuning."""

import sys
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from tlt_lightning.arguments import Count, checked_attributes
from tlt_lightning.checks import check_trainer, context_of
from tlt_lightning.data.base import PolicyDataModule, cut_steps
from tlt_lightning.data.formats import Text
from tlt_lightning.data.loader import RolloutLoader, check_held_out, ignore_needless_warnings
from tlt_lightning.data.prompts import PromptCursor, PromptSource, checksum, first_prompts
from tlt_lightning.data.texts import AnsweredRows
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.ranks.liveness import Liveness
from tlt_lightning.rollout import Prompt, Response, Rollout, RolloutBatch, collate
from tlt_lightning.seeds import run_seed
from tlt_lightning.training.described import keep_arguments
from tlt_lightning.training.memory.pass_size import choose_on_device, pass_sizes
from tlt_lightning.training.resume import PROMPTS, begins_run, warn_of_changes


class SupervisedDataModule(PolicyDataModule):
    """Yields optimizer steps of given texts, prompts with answers or conversations, for `RLModule(policy, SFT())`.

    Nothing is written, and there is no engine. What the assistant says is learned, in all of its turns. Texts come in
    another order in each pass over the data, none twice before all came once; passes of the policy are packed.
    A batch of validation is `batch_size` held-out texts. Each argument is an attribute of its name.

    Args:
        train: Texts to learn from; in Python also a path, a `datasets.Dataset` or a list of rows. A row has a prompt
            and an answer, each text or messages, in the columns `prompt_column` and `answer_column` (or `completion`);
            or a conversation with its answers, in `messages`, `conversations` or `prompt_column`; or `prompt_ids` and
            `response_ids`, as `predict` writes them.
        val: Held-out texts, for `validate` and the validation during `fit`.
        batch_size: Texts of an optimizer step, over all ranks.
        steps_per_epoch: Optimizer steps of an epoch, after which come log, report, validation and checkpoint; None is a
            pass over the data.
        micro_batch_tokens: Most tokens of a forward and backward pass on one rank, as of `RolloutDataModule`.
        max_tokens: Longest text, beyond which it is cut; None is the policy's context, at most `micro_batch_tokens`.
        assistant_only: Learn from the assistant's tokens alone; False learns from prompts and all other turns, too.

    Example:
        >>> from tlt_lightning import RLModule, SupervisedDataModule
        >>> from tlt_lightning.objectives import SFT
        >>> data = SupervisedDataModule(train=[{"prompt": "2 + 3", "answer": "5"}])
        >>> L.Trainer(max_epochs=3).fit(RLModule("Qwen/Qwen2.5-0.5B", SFT()), data)  # doctest: +SKIP
    """

    train: PromptSource | None
    val: PromptSource | None

    def __init__(
        self,
        train: PromptSource | str | None = None,
        val: PromptSource | str | None = None,
        batch_size: Count = 32,
        steps_per_epoch: Count | None = None,
        micro_batch_tokens: Count | None = None,
        max_tokens: Count | None = None,
        assistant_only: bool = True,
    ) -> None:
        super().__init__()
        self.train, self.val = (None if each is None else PromptSource.of(each) for each in (train, val))
        self.batch_size, self.steps_per_epoch = batch_size, steps_per_epoch
        self.micro_batch_tokens, self.max_tokens, self.assistant_only = micro_batch_tokens, max_tokens, assistant_only
        keep_arguments(self, checked_attributes(self, SupervisedDataModule))
        self.train_texts: list[Text] = []
        self.val_texts: list[Text] = []
        self.cursor: PromptCursor | None = None
        self._first_step: int | None = None  # of the epoch, before which the cursor stands

    @property
    @override
    def num_steps(self) -> int:
        of_pass = ceil(len(self.train_texts) / self.batch_size)
        return int(self._trainer.fast_dev_run) or self.steps_per_epoch or of_pass  # type: ignore[attr-defined]

    @override
    def setup(self, stage: str) -> None:
        """Read the texts, after all checks."""
        trainer, module, is_fit = self._trainer, self._module, stage == "fit"
        check_trainer(trainer)
        module.check_networks()
        if not module.objective.learns_from_rows:
            raise MisconfigurationException(
                f"`model.objective` {type(module.objective).__name__} learns from rewards, and the texts of a "
                "`SupervisedDataModule` have none: use `SFT`."
            )
        if self.batch_size % trainer.world_size:
            raise MisconfigurationException(
                f"`data.batch_size` {self.batch_size} is not divisible by {trainer.world_size} ranks, which share it."
            )
        ignore_needless_warnings()
        position = self._position if is_fit and self.cursor is not None and not begins_run(trainer) else 0
        self.train_texts = self._read("train", self.train) if is_fit else []
        self._checksum = checksum(self.train_texts)  # once: of a million texts it takes seconds
        self.val_texts = self._read("val", self.val) if self.val is not None or not is_fit else []
        if is_fit:
            self.cursor, self._first_step = PromptCursor(len(self.train_texts), run_seed()), None
            self.cursor.position = position
            call_rollout_hook(trainer, "on_texts_read", [text.ids for text in self.train_texts])
        longest = max(len(text.ids) for text in (*self.train_texts, *self.val_texts))
        on_gpu = trainer.strategy.root_device.type == "cuda"
        sizes = pass_sizes(self.micro_batch_tokens, longest, on_gpu=on_gpu)
        self._pass_tokens = choose_on_device(trainer, None, sizes, longest=longest) if is_fit else sizes[-1]
        self.liveness = Liveness(trainer)

    def _read(self, name: str, source: PromptSource | None) -> list[Text]:
        if source is None:
            raise MisconfigurationException(f"`data.{name}` is not set; give at least `data.{name}.path`.")
        limits = (self.max_tokens, self.micro_batch_tokens, context_of(self._module.policy_path), sys.maxsize)
        texts = AnsweredRows(source, self._module.policy_path, min(each for each in limits if each)).read_all()
        if not self.assistant_only:
            texts = [Text(text.ids, 1) for text in texts]
        if name == "train":
            kept = self._trainer.overfit_batches  # type: ignore[attr-defined]
            return first_prompts(texts, kept if isinstance(kept, float) else kept * self.batch_size)
        check_held_out(self._trainer, len(texts))
        return texts

    # Batches

    @override
    def train_batches(self) -> Iterator[list[RolloutBatch]]:
        assert self.cursor is not None, "batches before `setup`"
        self.cursor.position, self._first_step = self._position, self._trainer.global_step
        self._module.iteration_log.lap("other")
        drawn = self.cursor.peek(self.num_steps * self.batch_size)
        yield from self._batches([self.train_texts[number] for number in drawn])

    @override
    def val_dataloader(self) -> RolloutLoader[list[RolloutBatch]] | list[Any]:
        """Yield held-out texts, as many on every rank: a remainder of fewer than there are ranks is left out."""
        texts = self.val_texts[: len(self.val_texts) // self._trainer.world_size * self._trainer.world_size]
        return RolloutLoader(ceil(len(texts) / self.batch_size), lambda: self._batches(texts)) if texts else []

    test_dataloader = val_dataloader

    def _batches(self, texts: Sequence[Text]) -> Iterator[list[RolloutBatch]]:
        """Yield the micro-batches of this rank for every `batch_size` texts."""
        trainer, module = self._trainer, self._module
        for start in range(0, len(texts), self.batch_size):
            own = texts[start : start + self.batch_size][trainer.global_rank :: trainer.world_size]
            batch = collate(list(map(_imitated, own)), pad_id=0, temperature=1.0)
            if trainer.training:
                batch = module.score(batch, self._pass_tokens, single_update=True)
            yield from cut_steps(trainer, module.networks, batch, [torch.arange(len(own))], self._pass_tokens)

    # Checkpoints

    @property
    def _position(self) -> int:
        """Texts that were learned from, over all ranks: those of a step that was not taken come again."""
        steps = 0 if self._first_step is None else self._trainer.global_step - self._first_step
        return cast("PromptCursor", self.cursor).position + steps * self.batch_size

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "settings": self._kept_settings}

    @property
    def _kept_settings(self) -> dict[str, int]:
        """Settings that a resumed run must not change to go on exactly."""
        return {
            "seed_everything": run_seed(),
            "number of workers": self._trainer.world_size,
            "data.batch_size": self.batch_size,
            "number of training texts": len(self.train_texts),
            PROMPTS: self._checksum,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.cursor is not None and self._trainer.state.fn == "fit":
            self.cursor.position = state_dict["position"]
            warn_of_changes(state_dict["settings"], self._kept_settings)


def _imitated(text: Text) -> Rollout:
    """Return a text as a rollout whose response begins with the first answer."""
    prompt, response = text.ids[: text.prompt_length], text.ids[text.prompt_length :]
    observed = tuple((start - text.prompt_length, stop - start) for start, stop in text.others)
    answer = Response(0, response, [0.0] * len(response), "stop", (0,), observed=observed)
    return Rollout(prompt=Prompt("", prompt), response=answer, text="", group=0)
