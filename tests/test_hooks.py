"""Hooks in runs of RLModule: in which order they come, and with which metrics an iteration's end is told."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.rl_runs import NeverLoaded, Recorder, make_data, make_module, make_trainer
from tlt_lightning import RLModule, RolloutCallback, RolloutDataModule, TransformersEngine
from tlt_lightning.hooks import check_hooks, check_overrides
from tlt_lightning.objectives import GRPO
from tlt_lightning.rewards import exact_match


class Watcher(RolloutCallback):
    """Notes what it is told at the end of each iteration, what a plain callback finds, and longest responses."""

    def __init__(self, stop_after: int | None = None, fail_in: int | None = None) -> None:
        self.stop_after, self.fail_in = stop_after, fail_in
        self.told: list[tuple[int, dict[str, float]]] = []
        self.found: list[dict[str, float]] = []
        self.longest: list[int] = []

    def on_rollout_end(self, trainer: Any, pl_module: Any, rollouts: Any) -> None:
        if trainer.training:
            self.longest.append(max(len(rollout.response.token_ids) for rollout in rollouts))
            pl_module.iteration_log.max("mine/longest", self.longest[-1])

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch + 1 == self.fail_in:
            raise ZeroDivisionError

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_iteration_end(self, trainer: Any, pl_module: Any, iteration: int, metrics: dict[str, float]) -> None:
        self.told.append((iteration, metrics))
        trainer.should_stop = iteration == self.stop_after

    def state_dict(self) -> dict[str, Any]:
        return {"told": [iteration for iteration, _ in self.told]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["told"]


@pytest.fixture(autouse=True)
def seed() -> None:
    L.seed_everything(11)


def run(watcher: Watcher, paths: tuple[str, str, Path], *callbacks: L.Callback, ckpt: str | None = None, **other: Any):  # type: ignore[no-untyped-def]
    policy_path, prompts_path, root = paths
    validating = {"max_epochs": 3, "limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
    trainer = make_trainer(root, watcher, *callbacks, **{**validating, **other})
    trainer.fit(make_module(policy_path), make_data(prompts_path), ckpt_path=ckpt)
    return trainer


def test_hooks_come_in_order(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    recorder = Recorder()
    make_trainer(tmp_path, recorder).fit(make_module(policy_path), make_data(prompts_path))
    one = ["start", "progress", "end", "scored"]
    assert recorder.calls == ["synced 0", *one, "synced 2", *one]
    assert all(batch.advantages is not None for batch in recorder.batches)
    assert all(rollout.rewards["evenness"] == rollout.reward for rollout in recorder.rollouts[0])


def test_a_plain_callback_with_a_hook_works(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    class Plain(L.Callback):
        seen = 0

        def on_rollout_end(self, trainer, pl_module, rollouts):  # type: ignore[no-untyped-def]
            Plain.seen += len(rollouts)

    make_trainer(tmp_path, Plain()).fit(make_module(policy_path), make_data(prompts_path))
    assert Plain.seen == 32


def test_each_iteration_is_told_once_with_its_own_metrics(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher()
    run(watcher, paths)
    assert [iteration for iteration, _ in watcher.told] == [1, 2, 3]
    told = [metrics for _, metrics in watcher.told]
    assert all({"reward/mean", "train/loss", "time/iteration", "rollout/length_p99"} <= set(each) for each in told)
    assert [each["mine/longest"] for each in told] == watcher.longest
    assert ["val/accuracy" in each for each in told] == [False, True, False]
    assert len({each["train/grad_norm"] for each in told}) == 3


def test_a_plain_callback_finds_the_metrics_of_the_iteration_that_ends(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher()
    run(watcher, paths)
    for found, (_, told) in zip(watcher.found, watcher.told, strict=True):
        assert {name: found[name] for name in told} == pytest.approx(told)


def test_a_run_that_is_told_to_stop_ends_with_the_iteration_it_was_told_in(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher(stop_after=2)
    trainer = run(watcher, paths, max_epochs=5)
    assert [iteration for iteration, _ in watcher.told] == [1, 2]
    assert trainer.current_epoch == 2


def test_early_stopping_sees_a_metric_of_the_iteration(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher()
    stopping = EarlyStopping("mine/longest", stopping_threshold=0.0, mode="max", check_on_train_epoch_end=True)
    run(watcher, paths, stopping)
    assert [iteration for iteration, _ in watcher.told] == [1]


def test_an_iteration_that_fails_is_not_told(paths: tuple[str, str, Path]) -> None:
    watcher = Watcher(fail_in=2)
    with pytest.raises(ZeroDivisionError):
        run(watcher, paths)
    assert [iteration for iteration, _ in watcher.told] == [1]


def test_a_checkpoint_is_written_after_the_iteration_was_told_and_a_resumed_run_tells_the_next(
    paths: tuple[str, str, Path],
) -> None:
    checkpoints = ModelCheckpoint(paths[2], "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(Watcher(), paths, checkpoints, enable_checkpointing=True)
    path = str(paths[2] / "epoch=1.ckpt")
    assert torch.load(path, weights_only=True)["callbacks"]["Watcher"] == {"told": [1, 2]}
    resumed = Watcher()
    run(resumed, paths, ckpt=path)
    assert resumed.loaded == [1, 2]
    assert [iteration for iteration, _ in resumed.told] == [3]


def test_a_logger_has_one_row_an_iteration_and_one_a_validation(paths: tuple[str, str, Path]) -> None:
    run(Watcher(), paths, logger=CSVLogger(paths[2], name="csv", flush_logs_every_n_steps=1))
    lines = (paths[2] / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["step"], bool(row["val/accuracy"]), bool(row["mine/longest"])) for row in rows] == [
        ("0", False, True),
        ("1", True, False),
        ("1", False, True),
        ("2", False, True),
    ]


def test_the_step_in_a_checkpoints_name_is_the_optimizers(paths: tuple[str, str, Path]) -> None:
    checkpoints = ModelCheckpoint(paths[2], "{epoch}-{step}", save_top_k=-1, save_on_train_epoch_end=True)
    run(Watcher(), paths, checkpoints, enable_checkpointing=True, limit_val_batches=0)
    names = {path.name for path in paths[2].glob("*.ckpt")}
    assert names == {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt"}


def hook_of(name: str, method: Any) -> L.Callback:
    return type("Mine", (L.Callback,), {name: method})()


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("on_rollout_finished", lambda *_: None, r"`Mine\.on_rollout_finished` is no hook.*on_rollout_end, "),
        ("on_weight_synced", lambda *_: None, r"`Mine\.on_weight_synced` is no hook.*on_weights_synced"),
        ("on_hidden_state", lambda *_: None, r"`Mine\.on_hidden_state` is no hook.*on_hidden_states"),
        (
            "on_rollout_end",
            lambda self, trainer, module: None,
            r"called with \(trainer, pl_module, rollouts\): too many",
        ),
        ("on_rollout_start", lambda self, trainer, module, step: None, "missing a required argument: 'step'"),
        ("on_iteration_end", None, "None is not a callable object"),
    ],
)
def test_a_method_that_cannot_be_the_hook_it_looks_like_is_refused(name: str, method: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        check_hooks(hook_of(name, method))
    check_hooks(hook_of("on_rollout_end", lambda self, trainer, *rest: None))
    check_hooks(hook_of("on_something_of_its_own", None))


def test_a_hook_that_logs_as_lightnings_do_is_told_where_numbers_go(paths: tuple[str, str, Path]) -> None:
    class Logging(Watcher):
        def on_rollout_scored(self, trainer: Any, pl_module: Any, batch: Any) -> None:
            pl_module.log("mine/rows", 1.0)

    with pytest.raises(MisconfigurationException, match=r"`Logging.on_rollout_scored` calls `log`.*iteration_log.mean"):
        run(Logging(), paths)


def test_an_async_hook_is_refused() -> None:
    async def wait(*_: Any) -> None: ...

    with pytest.raises(MisconfigurationException, match=r"`Mine\.on_rollout_end` is async.*drop `async`"):
        check_hooks(hook_of("on_rollout_end", wait))


class MaskTruncated(RolloutCallback):
    """Takes responses that were cut off out of the loss, as docs/objectives.md says."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.learned_from: list[float] = []

    def on_rollout_scored(self, trainer: Any, pl_module: Any, batch: Any) -> None:
        batch.response_mask[batch.truncated] = 0
        self.finished.append(int((~batch.truncated).sum()))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.learned_from.append(batch[0].num_loss_sequences)


