"""The callback of the adaptive drafter: what it refuses, prepares, asks for and trains."""

import copy
import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

from tests.support.drafters.drafter_runs import POLICY, fixed, make_callback, make_engine
from tests.support.drafters.one_weight import steps
from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning import Sampling
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import AcceptanceRule, DraftQuality
from tlt_lightning.engine import RolloutEngine, TransformersEngine, VLLMEngine
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.long_tail.budget import AdaptiveBudget, FixedBudget, MeasuredIteration, TrainingBudget
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.long_tail.publishing import PublishDecision
from tlt_lightning.long_tail.trainer import TrainingCosts
from tlt_lightning.metrics import IterationLog
from tlt_lightning.metrics.iteration_log import combine
from tlt_lightning.policy import load_policy
from tlt_lightning.ranks.idle_windows import IdleWindow
from tlt_lightning.speculation import CostModelSelector, FixedSelector
from tlt_lightning.training.lr_schedule import WarmupCosine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are written to the working directory."""
    monkeypatch.chdir(tmp_path)


ROOT: Any = SimpleNamespace(default_root_dir=".", global_rank=0)


def set_up(callback: LongTailIdleCallback, engine: RolloutEngine, policy: str = POLICY) -> None:
    module = SimpleNamespace(policy_path=policy, callback_bytes={})
    callback.on_engine_setup(ROOT, module, engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "policy", "message"),
    [
        (TransformersEngine(), POLICY, "`engine`, a TransformersEngine, never asks for it"),
        (VLLMEngine(), POLICY, r"VLLMEngine, never asks for it.*drafters: \[learned, sibling\]"),
        (make_engine(FixedSelector(3, "ngram"), ngram=True), POLICY, "'learned'.*never asks for it"),
        (make_engine(fixed()), "another/policy", r"target` is .*policy.*but the policy is 'another/policy'"),
        (make_engine(fixed(), head="somewhere", cold_head=False), POLICY, "give the head as `drafter.head` alone"),
    ],
)
def test_an_engine_that_cannot_serve_the_drafter_is_refused(engine: RolloutEngine, policy: str, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        set_up(make_callback(), engine, policy)


@pytest.mark.parametrize(("name", "value"), [("lr_scheduler", WarmupCosine), ("export_dir", "head")])
def test_what_a_warm_up_alone_has_is_refused_beside_a_policy(name: str, value: Any) -> None:
    drafter = DrafterModule(POLICY, **{name: value})
    with pytest.raises(MisconfigurationException, match=rf"`drafter\.{name}` is for `drafter fit`"):
        set_up(LongTailIdleCallback(drafter), make_engine(fixed()))


def test_the_engine_starts_with_the_head_that_training_starts_from(random_head: str) -> None:
    for head, is_cold in ((None, True), (random_head, False)):
        callback, engine = make_callback(head), make_engine(fixed())
        for _ in range(2):  # a second stage of the same objects
            set_up(callback, engine)
        assert engine.speculation is not None
        assert engine.speculation.cold_head is is_cold
        assert engine.speculation.head is not None
        saved = load_file(Path(engine.speculation.head) / "model.safetensors")
        for name, tensor in callback.drafter.trainable_tensors():
            assert torch.equal(saved[name], tensor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buffer_gib": 0}, "`buffer_gib` must be positive"),
        ({"pack_tokens": 100}, "`pack_tokens` must be a positive multiple of 128, got 100"),
    ],
)
def test_bad_arguments_name_themselves(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_callback(**arguments)


class Loop:
    """A Trainer, its module and its data for a callback on the CPU: nothing is written, the policy is never trained."""

    def __init__(self, callback: LongTailIdleCallback, world_size: int = 1) -> None:
        self.callback = callback
        data = SimpleNamespace(sampling=Sampling(temperature=0.7, top_p=0.9, top_k=50))
        strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda tensor, reduce_op: tensor)
        self.trainer: Any = SimpleNamespace(
            training=True, current_epoch=0, max_epochs=9, world_size=1, global_step=0, global_rank=0, strategy=strategy
        )
        self.trainer.datamodule, self.trainer.is_global_zero, self.trainer.default_root_dir = data, False, "."
        self.trainer.state, self.trainer.ckpt_path = SimpleNamespace(fn="fit"), None
        self.module: Any = SimpleNamespace(
            policy_path=POLICY,
            policy=load_policy(POLICY),
            hidden_state_request=None,
            iteration_log=IterationLog(),
            callback_bytes={},
        )
        self.engine = make_engine(fixed())
        callback.on_engine_setup(self.trainer, self.module, self.engine)
        callback.setup(self.trainer, self.module, "fit")
        self.trainer.world_size = world_size

    @property
    def num_steps(self) -> float:
        """Return this rank's micro-steps since the log was cleared."""
        return self.module.iteration_log.read()["drafter/micro_steps"][1]

    def begin_iteration(self, epoch: int) -> bool:
        """Begin an iteration; return whether hidden states are asked for."""
        self.trainer.current_epoch = epoch
        self.callback.on_rollout_start(self.trainer, self.module)
        return self.module.hidden_state_request is not None


