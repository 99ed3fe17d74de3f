"""TRL 1.16 is the reference: its own loop makes the same prompts, tokens, masks and rewards of the same environment."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import save_policy
from tests.support.chat_tokenizers import byte_tokenizer, template_of
from tests.support.scripted_engine import ScriptedEngine
from tlt_lightning.data.prompts import PromptSource, load_prompts, turns_of
from tlt_lightning.data.streams.conversations import ConversationStream
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.rollout import Request, Sampling

MAX_TOKENS, MAX_CALLS = 800, 3
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"Number {number}: reach"}], "target": target}
    for number, target in enumerate([3, 1, 1, 2, 2, 1])
]
ROWS[1]["prompt"].insert(0, {"role": "system", "content": "Be brief."})


class Counter:
    """As it stands in TRL's documentation, in spirit: nothing of it knows this package."""

    def reset(self, target: int, **kwargs: Any) -> str:
        self.value, self.target = 0, target
        return f" {target}."

    def increment(self, by: int) -> int:
        """Add to the counter.

        Args:
            by: How much.

        Returns:
            The new value.
        """
        if by < 0:
            raise ValueError("Only upwards.")
        self.value += by
        return self.value

    async def look(self) -> str:
        """Read the counter.

        Returns:
            Its value in words.
        """
        return f"The counter is at {self.value}."

    def get_reward(self) -> float:
        return float(self.value == self.target)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TURNS = [
    [f"Let me add.\n{call('increment', by=2)}", call("increment", by=1), "Done."],
    [f"{call('increment', by=2)}\n{call('increment', by=-1)}", call("look"), "It is too much."],
    [call("decrement", by=1), call("increment", to=1), call("increment", by=1), "There."],
    ["I give up."],
    [call("look")] * 5,  # more calls than are allowed
    [call("increment", by=1), "x" * MAX_TOKENS],  # longer than is allowed
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from trl.chat_template_utils import add_response_schema

    return add_response_schema(byte_tokenizer(template_of("qwen2_5"), "<|im_end|>"))


def encoded(tokenizer: Any, number: int, turn: int) -> list[int]:
    return tokenizer(TURNS[number][turn] + "<|im_end|>", add_special_tokens=False)["input_ids"]


def by_trl(tokenizer: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    policy = save_policy(path / "policy", vocab_size=len(tokenizer), max_position_embeddings=4096)
    trainer = GRPOTrainer(
        model=str(policy),
        args=GRPOConfig(
            output_dir=str(path),
            per_device_train_batch_size=6,
            num_generations=3,
            max_completion_length=MAX_TOKENS,
            max_tool_calling_iterations=MAX_CALLS,
            report_to=[],
            use_cpu=True,
            mask_truncated_completions=False,
        ),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        environment_factory=Counter,
    )
    begun: list[list[int]] = []
    written = [0] * len(TURNS)

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        begun.extend([] if begun else prompt_ids)
        answers = []
        for ids in prompt_ids:
            number = next(n for n, first in enumerate(begun) if ids[: len(first)] == first)
            answers.append(encoded(tokenizer, number, written[number]))
            written[number] += 1
        return answers, None

    trainer._generate_single_turn = generate
    trainer.model.train()
    batch = trainer._generate_and_score_completions(ROWS)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    num_calls = len(TURNS) * metrics["tools/call_frequency"]
    return batch | {
        "rewards": [*trainer._logs["rewards"]["Counter"]],
        "failed": round(num_calls * metrics["tools/failure_frequency"]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_trls_loop_and_ours_make_the_same_of_an_environment(
    waits: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_trl(tokenizer, tmp_path, monkeypatch)
    environments = Environments(Counter)
    source = PromptSource(rows=ROWS, answer_column=None)
    turns = turns_of(source, tokenizer, environments=environments)
    prompts = load_prompts(source, tokenizer, max_prompt_tokens=4096, turns=turns)
    engine = ScriptedEngine(lambda request, turn: encoded(tokenizer, request.id, turn), [tokenizer.eos_token_id])
    stream = ConversationStream(engine, environments, TurnLimits(most=MAX_CALLS + 1, waits=waits))
    stream.speak(source, turns, 4096)
    requests = [Request(id=number, prompt_ids=prompt.ids) for number, prompt in enumerate(prompts)]
    stream.ask(requests, Sampling(max_tokens=MAX_TOKENS), seed=0, prompts=prompts)
    responses = {response.request_id: response for response in stream}
    stream.close()
    assert engine.num_generates == 1
    assert sorted(responses) == [*range(len(TURNS))]
    for number, response in responses.items():
        trajectory = stream.trajectory(number)
        assert trajectory is not None
        is_written, is_prompt = (expected[f"{part}_mask"][number].bool() for part in ("completion", "prompt"))
        ids = expected["completion_ids"][number][is_written].tolist()
        assert response.token_ids == ids
        prompt = expected["prompt_ids"][number][is_prompt].tolist()
        assert [*trajectory.prompt.ids] == prompt
        mask = torch.ones(len(ids), dtype=torch.int64)
        for start, length in response.observed:
            mask[start : start + length] = 0
        assert mask.tolist() == expected["tool_mask"][number][is_written].tolist()
        for before in engine.read[number]:
            assert [*prompt, *ids][: len(before)] == before
    talks = [trajectory.talk for number in sorted(responses) if (trajectory := stream.trajectory(number))]
    assert [talk.reward for talk in talks] == expected["rewards"]
    assert [talk.num_failed_calls for talk in talks] == [0, 1, 2, 0, 0, 0]
    assert expected["failed"] == 3
