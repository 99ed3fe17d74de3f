"""Run the work of `end_to_end` under TRL's GRPOTrainer with colocated vLLM: the arm `trl`.

The same: policy, prompts in their order, reward, group size, micro-batches and accumulation, learning rate, clipping,
gradient norm, lengths (replayed or the same limit), temperature, precision on both sides, share of memory, sleep; and
the objective: `loss_type="dapo"` is the mean over the tokens of the optimizer step, the clip is 0.2 / 0.28, importance
weights for the mismatch of engine and trainer are cut at 2 per token, there is no KL penalty.

TRL's own, as fast as its settings go: full CUDA graphs, as many sequences at once as there are responses (both its
defaults with vLLM), the fused AdamW, log-probs fused with the head (always, in 1.16), Liger's norms, SwiGLU and rotary
embedding where `liger-kernel` is installed, no checkpoints. It pads every micro-batch to the longest response of the
iteration and offers no setting against that (`padding_free` is SFT's), so attention has a mask; kernels from the Hub
(`use_kernels`) would have to be downloaded. TRL 1.16 names vLLM 0.22 to 0.31 as supported and warns of 0.32, with which
it runs; `VLLM_USE_V2_MODEL_RUNNER=0` gives it vLLM's older runner. On a CPU, where vLLM repacks its weights, their
update has to take vLLM's own way.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common.results import hardware
from benchmarks.end_to_end.work import Diary, Work, score

LOGGED = {"reward": "reward/mean", "completions/mean_length": "rollout/length_mean"}
"""Names of TRL's metrics, and ours for the same."""

_BLOCKS = {"sync_weights": "sync", "vLLM.generate": "rollout", "_calculate_rewards": "reward"}


class Stages:
    """Splits an iteration by the blocks that TRL times; the rest is update, or other.

    The log-prob pass over the iteration and the one inside the loss go by one name: the former is inside
    `_prepare_inputs`, the latter inside `compute_loss`, whichever ends next.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._logprobs = 0.0
        self._began = time.perf_counter()

    def watch(self) -> None:
        """Listen to TRL's timers, which otherwise report to trackers alone."""
        from trl.extras.profiling import ProfilingContext

        def log(context: ProfilingContext, duration: float) -> None:
            self.took(context.name, duration)

        ProfilingContext._log_metrics = log  # type: ignore[method-assign, assignment]

    def took(self, name: str, seconds: float) -> None:
        """Add the seconds of a block of TRL's that has ended."""
        block = name.partition(".")[2]
        if block == "_get_per_token_logps_and_entropies":
            self._logprobs += seconds
        elif block == "compute_loss":
            self._logprobs = 0.0
        elif block == "_prepare_inputs":
            self.seconds["prepare"] += seconds
            self.seconds["logprobs"] += self._logprobs
            self._logprobs = 0.0
        elif block in _BLOCKS:
            self.seconds[_BLOCKS[block]] += seconds

    def end_iteration(self) -> dict[str, float]:
        """Return the stages since the last call, which add up to the time since then."""
        now = time.perf_counter()
        total, self._began = now - self._began, now
        known, self.seconds = self.seconds, defaultdict(float)
        prepare = known.pop("prepare", 0.0)
        other = max(0.0, prepare - sum(known.values()))  # tokenising, padding, sleep, the KV cache's wake
        stages = {**known, "other": other, "update": total - prepare, "iteration": total}
        return {f"time/{stage}": round(seconds, 6) for stage, seconds in stages.items()}


def dataset(work: Work) -> Any:
    """Return the prompts in the order in which `RolloutDataModule` would take them."""
    from datasets import Dataset

    from tlt_lightning.data.prompts import PromptCursor, PromptSource, load_prompts
    from tlt_lightning.policy import load_tokenizer

    source = PromptSource(path=work.train)
    prompts = load_prompts(source, load_tokenizer(work.policy), max_prompt_tokens=work.max_prompt_tokens)
    cursor = PromptCursor(len(prompts), work.seed)
    chosen = [prompts[index] for index in cursor.peek(work.iterations * work.prompts)]
    return Dataset.from_list([{"prompt": prompt.text, "row": json.dumps(prompt.row)} for prompt in chosen])


