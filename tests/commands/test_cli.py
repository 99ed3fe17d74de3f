"""The command line as a user sees it: whole runs, and what mistakes end with."""

import errno
import json
import logging
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning_utilities.core.imports import RequirementCache

import tlt_lightning
from tlt_lightning.__main__ import COMMANDS, HELP, main, sentence_of
from tlt_lightning.commands.advice import nearest
from tlt_lightning.commands.cli import follow_root, run_cli, run_drafter_cli
from tlt_lightning.objectives import GSPO, PPO, RLOO, Distillation, DrGRPO
from tlt_lightning.rewards import exact_match

ROOT = Path(__file__).parents[2]


def options(policy: str, prompts: str, root: Path) -> list[str]:
    """Options of a run of one iteration of a tiny policy on the CPU."""
    values = {
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": 1,
        "trainer.default_root_dir": root,
        "trainer.gradient_clip_val": 1.0,
        "model.policy": policy,
        "data.engine": "TransformersEngine",
        "data.train.path": prompts,
        "data.rewards": '[{"function": "tlt_lightning.rewards.exact_match"}]',
        "data.group_size": 2,
        "data.prompts_per_iteration": 2,
        "data.max_prompt_tokens": 16,
        "data.sampling.max_tokens": 8,
    }
    return [*(f"--{name}={value}" for name, value in values.items())]


@pytest.mark.slow
def test_a_saved_config_run_elsewhere_leaves_the_first_run_alone(
    policy_path: str, prompts_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_cli(["fit", *options(policy_path, prompts_path, first), "--trainer.callbacks+=Timer"])
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    saved = first / "csv" / "version_0" / "config.yaml"
    run_cli(["fit", "-c", str(saved), f"--trainer.default_root_dir={second}"])
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert (second / "checkpoints" / "last.ckpt").is_file()
    assert json.loads((second / "summary.json").read_text())["iterations"] == 1


@pytest.mark.slow
def test_a_recipe_takes_a_callback_that_copies_the_module(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    cli = run_cli(["fit", *options(policy_path, prompts_path, tmp_path), "--trainer.callbacks+=EMAWeightAveraging"])
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert saved["current_model_state"].keys() == cli.model.state_dict().keys()
    assert cli._subcommand_parsers.keys() == {"fit"}  # no options are read of what is not asked for


@pytest.mark.parametrize(
    "command",
    [
        "fit -c=recipes/quickstart.yaml",
        "drafter fit -c=recipes/drafter_warmup.yaml --data.completions=pyproject.toml",
    ],
)
def test_printed_settings_can_be_moved_too(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)  # `main` changes it
    monkeypatch.chdir(ROOT)
    arguments = [*command.split(), "--trainer.default_root_dir=first", "--print_config"]
    monkeypatch.setattr(sys, "argv", ["tlt-lightning", *arguments])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if ": first" in line] == ["  default_root_dir: first"]
    assert sum(": ${trainer.default_root_dir}" in line for line in lines) >= 2


def test_only_output_folders_follow_the_root() -> None:
    config = "root: out\n  - dirpath: out/checkpoints\n    save_dir: 'out'\n    dirpath: outer\n    head: out/head\n"
    expected = (
        "root: out\n  - dirpath: ${trainer.default_root_dir}/checkpoints\n    save_dir: '${trainer.default_root_dir}'\n"
        "    dirpath: outer\n    head: out/head\n"
    )
    assert follow_root(config, "out") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--data.group_sise=8"], "Did you mean `--data.group_size`?"),
        (["--ckpt_path=nowhere/last.ckpt"], "`ckpt_path` 'nowhere/last.ckpt' does not exist"),
        (
            ["--data.rewards=[builtins.roud]"],
            'error: Parser key "data.rewards":\n  `builtins` has no `roud`. Did you mean `round`?',
        ),
        (["--data.rewards=[my_reward.right]"], "There is no module `my_reward`, nor a file `my_reward.py` here."),
        (
            ["--data.engine=VLLMEngin"],
            'error: Parser key "data.engine":\n  There is no class `VLLMEngin`. Did you mean `VLLMEngine`?',
        ),
        (["--model.objective=dapo"], "Did you mean `DAPO`?"),
        (["--model.objective=DAPO"], "are required: overlong.max_tokens, overlong.buffer_tokens\n"),
        (
            ["--trainer.callbacks+=EarlyStoping"],
            "There is no class `EarlyStoping`. Did you mean `EarlyStopping`?",
        ),
        (
            ["--model.objective=Mine"],
            "There is no class `Mine`. Name one of your own with its module: `my_module.Name`.",
        ),
        (["--model.objective=K3"], "`K3` is of another kind than this setting takes."),
        (["--data.sampling.stop_string=x"], "Did you mean `--data.sampling.stop_strings`?"),
        (["--model.objectiv.clip=1"], "Did you mean `--model.objective`?"),
        (
            ["--model.objective.clipp=1"],
            "There is no `clipp`. It takes advantage, aggregation,",
        ),
        (
            ["--data.engine=VLLMEngine", "--data.engine.speculation.sibling=true"],
            "There is no `sibling`. Did you mean `siblings`?",
        ),
        (['--data.rewards=[{"functio": "builtins.max"}]'], "There is no `functio`. Did you mean `function`?"),
        (
            ["--trainer.max_epochs=ten"],
            """error: Parser key "trainer.max_epochs":\n  Expected a <class 'int'>. Got value: ten\nOpt""",
        ),
        (
            ["--data.schedule.max_staleness=2"],
            "Expected an instantiatable class, but tlt_lightning.RolloutSchedule is abstract",
        ),
        (["--model.lora=8"], "Expected a dot import path string: 8"),
        (["--seed_everything=-1"], "error: `seed_everything` -1 is not in bounds, numpy accepts from 0 to 4294967295"),
        (["--ckpt_path=pyproject.toml"], "`ckpt_path` 'pyproject.toml' is not a complete checkpoint"),
    ],
)
def test_a_mistake_ends_with_what_is_wrong_and_where_help_is(
    wrong: list[str],
    message: str,
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)  # of another test's recipe
    with pytest.raises(SystemExit) as raised:
        run_cli(["fit", *options(policy_path, prompts_path, tmp_path), *wrong])
    lines = capsys.readouterr().err.splitlines()
    assert raised.value.code == 2
    assert message in "\n".join(lines)
    assert lines[-1] == "Options are listed by: python -m tlt_lightning fit --help"
    assert len(lines) <= 12
    assert max(map(len, lines)) < 400  # no values of all arguments


