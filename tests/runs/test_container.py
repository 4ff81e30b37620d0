"""The image for CPUs, built and run by buildah, which needs no daemon.

Skipped where there is no buildah or no base image. One that serves where no registry can be reached:

    mmdebstrap --variant=minbase --include=python3-venv,python-is-python3,ca-certificates bookworm base.tar
    container=$(buildah --storage-driver vfs from scratch)
    buildah --storage-driver vfs add $container base.tar /
    buildah --storage-driver vfs commit --rm $container docker.io/library/python:3.11-slim
"""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[2]
BASE, PYTHON = "docker.io/library/python:3.11-slim", (3, 11)
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def call(*command: str | Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout.strip()


def buildah(*arguments: str | Path) -> str:
    return call("buildah", "--storage-driver", "vfs", *arguments)


def has_base() -> bool:
    command = ("buildah", "--storage-driver", "vfs", "inspect", "--type", "image", BASE)
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def container(tmp_path: Path) -> Iterator[str]:
    """A container of the image. Packages come from this machine's pip, which may know other indices."""
    if not shutil.which("buildah"):
        pytest.skip("no buildah here")
    if not has_base():
        pytest.skip(f"no image {BASE} here: see the head of this file")
    if sys.version_info[:2] != PYTHON:
        pytest.skip("packages are downloaded by this Python for the image's, which is 3.11")
    wheels = ("pip", "download", "--quiet", "--constraint", ROOT / "constraints.txt", "--dest", tmp_path)
    call(sys.executable, "-m", *wheels, "setuptools>=77", *DEPENDENCIES)
    image = f"hotseat-test:{tmp_path.name.replace('_', '-')}"
    offline = (
        "--build-arg",
        "PIP_NO_INDEX=1",
        "--build-arg",
        "PIP_FIND_LINKS=/wheels",
        "--volume",
        f"{tmp_path}:/wheels:ro",
    )
    recipe = ("--file", ROOT / "docker" / "Dockerfile.cpu", "--tag", image)
    buildah("bud", "--isolation", "chroot", "--pull-never", *offline, *recipe, ROOT)
    name = buildah("from", "--pull-never", image)
    yield name
    buildah("rm", name)
    buildah("rmi", image)


def test_the_image_for_cpus_makes_a_task_and_trains(container):
    def run(*command: str) -> str:
        return buildah("run", "--isolation", "chroot", container, "--", *command)

    assert run("id", "--user", "--name") == "hotseat"
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    assert config["Entrypoint"] == ["hotseat"]
    assert config["WorkingDir"] == run("pwd") == "/work"

    run("hotseat", "new", "rl")
    run("hotseat", "run", "rl.yaml", "data.max_samples=32", "train.num_episodes=1", "cluster.runtime=local", "name=two")
    records = [json.loads(line) for line in run("cat", "runs/two/metrics.jsonl").splitlines()]
    assert [record["step"] for record in records if "reward" in record] == [1, 2]
    run("test", "-f", "runs/two/model/model.safetensors")