def reward(prompts: list[str], completions: list[str], row: list[str], **_: Any) -> list[float | None]:
    """Return the same reward in the form that TRL calls."""
    each = zip(prompts, completions, row, strict=True)
    return [score(prompt, completion, json.loads(text)) for prompt, completion, text in each]


def settings(work: Work, folder: str) -> Any:
    """Return the same hyper-parameters under TRL's names."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=work.is_tiny,
        bf16=not work.is_tiny,
        model_init_kwargs={"dtype": "bfloat16" if work.lora_rank else "float32"},
        seed=work.seed,
        max_steps=work.iterations,
        shuffle_dataset=False,  # ours is in order
        num_generations=work.group_size,
        per_device_train_batch_size=work.micro_batch_size,
        gradient_accumulation_steps=work.accumulate,
        max_completion_length=work.max_tokens,
        temperature=1.0,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,  # there is room, and it would cost a quarter of the update
        use_liger_kernel=not work.is_tiny and find_spec("liger_kernel") is not None,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=work.max_prompt_tokens + work.max_tokens,
        vllm_gpu_memory_utilization=work.gpu_memory_utilization,
        vllm_enable_sleep_mode=work.sleep,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def as_bfloat16(policy: str, folder: str) -> str:
    """Link the policy, declared as bfloat16: under TRL vLLM takes the configuration's type."""
    target = Path(folder) / "policy"
    target.mkdir()
    for path in Path(policy).resolve().iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    config = json.loads((Path(policy) / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return str(target)


def callback(work: Work, stages: Stages, diary: Diary) -> Any:
    """Return the callback that writes the diary, as `Recorder` of `end_to_end/arm.py` does."""
    import torch
    from transformers import TrainerCallback

    class Teller(TrainerCallback):
        """Listens to the trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            diary.ready(hardware())
            stages.end_iteration()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times = stages.end_iteration()

        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            logs = given["logs"]
            if "reward" not in logs:
                return  # the summary at the end
            metrics = {ours: float(logs[name]) for name, ours in LOGGED.items() if logs.get(name) is not None}
            tokens = metrics["rollout/length_mean"] * work.prompts * work.group_size
            metrics["rollout/tokens_per_s"] = tokens / self.times["time/rollout"]
            if diary.iteration(state.global_step, {**metrics, **self.times}):
                control.should_training_stop = True

    return Teller()


def replay_lengths(trainer: Any, lengths: list[list[int]]) -> None:
    """Give every request its recorded length, past end tokens; change nothing else."""
    llm = trainer.vllm_generation.llm
    generate: Callable[..., Any] = llm.generate

    def replayed(prompts: list[Any], sampling_params: Any, **options: Any) -> Any:
        each = []
        for length in lengths[trainer.state.global_step]:
            params = sampling_params.clone()
            params.max_tokens, params.ignore_eos = length, True
            each.append(params)
        return generate(prompts, sampling_params=each, **options)

    llm.generate = replayed


def reload_on_cpu(trainer: Any) -> None:
    """Reload weights by vLLM's own way: its CPU build packs them, so TRL cannot write in place."""
    from tlt_lightning.engine.vllm.patches import patched
    from tlt_lightning.engine.vllm.policy_weights import reload_policy

    generation = trainer.vllm_generation

    def sync_weights() -> None:
        with patched():
            reload_policy(generation.llm.llm_engine, generation._iter_named_params())
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


def run_peer(work: Work, path: Path, until: float) -> None:
    """Train for `work.iterations` or until the time is up, and write a diary to `path`."""
    diary, stages = Diary(path, until), Stages()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # TRL reaches for the engine's model, which must be in here
    from trl import GRPOTrainer

    from tlt_lightning.policy import load_tokenizer

    peft_config = None
    if work.lora_rank:
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=work.lora_rank, lora_alpha=2 * work.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    stages.watch()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(work.policy)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        trainer = GRPOTrainer(
            model=work.policy if work.is_tiny else as_bfloat16(work.policy, folder),
            reward_funcs=reward,
            args=settings(work, folder),
            train_dataset=dataset(work),
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=[callback(work, stages, diary)],
        )
        if work.lengths is not None:
            replay_lengths(trainer, work.lengths)
        if work.is_tiny:
            reload_on_cpu(trainer)
        trainer.train()
