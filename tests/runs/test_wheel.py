"""The wheel, installed elsewhere: it has every file of the package, and its command runs outside the checkout."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from environments import own_environment

import hotseat
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def call(*command: str | Path, folder: Path) -> str:
    """Return the standard output of a command that must succeed and that finds no modules through this process."""
    env = own_environment("PYTHON", "PYTEST", "VIRTUAL_ENV")
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def tracked_files() -> list[str]:
    return call("git", "ls-files", "-z", folder=ROOT).rstrip("\0").split("\0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked files alone: what lies in this checkout without being committed is not in it."""
    folder = tmp_path_factory.mktemp("build")
    for name in tracked_files():
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    call(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", "wheel", "./source", folder=folder)
    [path] = (folder / "wheel").iterdir()
    return path


def installed_file(venv: Path, folder: Path) -> Path:
    return Path(call(venv / "bin" / "python", "-c", "import hotseat; print(hotseat.__file__)", folder=folder).strip())


def test_the_wheel_has_the_files_of_the_package_and_no_others(wheel):
    assert wheel.name == f"hotseat-{hotseat.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = f"hotseat-{hotseat.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(metadata)} == {
        name for name in tracked_files() if name.startswith("hotseat/")
    }
    assert f"{metadata}licenses/LICENSE" in names


@pytest.mark.long
def test_the_installed_command_makes_a_task_and_trains_outside_the_checkout(wheel, tmp_path):
    venv, folder = tmp_path / "venv", tmp_path / "elsewhere"
    folder.mkdir()
    call(sys.executable, "-m", "venv", "--without-pip", venv, folder=folder)
    install = ("install", "--no-deps", "--no-index", wheel)
    call(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", *install, folder=folder)
    # Only now: pip must not meet the hotseat of this environment. The .pth files in the added folder have no effect.
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    command = venv / "bin" / "hotseat"
    call(command, "new", "rl", "first", folder=folder)
    two_steps = ("data.max_samples=32", "train.num_episodes=1", "cluster.runtime=local", "name=two")
    call(command, "run", "rl.yaml", *two_steps, folder=folder / "first")

    assert installed_file(venv, folder) == packages / "hotseat" / "__init__.py"
    run = folder / "first" / "runs" / "two"
    assert [record["step"] for record in read_lines(run / "metrics.jsonl") if "reward" in record] == [1, 2]
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(2400)
def test_the_wheel_brings_all_that_the_demo_needs(wheel, tmp_path):
    """Into an empty environment, with dependencies from a package index."""
    venv, folder = tmp_path / "venv", tmp_path / "elsewhere"
    folder.mkdir()
    call(sys.executable, "-m", "venv", venv, folder=folder)
    install = ("install", "--constraint", ROOT / "constraints.txt", wheel)
    call(venv / "bin" / "python", "-m", "pip", *install, folder=folder)
    call(venv / "bin" / "hotseat", "demo", folder=folder)

    assert installed_file(venv, folder).is_relative_to(venv)
    records = read_lines(folder / "runs" / "demo" / "grpo" / "metrics.jsonl")
    curve = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert curve[0] <= 0.5
    assert curve[-1] >= 0.9
    assert (folder / "runs" / "demo" / "grpo" / "model" / "model.safetensors").is_file()
