"""Looks at one of our processes: what it says it is doing, and its stack."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hotseat.cluster.activity import Operation, read_activity

STACK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Sighting:
    """Observation of a process on its node."""

    pid: int | None
    doing: tuple[Operation, ...] = ()
    stack: str = ""
    hostname: str = ""  # of its node, if that is another one than this


def look_at(pid: int | None, name: str, directory: str, *, with_stack: bool) -> Sighting:
    """Look at a process on this machine. name: of its activity file, such as `actor-1`; directory: of these files."""
    stack = stack_of(pid, directory) if pid is not None and with_stack else ""
    return Sighting(pid, tuple(read_activity(directory, name)), stack)


def stack_of(pid: int, directory: str) -> str:
    """Return the stacks of a process on this machine: by py-spy where there is one, else by its own handler."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=STACK_TIMEOUT_S)
            if done.returncode == 0:
                return done.stdout
    path = Path(directory) / f"{pid}.stack"
    if not path.is_file():
        return "(no stack: py-spy is not installed)"
    before = path.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    written = ""
    for _ in range(20):
        time.sleep(0.05)
        last, written = written, path.read_text()[before:]
        if written and written == last:  # threads are written one by one: wait until nothing is added
            break
    return written or "(no stack: the process does not react to signals, and py-spy is not installed)"
