"""The command itself: what it prints, what it starts, what it refuses, and with which exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from verl_cases import gsm8k_row, write_gsm8k, write_parquet

from hotseat.cli.help_texts import EPILOGS
from hotseat.cli.main import main as hotseat
from hotseat.config import loads
from hotseat.errors import DataError, RunError
from hotseat.verl.shim import DIRECTORY
from hotseat.verl.verl_command import main

ROOT = Path(__file__).parents[2]
GRPO = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=hf", "algorithm.adv_estimator=grpo"]
GRPO += ["actor_rollout_ref.rollout.n=2", "trainer.logger=console"]


class Starter:
    """Stands in for what starts a run."""

    def __init__(self, error=None):
        self.configs = []
        self.error = error

    def __call__(self, config):
        self.configs.append(config)
        if self.error:
            raise self.error


def go(*argv, error=None):
    starter = Starter(error)
    return main([*GRPO, *argv], {}, starter), starter.configs


def test_a_complete_command_starts_the_run_that_its_config_describes(capsys):
    code, [config] = go()
    assert code == 0
    assert go("--print_config") == (0, [])
    assert loads(capsys.readouterr().out) == config


def test_keys_without_effect_are_listed_once_on_stderr(capsys):
    assert go("trainer.balance_batch=True", "trainer.nnodes=2", "trainer.nnodes=1")[0] == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "no effect here: trainer.nnodes=2 because trainer.nnodes comes later\n"
        "no effect here: trainer.balance_batch because batches are divided over ranks by their tokens where"
        " micro-batches are cut by tokens\n"
    )


def test_what_is_wrong_is_refused_by_name(capsys):
    assert go("trainer.nodes=2", "data.trian_files=x") == (2, [])
    said = capsys.readouterr().err
    assert "trainer.nodes: unknown key; did you mean trainer.nnodes?" in said
    assert "data.trian_files: unknown key; did you mean data.train_files?" in said


def test_a_run_without_what_it_needs_is_refused_by_key(capsys):
    assert main([], {}, Starter()) == 2
    said = capsys.readouterr().err
    assert said.startswith("main_ppo: this run cannot start:\n")
    for name in ("actor_rollout_ref.model.path", "actor_rollout_ref.rollout.name", "critic.model.path"):
        assert f"\n  {name}: not set" in said


@pytest.mark.parametrize(("error", "code"), [(DataError("data.path x"), 2), (RunError("rank 1 is silent"), 1)])
def test_what_ends_a_run_decides_the_exit_code_and_is_said_in_keys(error, code, capsys):
    assert go(error=error)[0] == code
    assert capsys.readouterr().err == f"main_ppo: {str(error).replace('data.path', 'data.train_files')}\n"


def test_data_of_other_sources_needs_a_function(tmp_path, capsys):
    train = write_gsm8k(tmp_path, "train", 4)
    row = gsm8k_row("What?", 1, "test", 0)
    test = write_parquet(tmp_path / "math.parquet", [row, row | {"data_source": "lighteval/MATH"}])
    files = [f"data.train_files={train}", f"data.val_files=[{train},{test}]"]
    assert go(*files) == (2, [])
    said = capsys.readouterr().err
    assert "data.val_files: given" in said
    assert "with data_source lighteval/MATH: without reward.custom_reward_function.path only openai/gsm8k" in said
    assert "data.train_files" not in said
    assert said.count("math.parquet") == 1
    assert go(*files, "--print_config")[0] == 0
    code, configs = go(*files, "reward.custom_reward_function.path=r.py")
    assert (code, len(configs)) == (0, 1)


def test_rows_without_a_source_need_a_function(tmp_path, capsys):
    train = write_parquet(tmp_path / "train.parquet", [{"prompt": "a"}])
    lines = tmp_path / "test.jsonl"
    lines.write_text('{"prompt": "a", "data_source": "mine"}\n')
    assert go(f"data.train_files={train}", f"data.val_files={lines}") == (2, [])
    said = capsys.readouterr().err
    assert "with data_source (none): without" in said
    assert "with data_source mine: without" in said


def test_images_under_verls_default_name_are_not_taken_for_text(tmp_path, capsys):
    row = gsm8k_row("<image>What?", 1, "train", 0) | {"images": []}
    train = write_parquet(tmp_path / "train.parquet", [row | {"images": ["a.png"]}])
    files = [f"data.train_files={train}", "trainer.val_before_train=False"]
    assert go(*files) == (2, [])
    assert f"data.image_key: not given, and {train} has a column images: give" in capsys.readouterr().err
    for key in ("images", "null"):
        assert len(go(*files, f"data.image_key={key}")[1]) == 1


def test_help_shows_an_example_and_starts_nothing(capsys):
    assert go("--help") == (0, [])
    assert capsys.readouterr().out.startswith("usage: python -m hotseat.cli.main_ppo KEY=VALUE ...")


# --- under verl's own name --------------------------------------------------------------------------------------------


def python(*argv: str, path: tuple[Path, ...], cwd: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, (*path, ROOT)))}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300, env=env, cwd=cwd)


def make_package(folder: Path) -> Path:
    """Write a package of verl's name, and return its file."""
    (folder / "verl").mkdir(parents=True)
    (folder / "verl" / "__init__.py").write_text("")
    return folder / "verl" / "__init__.py"


def test_the_command_prints_a_directory_with_one_package(capsys):
    assert hotseat(["verl-path"]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert [path.parent.name for path in printed.glob("*/__init__.py")] == ["verl"]
    assert "verl-path" in EPILOGS


@pytest.mark.slow
def test_the_command_under_its_own_name_is_ours(tmp_path):
    (tmp_path / "verl" / "utils").mkdir(parents=True)  # a folder without a package, such as one with reward files
    theirs = python("-m", "verl.trainer.main_ppo", *GRPO, "--print_config", path=(DIRECTORY,), cwd=tmp_path)
    assert (theirs.returncode, theirs.stderr) == (0, "")
    assert theirs.stdout.startswith("cluster:\n")


def test_beside_verl_itself_the_command_is_refused(tmp_path):
    real = make_package(tmp_path / "site")
    done = python("-m", "verl.trainer.main_ppo", "--help", path=(DIRECTORY, tmp_path / "site"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert f"verl itself can be imported too, from {real}: uninstall it" in line
