"""`hotseat openrlhf-path`: OpenRLHF's commands under OpenRLHF's names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hotseat.cli.help_texts import EPILOGS
from hotseat.cli.main import main
from hotseat.openrlhf.shim import DIRECTORY, INSTEAD, SHIM

ROOT = Path(__file__).parents[2]
MODULES = ("train_ppo_ray", "train_sft", "train_rm", "train_dpo", "serve_rm", "batch_inference", "lora_combiner")


def python(*argv: str, path: tuple[Path, ...], cwd: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, (*path, ROOT)))}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300, env=env, cwd=cwd)


def make_package(folder: Path) -> Path:
    """Write a package of OpenRLHF's name, and return its file."""
    (folder / "openrlhf" / "cli").mkdir(parents=True)
    for name in ("__init__.py", "cli/__init__.py"):
        (folder / "openrlhf" / name).write_text("")
    return folder / "openrlhf" / "__init__.py"


def test_the_command_prints_a_directory_with_one_package(capsys):
    assert main(["openrlhf-path"]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert [path.parent.name for path in printed.glob("*/__init__.py")] == ["openrlhf"]


@pytest.mark.slow
def test_a_command_under_its_own_name_is_ours(tmp_path):
    argv = ("--pretrain", "m", "--use_wandb", "s3cret", "--print_config")
    theirs = python("-m", "openrlhf.cli.train_sft", *argv, path=(DIRECTORY,), cwd=tmp_path)
    assert (theirs.returncode, theirs.stderr) == (0, "")
    assert theirs.stdout.startswith("task: sft\n")


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_command_is_there_under_its_own_name(module, tmp_path):
    theirs = python("-m", f"openrlhf.cli.{module}", "--help", path=(DIRECTORY,), cwd=tmp_path)
    assert (theirs.returncode, theirs.stderr) == (0, "")
    assert module in theirs.stdout.splitlines()[0]


def test_beside_openrlhf_itself_a_command_is_refused(tmp_path):
    real = make_package(tmp_path / "site")
    done = python("-m", "openrlhf.cli.train_sft", "--help", path=(DIRECTORY, tmp_path / "site"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert f"OpenRLHF itself can be imported too, from {real}: uninstall it" in line
    assert f"take {DIRECTORY} out of PYTHONPATH" in line


def test_an_import_beside_openrlhf_itself_is_an_import_error(tmp_path, monkeypatch):
    real = make_package(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(DIRECTORY))
    with pytest.raises(ImportError, match=f"from {real}"):
        import openrlhf  # noqa: F401
    assert "openrlhf" not in sys.modules


def test_an_openrlhf_in_editable_mode_is_found(tmp_path, monkeypatch):
    import importlib.util

    real = make_package(tmp_path)

    class Finder:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return importlib.util.spec_from_file_location(name, real) if name == "openrlhf" else None

    assert SHIM.find_another() is None
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert SHIM.find_another() == str(real)


def test_a_folder_of_that_name_is_not_openrlhf(tmp_path, monkeypatch):
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "openrlhf" / "train.sh").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(DIRECTORY), *sys.path])
    assert SHIM.find_another() is None


@pytest.mark.slow
@pytest.mark.parametrize("module", INSTEAD)
def test_a_command_that_is_not_here_says_what_to_use_instead(module, tmp_path):
    done = python("-m", f"openrlhf.cli.{module}", "--pretrain", "m", path=(DIRECTORY,), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line == f"openrlhf.cli.{module}: {INSTEAD[module]}"
    for name in re.findall(r"`openrlhf\.cli\.(\w+)`", line):  # what it names is there
        assert name in MODULES
    for page in re.findall(r"docs/[\w-]+\.md", line):
        assert (ROOT / page).is_file()


@pytest.mark.parametrize("before", ["/mine", ""])
def test_the_documented_export_keeps_a_path_that_is_set(before):
    texts = [EPILOGS["openrlhf-path"], *(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])]
    exports = {line for text in texts for line in re.findall(r"export PYTHONPATH=\$\([^)]*\)[^\s`]*", text)}
    assert exports
    for export in exports:
        script = f'hotseat() {{ echo /shim; }}; {export}; printf %s "$PYTHONPATH"'
        env = {"PATH": os.environ["PATH"]} | ({"PYTHONPATH": before} if before else {})
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, timeout=60)
        assert done.stdout == ("/shim:/mine" if before else "/shim")
