"""A Ray cluster as scripts start it, on loopback and with a token: `ray start --head`, and a second node on request."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from environments import own_environment

from hotseat.cluster.ports import free_port
from hotseat.processes.supervisor import end_marked

MARK = "HOTSEAT_TEST_HEAD"
SECOND = Path(__file__).with_name("second_raylet.py")


@dataclass(frozen=True)
class Head:
    """A cluster: where jobs are submitted, the environment of commands, and its processes."""

    address: str  # of the dashboard
    gcs_address: str
    folder: Path  # in which jobs run that have no working_dir
    env: dict[str, str]
    second: subprocess.Popen | None = None


def _started(command: list[str], env: dict[str, str], folder: Path) -> subprocess.Popen:
    """Start a head. Ray gives its raylet 30 s to begin, which a busy machine may not keep to: then it starts again."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    for is_last in (False, False, True):
        head, lines = subprocess.Popen(command, env=env, cwd=folder, **pipes), []
        for line in head.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                return head
        _end(head)
        end_marked(MARK, [env[MARK]])
        assert lines, "ray start printed nothing"
        assert "timed out during startup" in "".join(lines), "".join(lines)
        assert not is_last, "".join(lines)
    raise AssertionError


@contextlib.contextmanager
def ray_head(folder: Path, num_gpus: int, num_gpus_of_second: int = 0, **variables: str) -> Iterator[Head]:
    """Start `ray start --head` in a folder. variables: more environment, of the cluster and of commands."""
    with tempfile.TemporaryDirectory(prefix="hs-") as directory:
        port, dashboard = free_port("127.0.0.1"), free_port("127.0.0.1")
        env = script_environment() | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": directory,
            "RAY_USAGE_STATS_ENABLED": "0",
            MARK: directory,
            **variables,
        }
        command = [
            *("ray", "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--num-gpus", str(num_gpus)),
            *(f"--port={port}", f"--temp-dir={directory}", "--node-name=first", "--num-cpus=2"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *("--object-store-memory=200000000", "--min-worker-port=0", "--max-worker-port=0"),
            *("--dashboard-agent-listen-port=0", f"--ray-client-server-port={free_port('127.0.0.1')}", "--no-monitor"),
        ]
        head = _started(command, env, folder)
        try:
            started = Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", folder, env)
            if num_gpus_of_second:
                with add_node(started, num_gpus_of_second) as second:
                    yield replace(started, second=second)
            else:
                yield started
        finally:
            _end(head)
            end_marked(MARK, [directory])


@contextlib.contextmanager
def add_node(head: Head, num_gpus: int) -> Iterator[subprocess.Popen]:
    """Start another node of the cluster, with a temporary directory of its own, as on another machine."""
    with tempfile.TemporaryDirectory(prefix="hs-") as directory:
        node = subprocess.Popen(
            [sys.executable, str(SECOND), head.gcs_address, str(num_gpus), directory],
            env=head.env,
            cwd=head.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert node.stdout.readline() == "up\n"
            yield node
        finally:
            _end(node)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)


def script_environment() -> dict[str, str]:
    """Return the environment of scripts: our Python and its commands come first, and no hub is asked."""
    env = own_environment("WANDB_")
    here = str(Path(sys.executable).parent)
    return env | {"PATH": f"{here}:{env['PATH']}", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
