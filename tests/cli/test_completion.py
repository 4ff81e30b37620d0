"""`hotseat completion`: the scripts, each in its shell where the shell is installed."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hotseat.cli.completion import SHELLS, keys, script
from hotseat.cli.main import main, make_parser
from hotseat.config.load import valid_keys

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_hotseat 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        (folder / shell).write_text(script(shell))
    return folder


@pytest.fixture
def complete(scripts, tmp_path):
    """Completes words in bash, in a folder with a config, another file and a run."""
    (tmp_path / "my first.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "runs" / "rl-1").mkdir(parents=True)

    def ask(*words: str) -> list[str]:
        command = ["bash", "--norc", "-c", ASK, "bash", str(scripts / "bash"), "hotseat", *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout.split("\n")[:-1]

    return ask


def test_a_shell_is_asked_for_and_its_script_printed(capsys):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.strip().endswith("-F _shtab_hotseat hotseat")
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_every_command_and_option_and_key_is_in_every_script(scripts):
    for shell in SHELLS:
        words = set(re.findall(r"[\w.-]+", (scripts / shell).read_text()))
        commands = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
        for name, command in commands.choices.items():
            assert name in words
            options = {option for action in command._actions for option in action.option_strings}
            assert all(option in words or option.lstrip("-") in words for option in options), (shell, options)
        assert set(valid_keys()) <= words


def test_bash_completes_commands_and_their_options(complete):
    assert complete("re") == ["resume", "replay", "report"]
    assert complete("plan", "--in") == ["--inventory"]
    assert complete("new", "") == ["rl", "ppo", "sft", "rm", "dpo"]
    assert complete("completion", "f") == ["fish"]


def test_bash_completes_files_by_what_an_argument_is(complete):
    assert complete("run", "") == ["my first.yaml", "runs"]
    assert complete("resume", "runs/") == ["runs/rl-1"]
    assert complete("plan", "--inventory", "2x8", "m") == ["my first.yaml"]
    assert complete("report", "--output", "n") == ["notes.txt"]
    assert complete("report", "runs/rl-1", "ru") == ["runs"]


def test_bash_completes_keys_and_the_words_that_they_take(complete):
    assert complete("run", "my.yaml", "rollout.top") == ["rollout.top_p=", "rollout.top_k="]
    assert complete("run", "my.yaml", "--", "seed") == ["seed="]
    assert complete("run", "my.yaml", "rollout.engine", "=") == ["transformers", "vllm", "numeric"]
    assert complete("run", "my.yaml", "rollout.engine", "=", "v") == ["vllm"]
    assert complete("resume", "runs/rl-1", "log.wandb.enabled", "=", "t") == ["true"]
    assert complete("options", "log.wandb.o") == ["log.wandb.org"]


def test_keys_have_the_words_that_the_tree_has():
    known = keys()
    assert known["rollout.engine"] == ("transformers", "vllm", "numeric")
    assert known["train.compile"] == ("true", "false")
    assert known["train.micro_batch_size"] == ("auto",)
    assert known["seed"] == ()


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_can_read_their_script(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    result = subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")


def test_fish_completes(scripts):
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    asked = f"source {scripts / 'fish'}; complete -C 'hotseat run x.yaml rollout.engine='"
    result = subprocess.run(
        ["fish", "--no-config", "-c", asked], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent
    )
    words = [line.split("\t")[0] for line in result.stdout.splitlines()]  # without their descriptions
    assert words == ["rollout.engine=transformers", "rollout.engine=vllm"]