def test_the_drafter_is_trained_and_judged_as_the_engine_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = make_callback()
    engine = make_engine(ScriptedSelector(longest=5), draft_sampling="probabilistic", max_draft_tokens=7)
    set_up(callback, engine)
    assert (callback.drafter.num_steps, callback.drafter.num_draft_tokens) == (5, 5)
    assert callback.drafter.acceptance == AcceptanceRule(samples_drafts=True, temperature=1.0)
    monkeypatch.setattr("tlt_lightning.engine.vllm.internals.runs_v2", lambda: True)
    callback = make_callback()
    selector = CostModelSelector(num_draft_tokens=(3,), drafters=("learned", "sibling"))
    set_up(callback, make_engine(selector, draft_sampling="probabilistic", siblings=True, cold_head=False))
    assert callback.drafter.acceptance == AcceptanceRule(samples_drafts=True, temperature=1.0, shares_noise=True)
    callback = make_callback()
    loop = Loop(callback)
    assert callback.drafter.acceptance == AcceptanceRule(temperature=0.7, top_p=0.9, top_k=50)
    loop.trainer.datamodule.sampling = Sampling(temperature=0.5)  # as another callback gives it to an iteration
    loop.begin_iteration(0)
    assert callback.drafter.acceptance == AcceptanceRule(temperature=0.5)


def test_another_run_of_the_same_callback_begins_its_first_iteration_anew() -> None:
    loop = Loop(make_callback())
    for _ in range(2):  # the first is interrupted in the iteration that the second begins with
        loop.module.hidden_state_request = None
        loop.callback.setup(loop.trainer, loop.module, "fit")
        assert loop.begin_iteration(0)
        assert loop.begin_iteration(0)  # another rollout of it


def test_the_selector_hears_how_good_a_new_head_is_and_says_whether_it_pays() -> None:
    class Hearing(ScriptedSelector):
        def expected_speedup(self, accepted: Any) -> float:
            return 1 + sum(accepted)

    callback, heard = make_callback(), []
    set_up(callback, make_engine(Hearing(longest=3)))
    engine: Any = callback._served._engine
    engine.update_drafter = lambda tensors, version, accepted: heard.append(accepted)
    quality = DraftQuality((0.5, 0.25, 0.0), (), (), (), 9)
    assert callback._served.expected_speedup(quality) == 1.75
    publisher: Any = SimpleNamespace(version=1, quality=quality, published=lambda: iter(()))
    for _ in range(2):  # the second time for rows of the policy's
        callback._served.push(publisher)
    assert heard == [(0.5, 0.25, 0.0), None]


