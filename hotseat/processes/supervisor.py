"""Ends what a process leaves behind when it dies: marks of our processes, and a small process that ends them.

Processes are found by a mark in their environment, which what they start inherits: `SESSION=ID` for all of a run,
`WORKER=ID` for one rank, `EPISODE=ID` for what an agent's programs started, `TRACKER=ID` for a tracker and what it
started. Ids nest with "/", so a session that a worker starts inside another one is ended with the outer one. But a
process that gives itself a title, as Ray's and vLLM's do, overwrites what others can read of its environment. Sessions
and workers have a second mark, a number in the soft limit of realtime CPU time (RLIMIT_RTTIME): everybody inherits it,
everybody can read it, and at seventy thousand years it limits nobody.

Run as a program, this file is the supervisor: it waits for one process to end, by whatever cause, then carries out its
`Remains`: it ends what is left of the marked processes, removes what they made, and ends itself. It needs only the
standard library and Linux; elsewhere `start_supervisor` returns None, and Ray's own reaper has to do.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

SESSION = "HOTSEAT_SESSION"
WORKER = "HOTSEAT_WORKER"
EPISODE = "HOTSEAT_EPISODE"
TRACKER = "HOTSEAT_TRACKER"
SHM_PREFIX = "HOTSEAT_SHM_PREFIX"
# Where an engine of containers keeps them, beside HOME: a program's must be the one by which they are removed.
CONTAINER_ENV = ("XDG_DATA_HOME", "XDG_RUNTIME_DIR", "CONTAINERS_STORAGE_CONF", "CONTAINER_HOST", "DOCKER_HOST")

# Files with this process's control group, and with where control groups are.
OWN_GROUP, MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")
# They remove the segments of those who used them once these are gone, so they go last.
_HELPERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_HELPERS_GRACE_S = 3.0
_CONTAINERS_S = 60.0


def in_worker_process() -> bool:
    """Tell whether this process carries the object of one rank of a group, and nothing else."""
    return bool(os.environ.get(WORKER))


def capabilities() -> int:
    """Return the effective capabilities of this process, a bit for each."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None: no such process. With the pid it names one."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def process_state(pid: int, started: int | None = None) -> str:
    """Return "gone", "stopped" or "running"; a process that ended and waits to be collected is gone."""
    if not os.path.isdir("/proc/self"):
        return _state_by_signal(pid)
    stat = _stat(pid)
    if stat is None or stat[0] in (b"Z", b"X") or (started is not None and int(stat[19]) != started):
        return "gone"
    return "stopped" if stat[0] in (b"T", b"t") else "running"


def _state_by_signal(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "running"


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on: the name before it may contain anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def mark_this_process(session: str, worker: str = "") -> int:
    """Set the number by which this process and what it starts are found. Returns the one before, for `remark`."""
    return remark_this_process(_number(session, worker))


def remark_this_process(number: int) -> int:
    """Set the number; -1 is none."""
    try:
        import resource

        before, most = resource.getrlimit(resource.RLIMIT_RTTIME)
        resource.setrlimit(resource.RLIMIT_RTTIME, (number, most))
    except (ImportError, AttributeError, ValueError, OSError):
        return -1  # not this system, or somebody set a lower limit: the environment has to do
    return before


def _number(session: str, worker: str = "") -> int:
    """Compute the number of a process, half of the session and half of the worker; 0 is none."""
    name = session.rpartition("/")[2]
    high = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") % (1 << 30) + (1 << 30)
    low = int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=4).digest(), "big") >> 1 if worker else 0
    return high << 31 | low


