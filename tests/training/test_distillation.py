"""Runs in which a policy follows a teacher."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tests.conftest import WORDS, Paths, save_policy
from tests.runs.test_resume import History, SaveAt
from tests.support.rl_runs import Recorder, evenness, make_data, make_engine, make_module, make_trainer, weights
from tlt_lightning import LoRA, RLModule, export_policy
from tlt_lightning.objectives import K2, Distillation, Divergence, KLPenalty
from tlt_lightning.policy import load_policy, response_logps


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a wider model of another family, whose head is padded."""
    path = tmp_path_factory.mktemp("teacher")
    return str(save_policy(path, "llama", seed=1, hidden_size=96, num_hidden_layers=1, vocab_size=len(WORDS) + 8))


def make_student(policy_path: str, teacher_path: str, **overrides: Any) -> RLModule:
    return make_module(policy_path, **{"objective": Distillation(), "reference": teacher_path, **overrides})


def fit(
    paths: Paths, module: RLModule, *callbacks: Any, engine: str = "transformers", ckpt: Path | None = None, **data: Any
) -> dict[int, dict[str, float]]:
    _, prompts_path, root = paths
    torch.manual_seed(0)  # adapters begin at random
    history = History()
    trainer = make_trainer(root, history, *callbacks, max_epochs=data.pop("max_epochs", 4), limit_val_batches=1)
    settings = {"rewards": None, "group_size": 1, "prompts_per_iteration": 8, **data}
    trainer.fit(module, make_data(prompts_path, make_engine(engine), **settings), ckpt_path=ckpt)
    return history.rows


@pytest.mark.vllm
@pytest.mark.parametrize("lora", [None, LoRA(rank=8)], ids=["full", "lora"])
def test_a_student_comes_closer_to_its_teacher_without_a_reward(
    lora: LoRA | None, paths: Paths, teacher_path: str
) -> None:
    module = make_student(paths[0], teacher_path, lora=lora)
    rows = fit(paths, module, engine="vllm", max_epochs=6, prompts_per_iteration=16)
    first, last = (rows[number]["train/divergence"] for number in (1, 6))
    assert 0 < last < 0.85 * first
    assert rows[1]["train/loss"] == pytest.approx(first)
    assert not any(name.startswith(("reward/", "val/accuracy")) for row in rows.values() for name in row)
    assert all("val/length" in row for row in rows.values())
    assert not any("reference" in name for name in module.state_dict())


def test_the_metric_is_the_mean_divergence_of_the_rollouts(paths: Paths, teacher_path: str) -> None:
    """However the step is cut, and with tokens that a callback has masked."""

    class Mask(Recorder):
        def on_rollout_scored(self, trainer: Any, pl_module: Any, batch: Any) -> None:
            batch.response_mask[::2, 1] = 0.0
            super().on_rollout_scored(trainer, pl_module, batch)
            assert batch.ref_logps is None  # it is heard in the update's own pass alone

    recorder = Mask()
    rows = fit(paths, make_student(paths[0], teacher_path), recorder, max_epochs=1, num_minibatches=1)
    batch, models = recorder.batches[0], [load_policy(path).eval() for path in (paths[0], teacher_path)]
    total = 0.0
    for row in range(len(batch)):
        ids, start = batch.input_ids[row : row + 1, : batch.lengths[row]], int(batch.prompt_lengths[row])
        own, teacher = (m(input_ids=ids).logits[0, start - 1 : -1, : len(WORDS)].log_softmax(-1) for m in models)
        kl = (own.exp() * (own - teacher)).sum(-1)
        total += float((kl.detach() * batch.response_mask[row, : len(kl)]).sum())
    assert rows[1]["train/divergence"] == pytest.approx(total / float(batch.response_mask.sum()), rel=1e-4)


def test_rewards_and_a_teacher_teach_together(paths: Paths, teacher_path: str) -> None:
    objective = Distillation(divergence=Divergence(beta=0.5, top_k=8), reward_coef=1.0)
    module = make_student(paths[0], teacher_path, objective=objective)
    rows = fit(paths, module, max_epochs=1, rewards=[evenness], group_size=4, num_minibatches=1)
    assert rows[1]["reward/evenness"] == rows[1]["reward/mean"]
    assert rows[1]["train/loss"] != pytest.approx(rows[1]["train/divergence"], rel=1e-3)