def test_an_engine_has_its_own_speculation_back_for_the_next_run() -> None:
    engine, module = make_engine(fixed()), SimpleNamespace(policy_path=POLICY, callback_bytes={})
    given: Any = engine.speculation
    for ended in ("teardown", "on_exception"):
        callback: Any = make_callback()
        callback.on_engine_setup(ROOT, module, engine)
        assert engine.speculation is not given
        weights = sum(tensor.numel() for tensor in callback.drafter.parameters())
        assert module.callback_bytes["drafter, trained"] > 4 * weights
        module.hidden_state_request = "of this callback's"
        getattr(callback, ended)(SimpleNamespace(), module, "fit")
        assert engine.speculation is given
        assert module.hidden_state_request is None
        assert module.callback_bytes == {}


def test_the_next_run_of_a_callback_has_no_texts_of_another_policy() -> None:
    callback = make_callback()
    Loop(callback)
    callback.buffer.add(texts_of(8))
    callback.training.seen_version = callback.publisher.data_version = callback.publisher.version = 7
    callback.training.num_pending = 7
    second, training = Loop(callback), callback.training
    assert training.sum_over_ranks.args == (second.trainer,)  # type: ignore[attr-defined]
    assert (len(callback.buffer), len(callback.buffer.held_out), training.seen_version) == (0, 0, -1)
    assert training.num_pending == 0
    assert (callback.publisher.version, callback.publisher.data_version) == (7, -1)


def test_a_resumed_run_reads_the_layers_that_its_head_has_learned_from() -> None:
    before, now = make_callback(), LongTailIdleCallback(DrafterModule(POLICY, layer_ids=(0, 1, 2)))
    Loop(before), Loop(now)
    with pytest.raises(ValueError, match=r"reads layers \[.*\].*\[0, 1, 2\].*`drafter.layer_ids`"):
        now.load_state_dict(before.state_dict())


def test_a_run_that_is_resumed_with_another_head_trains_and_serves_that_one(
    random_head: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, same = (make_callback(draft_vocab_size=64) for _ in range(2))  # as many tokens as the other head drafts
    loop, other = Loop(first), make_callback(random_head)
    loop.callback.publisher.version = 7
    began = {}
    for callback in (same, other):
        Loop(callback)
        with torch.no_grad():
            for tensor in callback.training.weights().values():
                tensor.add_(1)
        began[callback] = {name: tensor.clone() for name, tensor in callback.training.weights().items()}
        callback.load_state_dict(copy.deepcopy(loop.callback.state_dict()))
        is_said = f"anew from `drafter.head` {random_head}: the checkpoint's began from random weights" in caplog.text
        assert is_said is (callback is other)
    assert (same.publisher.version, other.publisher.version) == (7, 0)
    for callback, expected in ((same, loop.callback.training.weights()), (other, began[other])):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in callback.training.weights().items())


def test_a_resumed_run_that_validates_first_drafts_with_its_policys_rows() -> None:
    loop, other = Loop(make_callback(draft_vocab_size=40)), make_callback(draft_vocab_size=40)
    with torch.no_grad():
        loop.module.policy.get_output_embeddings().weight.mul_(2)
    loop.callback.drafter.choose_vocabulary(torch.arange(115))
    loop.begin_iteration(3)
    loop.callback.publisher.version = 1
    state = loop.callback.state_dict()
    resumed, pushed = Loop(other), list[dict[str, torch.Tensor]]()
    resumed.callback.load_state_dict(copy.deepcopy(state))
    resumed.callback._served.push = lambda publisher: pushed.append(dict(publisher.published()))  # type: ignore[method-assign]
    with torch.no_grad():
        resumed.module.policy.get_output_embeddings().weight.mul_(3)
    resumed.trainer.training, resumed.trainer.current_epoch = False, 4
    resumed.callback.on_rollout_start(resumed.trainer, resumed.module)
    policy = resumed.module.policy.get_output_embeddings().weight
    drafted = loop.callback.drafter.vocabulary
    assert torch.equal(pushed[0]["lm_head.weight"], policy[drafted])