def _number_of_process(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            for line in file:
                if line.startswith(b"Max realtime timeout"):
                    soft = line.split()[-3]
                    return int(soft) if soft.isdigit() else None
    except OSError:
        pass
    return None


def marked(variable: str, values: Iterable[str], pids: Iterable[int] | None = None) -> list[int]:
    """Return live processes of this user that carry one of these values of `SESSION` or `WORKER`.

    Any other variable is looked for in environments only.
    """
    if not os.path.isdir("/proc/self"):
        return []
    if pids is None:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    values = list(values)
    prefix, encoded = f"{variable}=".encode(), {value.encode() for value in values}
    if variable == SESSION:
        shift, numbers = 31, {_number(value) >> 31 for value in values}
    else:
        shift, numbers = 0, {_number(value.partition(":")[0], value) for value in values if variable == WORKER}
    live = []
    for pid in pids:
        if pid == os.getpid() or process_state(pid) == "gone":
            continue
        number = _number_of_process(pid) if numbers else None
        if (number is not None and number >> shift in numbers) or _has_variable(pid, prefix, encoded):
            live.append(pid)
    return live


def _has_variable(pid: int, prefix: bytes, values: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read().split(b"\0")
    except OSError:
        return False
    entries = (entry[len(prefix) :] for entry in environment if entry.startswith(prefix))
    return any(not values.isdisjoint(entry.split(b"/")) for entry in entries)


def end_marked(variable: str, values: Iterable[str], *, timeout_s: float = 8.0, spare: Iterable[int] = ()) -> list[int]:
    """Kill what `marked` finds until it finds nothing twice (a fork may be under way). Returns the pids it killed.

    An agent's programs get no grace, whatever they call themselves, and no pause: this happens after every episode.
    Neither do trackers.
    """
    is_ours = variable not in (EPISODE, TRACKER)
    values, spared, killed, clean = list(values), set(spare), [], 0
    begin = alone_since = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        left = [pid for pid in marked(variable, values) if pid not in spared]
        clean = clean + 1 if not left else 0
        if clean == 2:
            break
        helpers = {pid for pid in left if is_ours and _is_helper(pid)}
        if len(helpers) < len(left):
            alone_since = time.monotonic()
        for pid in left:
            if pid in helpers and time.monotonic() - alone_since < _HELPERS_GRACE_S:
                continue
            if _kill(pid, variable, values) and pid not in killed:
                killed.append(pid)
        if left or is_ours:
            time.sleep(0.05 if is_ours else 0.01)
    return killed


def _is_helper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return any(helper in command for helper in _HELPERS)


def _kill(pid: int, variable: str, values: list[str]) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The number may have passed to another process since it was listed; the handle cannot.
        if not marked(variable, values, [pid]):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def remove_segments(prefix: str, pids: Iterable[int] = ()) -> None:
    """Remove the shared-memory segments that start with `prefix`, and those which torch made for these pids."""
    if not prefix:
        return
    for pattern in (f"{glob.escape(prefix)}*", *(f"torch_{pid}_*" for pid in pids)):
        for path in glob.glob(f"/dev/shm/{pattern}"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def own_group(own: Path = OWN_GROUP, mounts: Path = MOUNTS) -> tuple[Path, Path] | str:
    """Return the folder of this process's control group (version 2), and its mount point; a text if there is none."""
    try:
        groups = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        lines = [line.partition(" - ") for line in mounts.read_text().splitlines()]
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    mounted = [Path(before.split()[4]) for before, _, after in lines if after.split()[:1] == ["cgroup2"]]
    if not groups or not mounted:
        return "this machine has no control groups of version 2"
    group = mounted[0] / groups[0].strip("/")
    if ".." in group.parts or not group.is_dir():
        return "the control group of this process is not visible here"
    return group, mounted[0]


def end_group(group: Path, timeout_s: float = 5.0) -> OSError | None:
    """Kill everything in a control group (version 2) and remove it; return why it could not be removed."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):  # before Linux 5.14 there is no such file
            kill = os.open(group / "cgroup.kill", os.O_WRONLY)
            try:
                os.write(kill, b"1")
            finally:
                os.close(kill)
        with contextlib.suppress(OSError):
            for inner in [path for path in group.iterdir() if path.is_dir()]:  # made by the program
                end_group(inner)
        try:
            group.rmdir()
            return None
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() >= deadline:
                return error
        time.sleep(0.002)  # its last process is about to be gone


def remove_containers(engine: str, label: str) -> None:
    """Remove the containers that carry a label, running or not. engine: podman, or another with its commands."""
    names = _engine(engine, "ps", "--all", "--quiet", "--filter", f"label={label}").split()
    if names:
        _engine(engine, "rm", "--force", "--volumes", *names)


def _engine(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_CONTAINERS_S, stdin=subprocess.DEVNULL)
    if ran.returncode != 0:
        raise RuntimeError(f"{command[0]} {command[1]}: {ran.stderr.strip()[-400:]}")
    return ran.stdout


def remove_folder(folder: str | Path) -> None:
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


class Remains(TypedDict, total=False):
    """Remains of a process, to clean up after it.

    mark: variable and value of its processes. groups: folder and pattern of control groups. containers: engine, label.
    kept: file, its content and seconds: nothing is cleaned up for so long, nor at all once the file has other content.
    """

    mark: tuple[str, str]
    shm_prefix: str
    folders: list[str]
    groups: tuple[str, str] | None
    containers: tuple[str, str] | None
    kept: tuple[str, str, float]


def clean_up(task: Remains) -> None:
    """End all marked processes, and remove what they left."""
    variable, value = task["mark"]
    killed = end_marked(variable, [value])
    remove_segments(task.get("shm_prefix", ""), killed)
    if groups := task.get("groups"):
        for group in Path(groups[0]).glob(groups[1]):
            end_group(group)
    for folder in task["folders"]:
        remove_folder(folder)
    if containers := task.get("containers"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired, RuntimeError):  # nobody is left to report it to
            remove_containers(*containers)


def start_supervisor(task: Remains, *, is_awaited: bool = True) -> subprocess.Popen[bytes] | None:
    """Start a supervisor of the calling process. `dismiss_supervisor` ends it without a clean-up.

    is_awaited: wait until it runs, and raise if it does not. It does its work also if nobody has waited.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return None
    env = {name: value for name, value in os.environ.items() if name not in (SESSION, WORKER)}
    if task["mark"][0] == EPISODE:  # the programs can read it, and get no secrets
        env = {name: env[name] for name in ("PATH", "HOME", *CONTAINER_ENV) if name in env}
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), json.dumps({**task, "pid": os.getpid()})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        cwd="/",
        start_new_session=True,  # Ctrl-C in the terminal is for the process that is supervised
    )
    assert supervisor.stdout is not None
    if is_awaited and not (select.select([supervisor.stdout], [], [], 60.0)[0] and supervisor.stdout.read(1) == b"+"):
        supervisor.kill()
        supervisor.wait()
        raise RuntimeError("the supervisor process, which cleans up after this one, did not start")
    return supervisor


def dismiss_supervisor(supervisor: subprocess.Popen[bytes] | None) -> None:
    """End the supervisor of a process that has cleaned up itself: nothing is left for it to do."""
    if supervisor is None or supervisor.stdin is None or supervisor.stdout is None:
        return
    with contextlib.suppress(OSError):
        supervisor.stdin.write(b"-")
        supervisor.stdin.close()
    with contextlib.suppress(OSError):
        supervisor.stdout.close()
    try:
        supervisor.wait(3.0)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()  # without a limit: on a busy machine its end takes as long as it takes


def _supervise(pid: int, task: Remains) -> None:
    remark_this_process(-1)  # a supervisor that was started by a marked process is not one of those it ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        handle = None
    if handle is None or os.getppid() != pid:  # it ended before we could look
        _clean_up_if_nobody_continues(task)
        return
    with contextlib.suppress(BrokenPipeError):  # it ends now, or did not wait
        os.write(1, b"+")
    os.close(1)
    watched = [handle, 0]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if 0 in readable:
            if os.read(0, 1) == b"-":
                return
            watched.remove(0)  # closed without a word: a fork may hold the pipe, so only the handle decides
        if handle in readable:
            _clean_up_if_nobody_continues(task)
            return


def _clean_up_if_nobody_continues(task: Remains) -> None:
    file, content, seconds = task.get("kept", ("", "", 0.0))
    until_s = time.monotonic() + seconds
    while file:
        try:
            if Path(file).read_text() != content:
                return
        except OSError:
            return  # another process has removed it
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(min(1.0, left_s))
    clean_up(task)


if __name__ == "__main__":
    _task = json.loads(sys.argv[1])
    _supervise(_task.pop("pid"), _task)