@pytest.mark.slow
def test_a_resumed_student_ends_with_the_same_weights_and_is_exported(paths: Paths, teacher_path: str) -> None:
    saved = SaveAt(paths[2] / "scored.ckpt", "scored", 1)
    whole, resumed = (make_student(paths[0], teacher_path) for _ in range(2))
    fit(paths, whole, saved, max_epochs=3)
    fit(paths, resumed, ckpt=saved.path, max_epochs=3)
    torch.testing.assert_close(weights(resumed), weights(whole), atol=0, rtol=0)
    exported = load_policy(str(export_policy(str(saved.path), str(paths[2] / "hf"), dtype="float32")))
    assert exported.get_output_embeddings().weight.shape[0] == len(WORDS)


def test_a_teacher_of_other_tokens_is_refused_by_the_first_that_differs(paths: Paths, tmp_path: Path) -> None:
    teacher = save_policy(tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"18"', '"eighteen"'))
    with pytest.raises(
        ValueError, match=r"has other tokens than `model.policy` .*: '18' is None there and 30 here, and 1"
    ):
        fit(paths, make_student(paths[0], str(teacher)))


def test_a_policy_is_no_teacher_of_its_own(policy_path: str) -> None:
    with pytest.raises(ValueError, match="Distillation learns from a teacher: name it by `reference`"):
        RLModule(policy_path, Distillation())


def test_scores_are_made_without_the_teacher(policy_path: str, teacher_path: str) -> None:
    module = make_student(policy_path, teacher_path)
    module.trainer = make_trainer(Path())
    module.configure_model()
    from tests.test_policy import make_batch

    batch = make_batch([3, 5], [4, 2])
    scored = module.score(batch, 64)
    assert scored.ref_logps is None
    torch.testing.assert_close(scored.old_logps, response_logps(module.policy, batch).logps.detach())


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM's `/v1/completions` does, with the numbers of a real model."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, asked["model"], asked["prompt_logprobs"]) == ("/v1/completions", "large", 0)
        choices = []
        for index, ids in enumerate(asked["prompt"]):
            with torch.no_grad():
                logps = self.server.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            told = [{str(b): {"logprob": float(logps[at, b]), "rank": 1}} for at, b in enumerate(ids[1:])]
            choices.append({"index": index, "text": "", "prompt_logprobs": [None, *told]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": choices[::-1]}).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_the_page_hears_a_teacher_behind_a_server(paths: Paths, teacher_path: str) -> None:
    page = (Path(__file__).parents[2] / "docs/distillation.md").read_text()
    own: dict[str, Any] = {}
    exec(page.split('title="my_teacher.py"\n')[1].split("```")[0], own)
    server, teacher = HTTPServer(("localhost", 0), Server), load_policy(teacher_path).eval()
    server.model = teacher  # type: ignore[attr-defined]
    Thread(target=server.serve_forever, daemon=True).start()
    objective = own["ServedDistillation"](divergence=None, loss_kl=KLPenalty(coef=1.0, estimator=K2()))
    module, recorder = make_module(paths[0], objective=objective), Recorder()
    try:
        asks = own["ServedTeacher"](f"http://localhost:{server.server_port}/v1", "large")
        rows = fit(paths, module, asks, recorder, num_minibatches=1, max_epochs=1)
    finally:
        server.shutdown()
        server.server_close()
    batch = recorder.batches[0]
    with torch.no_grad():
        own_logps, logps = (response_logps(model, batch).logps for model in (load_policy(paths[0]), teacher))
    torch.testing.assert_close(batch.ref_logps, logps, rtol=1e-4, atol=1e-4)
    half_squares = (own_logps - logps).square().sum() / 2
    assert rows[1]["train/loss"] == pytest.approx(float(half_squares / batch.response_mask.sum()), rel=1e-4)
    assert module._reference is None