def test_a_step_that_does_not_fit_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: DrafterModule, batch: Any, **rest: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(DrafterModule, "loss", full)
    loop = Loop(make_callback(pack_tokens=512))
    with pytest.raises(MisconfigurationException, match=r"pack_tokens=512.*2\.00 GiB.*Lower `pack_tokens`"):
        loop.callback.on_train_start(loop.trainer, loop.module)
    frozen = Loop(make_callback(share=0.0))
    frozen.callback.on_train_start(frozen.trainer, frozen.module)  # it never trains


def test_what_is_tried_before_a_run_is_announced_and_a_stage_of_its_first_iteration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop(make_callback(pack_tokens=512))
    caplog.set_level("INFO")
    loop.callback.on_train_start(loop.trainer, loop.module)
    assert "A training step of the drafter is tried and timed" in caplog.text
    loop.module.iteration_log.clear()  # as the module does afterwards
    tried = loop.callback._seconds_tried
    for epoch, seconds in ((0, tried), (1, 0.0)):
        loop.begin_iteration(epoch)
        assert loop.module.iteration_log.seconds("drafter_trial") == seconds
        loop.module.iteration_log.clear()
    assert tried > 0


def test_no_step_begins_that_the_budget_cannot_pay_for() -> None:
    batch: Any = SimpleNamespace(lengths=torch.full((16,), 100))
    trained = []
    for step, judged_token in ((1e-9, 1e-9), (1e3, 1e-9), (1e-9, 1e3)):
        loop = Loop(make_callback(budget=AdaptiveBudget(trial=1e2), pack_tokens=128))
        loop.callback._costs = TrainingCosts(step, judged_token)
        loop.begin_iteration(0)
        loop.callback.on_rollout_scored(loop.trainer, loop.module, batch)
        loop.callback.on_hidden_states(loop.trainer, loop.module, texts_of(12))
        trained.append(loop.num_steps > 0)
    assert trained == [True, False, False]


def test_an_idle_window_is_left_after_some_passes_and_lack_of_memory_ends_no_run() -> None:
    callback = make_callback(share=0.0, max_passes=1.5, pack_tokens=128)
    loop = Loop(callback, world_size=2)
    loop.begin_iteration(0)
    callback.on_hidden_states(loop.trainer, loop.module, texts_of(12))
    loop.begin_iteration(1)
    callback.on_rollout_idle(loop.trainer, loop.module, IdleWindow(lambda: True, 1))
    assert loop.num_steps == math.ceil(1.5 * callback.buffer.num_tokens / 128)
    callback.drafter.loss = lambda batch, **rest: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))  # type: ignore[method-assign]
    trained = loop.num_steps
    callback.training.begin(1)
    callback.on_rollout_idle(loop.trainer, loop.module, IdleWindow(lambda: True, 1))
    assert loop.num_steps == trained
    assert loop.module.iteration_log.read()["drafter/out_of_memory"] == ("sum", 1.0)


@pytest.mark.parametrize(
    ("world_size", "budget", "expected"),
    [
        (1, FixedBudget(0.1), [True] * 4),
        (1, FixedBudget(0.0), [False] * 4),
        (2, FixedBudget(0.0), [True] * 4),  # there are idle windows
        (1, FixedBudget(0.1, every_n_iterations=3), [False, False, True, False]),
        (2, FixedBudget(0.1, every_n_iterations=2), [False, True, False, True]),
        (1, AdaptiveBudget(), [True]),  # a trial
    ],
)
def test_states_are_asked_for_where_the_drafter_trains(
    world_size: int, budget: TrainingBudget, expected: list[bool]
) -> None:
    loop = Loop(make_callback(budget=budget), world_size)
    assert [loop.begin_iteration(epoch) for epoch in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("world_size", "share", "expected"),
    [
        (1, 0.3, 0.4),  # a quarter is held out
        (1, 0.001, 0.1 / 0.75),  # enough to decide by
        (2, 0.3, 1 / 0.75),  # nobody knows what idle windows will take
    ],
)
def test_states_are_asked_for_as_many_as_may_be_trained_on(world_size: int, share: float, expected: float) -> None:
    loop = Loop(make_callback(share=share), world_size)
    loop.begin_iteration(0)
    assert loop.module.hidden_state_request.share == pytest.approx(expected)


