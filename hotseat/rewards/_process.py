"""Handle of one worker process, used by the thread that owns it.

The thread that starts the process has to outlive it: the kernel ends the process with the thread, not with the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat.openmp import wait_policy

_WORKER = Path(__file__).with_name("_worker.py")
_MAX_ANSWER_BYTES = 1 << 30
_LOOK_EVERY_S = 0.1  # interval of checks for the process's death and `is_closed` while the pipe is silent


class Closed(Exception):
    """The owner does not want the answer any more."""


class WorkerTimeout(Exception):
    """No answer within the deadline."""


class ProtocolError(Exception):
    """The pipe contains something else than an answer: the user's code wrote to it."""


class NotLoaded(Exception):
    """The user's file cannot be loaded; the message says why."""


class LoadedTooLate(NotLoaded):
    """The user's file was still being loaded at the deadline."""


class WorkerDied(Exception):
    """The process ended. code: its exit code, or minus the signal that ended it; None if it had to be ended."""

    def __init__(self, code: int | None):
        self.code = code
        super().__init__(self._describe())

    @property
    def is_from_outside(self) -> bool:
        """Return whether another process killed this one; our own deadline raises `WorkerTimeout` instead."""
        return self.code in (-signal.SIGKILL, -signal.SIGTERM)

    def _describe(self) -> str:
        if self.code is None:
            return "its process ended"
        if self.code >= 0:
            return f"its process exited with code {self.code}"
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-self.code).name}"
        return f"its process was ended by signal {-self.code}"


@dataclass(frozen=True)
class Task:
    """Settings of a worker process: the function to load, and its limits."""

    file: str
    function: str
    max_memory_bytes: int | None = None
    log_path: Path | None = None
    extra_path: tuple[str, ...] = ()  # folders to import from, besides those of this process


class Tracebacks:
    """Shows the traceback of each cause once, whichever process raised it, and a count at the 10th, 100th, ... time."""

    def __init__(self, show: Callable[[str], object]):
        self._show = show
        self._lock = threading.Lock()
        self._times_raised: Counter[str] = Counter()

    def add(self, answer: Mapping[str, Any]) -> None:
        """Count the error in an answer, and show what is new of it."""
        if "traceback" not in answer:
            return
        with self._lock:
            self._times_raised[answer["cause"]] += 1
            count = self._times_raised[answer["cause"]]
        if count == 1:
            self._show(answer["traceback"])
        elif re.fullmatch("10+", str(count)):
            self._show(f"raised {count:,} times by now, the last time: {answer['error']}")


class WorkerProcess:
    """A process that has loaded the user's file. Ends with `end`, with its owner thread, or with this program."""

    def __init__(self, task: Task, timeout_s: float, is_closed: Callable[[], bool], tracebacks: Tracebacks):
        self._is_closed = is_closed
        worker_inbox, self._outbox = os.pipe()
        self._inbox, worker_outbox = os.pipe()
        task_message = {
            "parent": os.getpid(),
            "file": task.file,
            "function": task.function,
            "path": [*sys.path, *task.extra_path],
            "max_memory": task.max_memory_bytes,
            "inbox": worker_inbox,
            "outbox": worker_outbox,
        }
        log: Any = 2 if task.log_path is None else open(task.log_path, "ab")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", str(_WORKER), json.dumps(task_message)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **wait_policy()},
                pass_fds=(worker_inbox, worker_outbox),
                start_new_session=True,  # Ctrl-C is for the driver, and the group of all that it starts can be ended
            )
        except BaseException:
            os.close(self._inbox)
            os.close(self._outbox)
            raise
        finally:
            os.close(worker_inbox)
            os.close(worker_outbox)
            if task.log_path is not None:
                log.close()
        os.set_blocking(self._inbox, False)
        os.set_blocking(self._outbox, False)
        try:
            answer = self._receive(time.monotonic() + timeout_s)
        except WorkerTimeout:
            self.end()
            raise LoadedTooLate(f"it did not load within {timeout_s:g} s") from None
        except BaseException:
            self.end()
            raise
        if "error" in answer:
            self.end()
            tracebacks.add(answer)
            raise NotLoaded(answer["error"])
        self.takes_names = bool(answer.get("takes_names"))  # the function is called by names

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message, and wait for the answer. After an error the process can only be ended."""
        deadline = time.monotonic() + timeout_s
        self._send(message, deadline)
        return self._receive(deadline)

    def end(self) -> int | None:
        """End the process and everything that it started. Returns the exit code, or minus the signal."""
        if self._process.returncode is None:
            # Kill the group before collecting the process: until then its number cannot belong to another one.
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._inbox)
            os.close(self._outbox)
        return self._process.returncode

    def _send(self, message: dict[str, Any], deadline: float) -> None:
        data = memoryview(_framed(message))
        while data:
            self._wait_for(self._outbox, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                try:
                    data = data[os.write(self._outbox, data) :]
                except BrokenPipeError:
                    raise self._died() from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        (size,) = struct.unpack("<Q", self._read(8, deadline))
        try:
            if size > _MAX_ANSWER_BYTES:
                raise ValueError
            answer = json.loads(self._read(size, deadline))
            if not isinstance(answer, dict):
                raise ValueError
        except ValueError:
            raise ProtocolError("its answer cannot be read: something else was written to the worker's pipe") from None
        return answer

    def _read(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            self._wait_for(self._inbox, select.POLLIN, deadline)
            with contextlib.suppress(BlockingIOError):
                part = os.read(self._inbox, min(size, 1 << 20))
                if not part:
                    raise self._died()
                parts.append(part)
                size -= len(part)
        return b"".join(parts)

    def _wait_for(self, pipe: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        while True:
            if self._is_closed():
                raise Closed
            left = deadline - time.monotonic()
            if poll.poll(max(0.0, min(left, _LOOK_EVERY_S)) * 1000):
                return
            if left <= 0:
                raise WorkerTimeout
            if not self.is_alive():  # its children may hold the pipe open
                raise self._died()

    def _died(self) -> WorkerDied:
        """Return the error for a closed pipe, after waiting for the process to end; one that does not is ended."""
        for _ in range(50):
            if not self.is_alive():
                break
            time.sleep(0.02)
        else:
            self.end()
            return WorkerDied(None)
        return WorkerDied(self.end())


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("<Q", len(data)) + data