def test_a_checkpoint_with_more_iterations_than_the_run_is_refused_before_anything_is_made(
    policy_path: str, prompts_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 3}}}}}, path)
    with pytest.raises(SystemExit):
        run_cli(["fit", *options(policy_path, prompts_path, tmp_path), f"--ckpt_path={path}"])
    assert "last.ckpt' holds 3 epochs, more than `trainer.max_epochs`, 1." in capsys.readouterr().err


@pytest.mark.parametrize("place", ["checkpoints", "csv/version_0/checkpoints", "mine"])
def test_the_latest_checkpoint_of_the_folder_is_the_last(
    place: str, policy_path: str, prompts_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    for iteration in (2, 3):
        progress = {"epoch_progress": {"current": {"processed": iteration}}}
        torch.save({"loops": {"fit_loop": progress}}, folder / f"epoch={iteration}.ckpt")
    os.utime(folder / "epoch=2.ckpt", (0, 0))
    saver = ["--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.dirpath={tmp_path / 'mine'}"]
    words = ["fit", *options(policy_path, prompts_path, tmp_path), "--ckpt_path=last", *saver]
    with pytest.raises(SystemExit):
        run_cli(words)
    assert f"{place}/epoch=3.ckpt' holds 3 epochs, more than `trainer.max_epochs`, 1." in capsys.readouterr().err
    (folder / "last.ckpt").symlink_to("epoch=3.ckpt")
    with pytest.raises(SystemExit):
        run_cli(words)
    assert f"{place}/last.ckpt' holds 3 epochs" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "predict"])