@pytest.mark.parametrize(("learned_from", "lag"), [(-1, None), (0, 5), (3, 2)])
def test_the_lag_of_a_published_head_is_in_steps_of_the_policy(learned_from: int, lag: int | None) -> None:
    loop = Loop(make_callback())
    loop.callback.publisher.data_version, loop.trainer.global_step = learned_from, 5
    loop.begin_iteration(1)
    assert combine([loop.module.iteration_log.read()]).get("drafter/policy_lag") == lag


def test_the_budget_hears_what_is_to_come_and_what_training_takes_on_average_over_ranks() -> None:
    class Listening(FixedBudget):
        def decide(self, iteration: int, remaining: int | None) -> float | None:
            heard.append((iteration, remaining))
            return super().decide(iteration, remaining)

        def note_decision(self, decision: PublishDecision, remaining: int | None) -> None:
            of_decisions.append(remaining)

        def note_costs(self, step: float, decision: float) -> None:
            heard.append((step, decision))

    heard: list[Any] = []
    of_decisions: list[int | None] = []
    loop = Loop(make_callback(budget=Listening(0.1), pack_tokens=128))
    quality = DraftQuality((1.0,), (), (), (), 1)
    decision = PublishDecision(quality, quality, 0.0, 0.0, is_published=False, has_diverged=False)
    loop.callback.publisher.publish_if_better = lambda: decision  # type: ignore[method-assign]
    for epoch, max_epochs in ((0, 9), (8, 9), (3, -1)):
        loop.trainer.max_epochs = max_epochs
        loop.begin_iteration(epoch)
    assert heard == [(0, 8), (8, 0), (3, None)]
    assert of_decisions == [8, 0, None]
    training, loop.callback._costs = loop.callback.training, TrainingCosts(step=3.0, judged_token=0.5)
    training.num_ranks, training.sum_over_ranks = 2, lambda own: own + torch.tensor([1.0, 0.0])
    loop.callback.buffer.add(texts_of(12))
    num_judged = sum(map(len, loop.callback.buffer.held_out))
    loop.callback._note_costs()
    assert heard[3:] == [(2.0, 2 * 0.5 * num_judged / 2)]  # what is held out is judged twice, before and after


