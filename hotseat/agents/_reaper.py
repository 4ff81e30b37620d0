"""Ends what the programs of an agent host started and removes their folders, also after the host was killed.

Every program of a host has `HOTSEAT_EPISODE=HOST.NUMBER` in its environment, which what it starts inherits. Run as a
program, this file waits for one process to end, by whatever cause; then it ends what is left of its programs, removes
their containers, control groups and folder, and ends itself. It needs only the standard library and Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MARK = "HOTSEAT_EPISODE"
HOST_LABEL, EPISODE_LABEL = "hotseat.host", "hotseat.episode"
# Where an engine of containers keeps them, beside HOME: a program's must be the one by which they are removed.
CONTAINER_ENV = ("XDG_DATA_HOME", "XDG_RUNTIME_DIR", "CONTAINERS_STORAGE_CONF", "CONTAINER_HOST", "DOCKER_HOST")

_SWEEP_S = 5.0
_CONTAINERS_S = 60.0


def end_marked(is_meant: Callable[[str], bool]) -> None:
    """Kill processes by the value of their mark until none is found twice: a fork may be under way."""
    deadline = time.monotonic() + _SWEEP_S
    num_clean = 0
    while num_clean < 2 and time.monotonic() < deadline:
        alive = [pid for pid in _pids() if _is_marked(pid, is_meant)]
        num_clean = 0 if alive else num_clean + 1
        for pid in alive:
            _kill(pid, is_meant)
        if alive:
            time.sleep(0.01)


def _pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _is_marked(pid: int, is_meant: Callable[[str], bool]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
        with open(f"/proc/{pid}/stat", "rb") as file:
            is_alive = file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
    prefix = f"{MARK}=".encode()
    values = (entry[len(prefix) :].decode(errors="replace") for entry in entries if entry.startswith(prefix))
    return is_alive and any(map(is_meant, values))


def _kill(pid: int, is_meant: Callable[[str], bool]) -> None:
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            # The number may have passed to another process since it was listed; the handle cannot.
            if _is_marked(pid, is_meant):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def end_group(group: Path) -> None:
    """Kill everything in a control group (version 2) and remove it."""
    deadline = time.monotonic() + _SWEEP_S
    while group.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            kill = os.open(group / "cgroup.kill", os.O_WRONLY)
            try:
                os.write(kill, b"1")
            finally:
                os.close(kill)
        for inner in [path for path in group.iterdir() if path.is_dir()]:  # made by the program
            end_group(inner)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)


def remove_containers(engine: str, label: str) -> None:
    """Remove the containers that carry a label, running or not. engine: podman, or another with its commands."""
    listed = subprocess.run(
        [engine, "ps", "--all", "--quiet", "--filter", f"label={label}"],
        capture_output=True, text=True, timeout=_CONTAINERS_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if listed.returncode != 0:
        raise RuntimeError(f"{engine} ps: {listed.stderr.strip()[-400:]}")
    names = listed.stdout.split()
    if names:
        removed = subprocess.run(
            [engine, "rm", "--force", "--volumes", *names],
            capture_output=True, text=True, timeout=_CONTAINERS_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if removed.returncode != 0:
            raise RuntimeError(f"{engine} rm: {removed.stderr.strip()[-400:]}")


def remove_folder(folder: Path) -> None:
    """Remove a folder with everything in it, whatever its permissions are. Links are not followed."""

    def unlock(path: str) -> None:
        with contextlib.suppress(OSError):
            if not stat.S_ISLNK(os.lstat(path).st_mode):
                os.chmod(path, 0o700)

    unlock(str(folder))
    for parent, names, _ in os.walk(folder):  # from the top: what is below can be listed only then
        for name in names:
            unlock(os.path.join(parent, name))
    shutil.rmtree(folder, ignore_errors=True)


# --- the supervisor ---------------------------------------------------------------------------------------------------


def start(task: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a supervisor of this process. task: host, folder, groups (a folder or None), containers (or None)."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), json.dumps({**task, "pid": os.getpid()})],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("PATH", "HOME", *CONTAINER_ENV) if name in os.environ},
        cwd="/",
        start_new_session=True,  # Ctrl-C in the terminal is for the host
    )


def dismiss(supervisor: subprocess.Popen[bytes]) -> None:
    """End a supervisor whose host has cleaned up itself."""
    assert supervisor.stdin is not None
    with contextlib.suppress(OSError):
        supervisor.stdin.write(b"-")
        supervisor.stdin.close()
    try:
        supervisor.wait(3.0)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait(3.0)


def clean_up(task: dict[str, Any]) -> None:
    """End all programs of a host, and remove what they left."""
    host = task["host"]
    end_marked(lambda value: value.partition(".")[0] == host)
    if task.get("groups"):
        for group in Path(task["groups"]).glob(f"hotseat-{host}-*"):
            end_group(group)
    remove_folder(Path(task["folder"]))
    if task.get("containers"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired, RuntimeError):  # nobody is left to be told
            remove_containers(task["containers"], f"{HOST_LABEL}={host}")


def _supervise(task: dict[str, Any]) -> None:
    _unmark()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid = task["pid"]
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        handle = None
    if handle is None or os.getppid() != pid:  # it ended before we could look
        clean_up(task)
        return
    watched = [handle, 0]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if 0 in readable:
            if os.read(0, 1) == b"-":
                return
            watched.remove(0)  # closed without a word: a fork of the host may hold the pipe, so the handle decides
        if handle in readable:
            clean_up(task)
            return


def _unmark() -> None:
    """Take off the number by which a run finds its processes: whoever ends them must not end this one first."""
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_RTTIME)
        resource.setrlimit(resource.RLIMIT_RTTIME, (-1, most))


if __name__ == "__main__":
    _supervise(json.loads(sys.argv[1]))