def test_without_a_checkpoint_the_last_one_is_not_judged(
    command: str, policy_path: str, prompts_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_cli([command, *options(policy_path, prompts_path, tmp_path), "--ckpt_path=last"])
    assert "error: `ckpt_path` 'last' finds no checkpoint;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("dta: {group_size: 8}", "--data.group_size"),
        ("data: {smpling: {top_k: 8}}", "--data.sampling.top_k"),
        ("group_size: 8", "--data.group_size"),
    ],
)
def test_a_misspelt_group_of_a_recipe_gets_advice(
    text: str, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SystemExit):
        run_cli(["fit", f"-c={tmp_path}/mine.yaml"])
    assert f"Did you mean `{known}`?\nOptions are listed by: python -m tlt_lightning fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("fit recipes/ray.yaml", "Did you mean `-c recipes/ray.yaml`?"),
        ("fit -c ray.yaml", "Did you mean `-c recipes/ray.yaml`?"),
        ("-c recipes/quickstart.yaml fit", "is not accepted before subcommand 'fit'"),
    ],
)
def test_a_file_in_another_place_gets_advice(
    words: str, advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        run_cli(words.split())
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize("run", [run_cli, run_drafter_cli])
def test_a_recipe_that_is_no_yaml_is_named(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, broken = tmp_path / "whole.yaml", tmp_path / "broken.yaml"
    whole.write_text("seed_everything: 1\n")
    broken.write_text("data:\n  group_size: [8\n")
    for arguments in (["fit", f"-c={whole}", f"-c={broken}"], [f"-c={broken}", "fit"]):
        with pytest.raises(SystemExit):
            run(arguments)
        assert f"error: '{broken}': Problems parsing config: while parsing" in capsys.readouterr().err


def test_a_path_and_functions_alone_are_prompts_and_rewards_as_in_python(policy_path: str, prompts_path: str) -> None:
    words = [f"--model.policy={policy_path}", "--model.objective=GRPO", "--data.engine=TransformersEngine"]
    words += [f"--data.train={prompts_path}", "--data.rewards=[tlt_lightning.rewards.exact_match]"]
    data = run_cli(words, run=False).datamodule
    assert (data.train.path, data.rewards[0].function) == (prompts_path, exact_match)


@pytest.mark.slow
@pytest.mark.parametrize("by_recipe", [True, False])
def test_an_objective_or_a_schedule_in_the_place_of_another_is_itself(
    by_recipe: bool, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    """And keeps what was set of the one before, if it has that, too."""
    recipe, words = tmp_path / "before.yaml", options(policy_path, prompts_path, tmp_path)
    networks = ["--model.critic={}", f"--model.reference={policy_path}"]
    recipe.write_text(
        "model: {objective: {class_path: GRPO, init_args: {entropy_coef: 0.5}}}\n"
        "data: {schedule: {class_path: PartialRollout, init_args: {}}}"
    )
    for made in (RLOO(), GSPO(), DrGRPO(), PPO(), Distillation()):
        objective, schedule = type(made).__name__, "AsyncRollout"
        overlay = tmp_path / f"{objective}.yaml"
        overlay.write_text(
            f"model: {{objective: {{class_path: {objective}}}}}\ndata: {{schedule: {{class_path: {schedule}}}}}"
        )
        chosen = (
            ["-c", str(overlay)] if by_recipe else [f"--model.objective={objective}", f"--data.schedule={schedule}"]
        )
        if by_recipe == (objective == "RLOO"):  # in the place of the default one
            assert run_cli([*words, *chosen, *networks], run=False).model.objective == made
        cli = run_cli([*words, "-c", str(recipe), *chosen, *networks], run=False)
        assert cli.model.objective == replace(made, entropy_coef=0.5)
        assert cli.datamodule.schedule.extra is None


@pytest.mark.parametrize("files", ["speculation ray", "ray speculation"])
def test_ray_hosts_the_engine_that_other_files_describe(
    files: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recipes = [f"-c=recipes/{name}.yaml" for name in ("quickstart", *files.split())]

    def engine(*words: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            run_cli(["fit", *recipes, *words, "--print_config"])
        return yaml.safe_load(capsys.readouterr().out)["data"]["engine"]

    ray = engine("--data.engine.engine.max_num_seqs=64")
    hosted = ray["init_args"]["engine"]
    assert (ray["class_path"], ray["init_args"]["num_engines"]) == ("tlt_lightning.RayEngine", 2)
    assert (hosted["class_path"], hosted["init_args"]["kv_cache_gib"]) == ("tlt_lightning.VLLMEngine", 0.5)
    assert (hosted["init_args"]["max_num_seqs"], hosted["init_args"]["speculation"]["siblings"]) == (64, True)
    alone = engine("--data.engine=VLLMEngine", "--data.engine.max_num_seqs=64")
    assert alone == hosted  # taken out of Ray again


def test_a_class_of_one_s_own_takes_the_place_of_the_package_s(
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my_run.py").write_text("""if True:
        from tlt_lightning import RLModule, RolloutDataModule

        class MyRL(RLModule):
            def __init__(self, *args, bonus: float = 0.5, **kwargs):
                super().__init__(*args, **kwargs)
                self.bonus = bonus

        class MyData(RolloutDataModule):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
        """)
    monkeypatch.syspath_prepend(tmp_path)
    words = options(policy_path, prompts_path, tmp_path)  # a recipe's among them
    cli = run_cli([*words, "--model", "my_run.MyRL", "--model.bonus=2", "--data=my_run.MyData"], run=False)
    assert (type(cli.model).__name__, cli.model.bonus, type(cli.datamodule).__name__) == ("MyRL", 2, "MyData")
    with pytest.raises(SystemExit, match=r"`--model`: `my_run` has no `MyR`\. Did you mean `MyRL`\?"):
        run_cli([*words, "--model", "my_run.MyR"], run=False)
    (tmp_path / "data.yaml").write_text("data: {class_path: my_run.MyData, init_args: {grop_size: 2}}")
    with pytest.raises(SystemExit):
        run_cli(["--config", str(tmp_path / "data.yaml")], run=False)
    assert "There is no `grop_size`. Did you mean `group_size`?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--data.group_size=1", "error: `data.group_size` 1 is too small for GRPO"),
        (
            '--data.rewards=[{"function": "builtins.max"}]',
            "error: Reward `max` scored none of the last 4 responses. The last error: TypeError: ",
        ),
        ("--trainer.max_steps=3", "error: `Trainer(max_steps=3)` counts optimizer steps"),
        ("--data.train.path=nowhere.jsonl", "error: `path` 'nowhere.jsonl' does not exist"),
        ("--data.max_prompt_tokens=0", "error: `max_prompt_tokens` must be at least 1, got 0."),
        ("--data.reward_timeout=0", "error: `reward_timeout` must be in (0, "),
        ("--data.train.chat_template=nope.jinja", "error: `chat_template` 'nope.jinja' does not exist (from "),
        ("--trainer.default_root_dir=pyproject.toml/below", "error: [Errno 20] Not a directory: "),
        ("--model.policy=my-polcy", "error: `model.policy` 'my-polcy' is no folder that `save_pretrained` wrote"),
        ("--model.policy=${nowhere}/policy", "error: `fit.model.policy` cannot be resolved: Interpolation key "),
        ("--model.policy=${trainer", "error: `fit.model.policy` cannot be resolved: "),
        ("--trainer.accelerator=gpus", "error: You selected an invalid accelerator name: `accelerator='gpus'`."),
        (
            '--trainer.callbacks+={"class_path": "EarlyStopping", "init_args": {"monitor": "reward/mena"}}',
            "error: Early stopping conditioned on metric `reward/mena` which is not available. Pass in",
        ),
        (
            "--trainer.logger=lightning.pytorch.loggers.WandbLogger",
            "Requirement 'wandb-nowhere' not met. HINT: Try running `pip install -U 'wandb-nowhere'`\n",
        ),
    ],
)
def test_an_error_of_the_user_ends_with_its_sentence(
    wrong: str,
    message: str,
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)  # `main` changes it
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb-nowhere"))
    monkeypatch.setattr(sys, "argv", ["tlt-lightning", "fit", *options(policy_path, prompts_path, tmp_path), wrong])
    with pytest.raises(SystemExit) as raised:
        main()
    said = capsys.readouterr().err
    assert raised.value.code == 2
    assert message in said
    assert "Traceback" not in said
    assert "TLT_TRACEBACK=1" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("package", "words", "sentence"),
    [
        (
            "speculators",
            ["drafter", "fit", "-c", "recipes/drafter_warmup.yaml"],
            "pip install 'tlt-lightning[eagle3]'.",
        ),
        (
            "reasoning_gym",
            ["fit", "-c", "recipes/grpo_qwen3-0.6b_1gpu.yaml"],
            "pip install 'tlt-lightning[tasks]'.",
        ),
    ],
)
def test_a_package_of_an_extra_that_is_not_installed_is_named_with_its_extra(
    package: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["tlt-lightning", *words, "--trainer.accelerator=cpu"])
    with pytest.raises(SystemExit) as raised:
        main()
    said = capsys.readouterr().err
    assert (raised.value.code, "Traceback" in said) == (2, False)
    assert sentence in said


def test_an_error_of_the_package_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> None:
        int("of a bug")

    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)
    monkeypatch.setattr("tlt_lightning.__main__._run", fail)
    with pytest.raises(ValueError, match="of a bug"):
        main()


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)
    monkeypatch.setattr("tlt_lightning.__main__._run", interrupt)
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 130
    assert capsys.readouterr().err == "error: interrupted by Ctrl-C\n"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "outputs"), "[Errno 13] Permission denied: 'outputs'"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "bug"), None),
    ],
)
def test_a_place_that_cannot_be_written_to_needs_no_traceback(error: OSError, sentence: str | None) -> None:
    assert sentence_of(error) == sentence
    checkpoint = RuntimeError("The checkpoint could not be written.")
    checkpoint.__cause__ = error
    assert sentence_of(checkpoint) == (sentence and str(checkpoint))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exprt"], "error: There is no command `exprt`. Did you mean `export`?\n"),
        (["test"], "error: There is no command `test`. Did you mean `validate`?\n"),
        (["trian"], "error: There is no command `trian`. Did you mean `fit`?\n"),
        (
            ["export", "--ckpt_path=nowhere.ckpt", "--output_dir=new"],
            "error: `ckpt_path` 'nowhere.ckpt' does not exist",
        ),
        (["recipes", "quickstart"], "error: unrecognized arguments: quickstart"),
        (["drafter", "fit"], "required: fit.model.target, fit.data.completions\n"),
        (["drafter", "predict"], "invalid choice: 'predict' (choose from 'fit', 'validate')\n"),
        (
            ["fit"],
            "error: the following arguments are required: fit.model.policy\n",
        ),
    ],
)
def test_a_wrong_command_ends_with_a_sentence_alone(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)  # `main` changes it
    monkeypatch.setattr(sys, "argv", ["tlt-lightning", *arguments])
    with pytest.raises(SystemExit) as raised, warnings.catch_warnings(record=True) as caught:
        main()
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
    assert [str(warning.message) for warning in caught] == []


def test_the_trainer_s_test_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_cli(["test"])
    assert "'fit', 'validate', 'predict'" in capsys.readouterr().err.replace("{fit,validate,predict}", "")


def test_options_that_resemble_nothing_get_no_advice() -> None:
    assert nearest("xyz", {"data.group_size"}) == []


def test_a_part_of_a_misspelt_option_is_advised_on_by_the_option() -> None:
    assert nearest("data.schedul.class_path", {"data.schedule", "data.engine"}) == ["data.schedule"]


def test_help_names_every_command_and_loads_nothing() -> None:
    code = "import sys; sys.argv[1:] = ['--help']; from tlt_lightning.__main__ import main; main();"
    code += "print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"{HELP}False\n"
    assert all(f"\n  {command} " in HELP for command in COMMANDS)


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)
    monkeypatch.setattr(sys, "argv", ["tlt-lightning", "--version"])
    main()
    assert capsys.readouterr().out == f"tlt-lightning {tlt_lightning.__version__}\n"


@pytest.mark.slow
def test_no_warning_of_kernels_or_leaks_comes_with_what_is_imported() -> None:
    pytest.importorskip("torchao")
    code = "import sys; sys.argv[1:] = ['fit', '--help']; from tlt_lightning.__main__ import main\n"
    code += "try: main()\nfinally: import torchao"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""


def test_the_script_finds_files_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("")
    code = f"import sys; sys.path = [{str(ROOT)!r}, *(path for path in sys.path if path)]; sys.argv[1:] = []; "
    code += "from tlt_lightning.__main__ import main; main(); import my_rewards"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=tmp_path)


def test_the_hubs_warnings_are_said_once() -> None:
    code = "import sys; sys.argv[1:] = ['--help']; from tlt_lightning.__main__ import main; main();"
    code += "from huggingface_hub.utils import logging; logging.get_logger('huggingface_hub.utils').warning('no hub')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == "no hub\n"


@pytest.mark.slow
def test_a_recipe_or_an_option_names_the_data_module(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    """What a run saves starts it again."""
    recipe = tmp_path / "texts.yaml"
    recipe.write_text(f"data: {{class_path: SupervisedDataModule, init_args: {{train: {{path: {prompts_path}}}}}}}")
    root = tmp_path / "first"
    common = ["--model.objective", "SFT", f"--model.policy={policy_path}", "--trainer.accelerator=cpu"]
    common += ["--trainer.max_epochs=1", "--data.batch_size=3"]
    run_cli(["fit", "-c", str(recipe), *common, f"--trainer.default_root_dir={root}"])
    again = run_cli(["fit", f"-c={root}/csv/version_0/config.yaml", f"--trainer.default_root_dir={tmp_path / 'again'}"])
    named = run_cli(["--data", "SupervisedDataModule", *common, f"--data.train.path={prompts_path}"], run=False)
    for cli in (again, named):
        assert isinstance(cli.datamodule, tlt_lightning.SupervisedDataModule)
        assert cli.datamodule.batch_size == 3
    assert again.trainer.global_step == 3