def test_the_drafter_of_an_earlier_run_is_kept(
    random_head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(make_callback(random_head, dirpath=str(tmp_path)))
    loop.trainer.is_global_zero = True
    for run in range(3):
        loop.callback.on_train_end(loop.trainer, loop.module)
        (tmp_path / "final" / "README.md").write_text(f"run {run}")
        assert ("held the drafter of an earlier run, kept in earlier_" in caplog.text) is (run > 0)
    for folder, run in (("final", 2), ("earlier_0/final", 0), ("earlier_1/final", 1)):
        assert (tmp_path / folder / "README.md").read_text() == f"run {run}"
        assert (tmp_path / folder / "model.safetensors").is_file()


def test_a_run_that_never_published_says_that_it_leaves_no_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(make_callback(dirpath=str(tmp_path)))
    loop.trainer.is_global_zero = True
    loop.callback.on_train_end(loop.trainer, loop.module)
    assert not (tmp_path / "final").exists()
    assert f"There is no head to write to {tmp_path / 'final'}: " in caplog.text


def test_a_resumed_run_states_the_quality_of_the_head_that_was_published_before(
    random_head: str, tmp_path: Path
) -> None:
    def make(name: str) -> Loop:
        loop = Loop(make_callback(random_head, dirpath=str(tmp_path / name), pack_tokens=128))
        loop.trainer.is_global_zero = True
        return loop

    loop, resumed = make("first"), make("resumed")
    loop.callback.buffer.add(texts_of(12))
    loop.callback.training.begin(0)
    loop.callback.training.train(steps(1))
    loop.callback._decide(loop.trainer)
    with io.BytesIO() as file:
        torch.save(loop.callback.state_dict(), file)
        file.seek(0)
        resumed.callback.load_state_dict(torch.load(file, weights_only=True))
    readmes = []
    for each, name in ((loop, "first"), (resumed, "resumed")):
        each.callback.on_train_end(each.trainer, each.module)
        readmes.append((tmp_path / name / "final" / "README.md").read_text())
    assert "tokens per step" in readmes[0]
    assert readmes[0] == readmes[1]


def texts_of(number: int, length: int = 40) -> list[PolicyText]:
    states = torch.randn(length, 4 * 128).bfloat16()
    return [PolicyText(torch.arange(length).roll(n), states[:, :384], states[:, 384:], 4) for n in range(number)]


class Recording(FixedBudget):
    """Remembers what it is told, and may allow no time."""

    seconds = math.inf

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self.iterations: list[MeasuredIteration] = []

    def limit(self, elapsed: float) -> float:
        return self.seconds

    def note_iteration(self, iteration: MeasuredIteration) -> None:
        self.iterations.append(iteration)


@pytest.mark.slow
def test_ranks_share_what_idle_windows_left_of_the_budget_and_count_both() -> None:
    budget = Recording(0.8)
    callback = make_callback(budget=budget, pack_tokens=128)
    loop = Loop(callback)
    callback.training.sum_over_ranks = lambda tensor: 2 * tensor  # of two ranks that do the same
    callback._served.push = lambda _: None  # type: ignore[method-assign]  # the engine is not loaded
    loop.trainer.world_size = 2
    batch: Any = SimpleNamespace(lengths=torch.full((16,), 100))
    callback.buffer.add(texts_of(12))
    trained = []
    for epoch, num_idle in enumerate((0, 3, 12)):
        loop.begin_iteration(epoch)
        left = iter(range(num_idle))
        callback.max_passes = math.inf
        callback.on_rollout_idle(
            loop.trainer, loop.module, IdleWindow(lambda left=left: next(left, None) is not None, 1)
        )
        callback.on_rollout_scored(loop.trainer, loop.module, batch)
        callback.on_hidden_states(loop.trainer, loop.module, texts_of(12))
        trained.append(loop.num_steps)
        numbers = {name: value for name, (_, value) in loop.module.iteration_log.read().items()}
        assert numbers["drafter/budget_tokens"] == 0.8 * 3200
        assert numbers["drafter/tokens"] == 128 * loop.num_steps
        callback.on_iteration_end(
            loop.trainer, loop.module, epoch + 1, {**numbers, "drafter/tokens": 256.0 * trained[-1]}
        )
        loop.module.iteration_log.clear()
    assert trained == [10, 10, 12]  # ten packs of 128 by each of two are 0.8 of 3,200 tokens; idle ones come first
    assert [round(each.idle_share, 3) for each in budget.iterations] == [0, 0.24, 0.96]
    assert [round(each.share, 3) for each in budget.iterations] == [0.8, 0.56, 0]
    assert all(each.learned_share is None for each in budget.iterations)  # the head is cold
    budget.seconds = 0.0
    loop.begin_iteration(3)
    callback.on_rollout_scored(loop.trainer, loop.module, batch)
    callback.on_hidden_states(loop.trainer, loop.module, texts_of(12))
    assert loop.num_steps == 0
