"""Ends every process of ours with its driver: marks of our processes, and a small process that ends them.

Every process of a session is marked twice, and what it starts inherits both marks, so that engines' children are
found too. One is `HOTSEAT_SESSION=ID` in its environment; ids nest with "/", so a session that a worker starts inside
another one is ended with the outer one. But a process that gives itself a title, as Ray's and vLLM's do, overwrites
what others can read of its environment. The other mark is a number in the soft limit of realtime CPU time
(RLIMIT_RTTIME): everybody inherits it, everybody can read it, and at seventy thousand years it limits nobody.

Run as a program, this file is the guard: it waits for one process to end, by whatever cause, then ends what is left
of the session, removes its shared-memory segments and its temporary directories, and ends itself. It needs only the
standard library and Linux; elsewhere `start_guard` returns None and Ray's own reaper has to do.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

SESSION = "HOTSEAT_SESSION"
WORKER = "HOTSEAT_WORKER"
SHM_PREFIX = "HOTSEAT_SHM_PREFIX"

# They remove the segments of those who used them once these are gone, so they go last.
_HELPERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_HELPERS_GRACE_S = 3.0


def in_worker_process() -> bool:
    """Tell whether this process carries the object of one rank of a group, and nothing else."""
    return bool(os.environ.get(WORKER))


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
    """Compute the number of a process: half of it stands for the session, half for the worker; 0 is none."""
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
    """Kill what `marked` finds until it finds nothing twice (a fork may be under way). Returns the pids it killed."""
    values, spared, killed, clean = list(values), set(spare), [], 0
    begin = alone_since = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        left = [pid for pid in marked(variable, values) if pid not in spared]
        clean = clean + 1 if not left else 0
        if clean == 2:
            break
        helpers = {pid for pid in left if _is_helper(pid)}
        if len(helpers) < len(left):
            alone_since = time.monotonic()
        for pid in left:
            if pid in helpers and time.monotonic() - alone_since < _HELPERS_GRACE_S:
                continue
            if _kill(pid, variable, values) and pid not in killed:
                killed.append(pid)
        time.sleep(0.05)
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


def start_guard(session: str, shm_prefix: str, directories: Iterable[str] = ()) -> subprocess.Popen[bytes] | None:
    """Start a guard over the calling process. `dismiss_guard` ends it without a sweep."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return None
    task = {
        "pid": os.getpid(),
        "session": session,
        "shm_prefix": shm_prefix,
        "directories": list(directories),
    }
    environment = {key: value for key, value in os.environ.items() if key not in (SESSION, WORKER)}
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,  # Ctrl-C in the terminal is for the driver
    )
    assert guard.stdout is not None
    readable, _, _ = select.select([guard.stdout], [], [], 20.0)
    if not readable or guard.stdout.read(1) != b"+":
        guard.kill()
        guard.wait(5.0)
        raise RuntimeError("the guard process, which cleans up after this one, did not start")
    return guard


def dismiss_guard(guard: subprocess.Popen[bytes] | None) -> None:
    """End the guard of a session that was cleaned up: nothing is left for it to do."""
    if guard is None or guard.stdin is None or guard.stdout is None:
        return
    with contextlib.suppress(OSError):
        guard.stdin.write(b"-")
        guard.stdin.close()
    with contextlib.suppress(OSError):
        guard.stdout.close()
    try:
        guard.wait(3.0)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait(3.0)


def _guard(task: dict[str, Any]) -> None:
    remark_this_process(-1)  # a guard that was started by a marked process is not one of those it ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid = task["pid"]
    handle = os.pidfd_open(pid)
    if os.getppid() != pid:  # it ended before we could look
        _sweep(task)
        return
    os.write(1, b"+")
    os.close(1)
    watched = [handle, 0]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if 0 in readable:
            if os.read(0, 1) == b"-":
                return
            # Closed without a word: a fork of the driver may hold the pipe, so only the handle decides.
            watched.remove(0)
        if handle in readable:
            _sweep(task)
            return


def _sweep(task: dict[str, Any]) -> None:
    killed = end_marked(SESSION, [task["session"]])
    remove_segments(task["shm_prefix"], killed)
    for directory in task["directories"]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(json.loads(sys.argv[1]))