def test_a_callback_takes_truncated_responses_out_of_the_loss(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    callback, data = MaskTruncated(), make_data(prompts_path, num_minibatches=1)
    make_trainer(tmp_path, callback, max_epochs=1).fit(make_module(policy_path), data)
    (num_finished,) = callback.finished
    assert callback.learned_from == [num_finished]
    assert 0 < num_finished < 16


class Clears(RLModule):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


class Reports(RLModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("mine/step", 1.0)


class Stops(RLModule):
    def configure_callbacks(self) -> list[Any]:
        return [EarlyStopping("reward/mean", mode="max")]


class Manual(RLModule):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False


class Several(RLModule):
    def configure_optimizers(self) -> Any:
        assert self.policy is not None
        weights = [*self.policy.parameters()]
        return [torch.optim.SGD(weights[:1], lr=0.1), torch.optim.SGD(weights[1:], lr=0.2)]


class Without(RLModule):
    def configure_optimizers(self) -> Any:
        super().configure_optimizers()  # and forgets to return it


class Forgets(RolloutDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Adds(RLModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("mine/step", 1.0)

    def on_train_start(self) -> None:
        with torch.no_grad():
            [RLModule.on_train_start(self) for _ in range(1)]

    def configure_optimizers(self) -> Any:  # may take the place of the module's own
        assert self.policy is not None
        return torch.optim.SGD(self.policy.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Clears, r"`Clears\.optimizer_zero_grad` takes the place of `RLModule\..*call `super\(\)"),
        (Reports, r"`Reports\.on_before_optimizer_step` takes the place"),
        (Stops, r"`Stops\.configure_callbacks` takes the place"),
        (Several, r"`Several\.configure_optimizers` returns 2 optimizers.*one with several parameter groups"),
        (Without, r"`Without\.configure_optimizers` returns 0 optimizers"),
        (Manual, r"`Manual\.automatic_optimization` is False.*one optimizer with several parameter groups"),
    ],
)
def test_a_module_that_hides_what_a_run_needs_is_refused_before_the_engine_loads(
    kind: type[RLModule], message: str, paths: tuple[str, str, Path]
) -> None:
    policy_path, prompts_path, root = paths
    data = make_data(prompts_path, NeverLoaded())
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(root).fit(kind(policy_path, GRPO()), data)


def test_a_module_that_adds_to_what_a_run_needs_runs(paths: tuple[str, str, Path]) -> None:
    policy_path, prompts_path, root = paths
    trainer = make_trainer(root, max_epochs=1)
    trainer.fit(Adds(policy_path, GRPO()), make_data(prompts_path))
    assert {"mine/step", "train/loss"} <= trainer.callback_metrics.keys()


def test_a_data_module_that_hides_its_state_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`Forgets\.state_dict` takes the place of `RolloutData"):
        check_overrides(Forgets([exact_match], engine=TransformersEngine()))  # type: ignore[list-item]
    check_overrides(L.LightningDataModule())
