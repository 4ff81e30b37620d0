"""A child process seen from its parent: started, asked and ended by one object, with a deadline for every wait."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from hotseat.processes.child import HEAD, MAX_BYTES, FrameChannel

_CHILD = Path(__file__).with_name("child.py")
_LOOK_EVERY_S = 0.1  # interval of checks for the process's death and `is_closed` while the connection is silent
_MAX_KEPT = 1600  # bytes of what a process wrote last
_KEEPING_S = 1.0


class Closed(Exception):
    """The owner does not want the answer any more."""


class WorkerTimeout(Exception):
    """No answer within the deadline."""


class ProtocolError(Exception):
    """The connection contains something else than an answer: the user's code wrote to it."""


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


def exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


class ChildProcess:
    """A process that runs `main(channel, task)` of a file, in its own session. After an error it can only be ended.

    task: in JSON's types. command: of the interpreter. imports_from: folders that it looks for modules in after all
    others. dies_with_thread: the system kills the process with the thread that starts it. is_closed: waits raise
    `Closed` once it returns True. ending_s: how long a process that has closed its end may take to end. options: of
    `Popen`; with PIPE as stdout, the end of the output is kept for `written`.
    """

    def __init__(
        self,
        program: Path,
        task: Any,
        *,
        command: Sequence[str] = (sys.executable, "-u", "-P"),
        imports_from: Sequence[str] = (),
        dies_with_thread: bool = False,
        max_memory_bytes: int | None = None,
        is_closed: Callable[[], bool] = lambda: False,
        ending_s: float = 1.0,
        **options: Any,
    ):
        self._is_closed = is_closed
        self._ending_s = ending_s
        self._lock = threading.Lock()
        self._received = bytearray()
        self._written = b""
        self._keeper: threading.Thread | None = None
        self.socket, theirs = socket.socketpair()
        self.channel = FrameChannel(self.socket)
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        options = {**silent, **options, "pass_fds": (theirs.fileno(), *options.get("pass_fds", ()))}
        words = [*command, str(_CHILD), str(theirs.fileno()), str(program)]
        try:
            # A session of its own: Ctrl-C is for the driver, and the group of all that it starts can be ended.
            self.process = subprocess.Popen(words, start_new_session=True, **options)
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        if self.process.stdout is not None:
            self._keeper = threading.Thread(target=self._keep, args=(self.process.stdout,), daemon=True)
            self._keeper.start()
        self.socket.setblocking(False)
        parent = os.getpid() if dies_with_thread else None
        first = {"parent": parent, "max_memory": max_memory_bytes, "path": list(imports_from), "task": task}
        try:
            with contextlib.suppress(WorkerDied):  # `receive` raises it
                self.send(first)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        """Tell whether the process runs, without collecting it."""
        if self.process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def call(self, message: Any, timeout_s: float) -> Any:
        """Send a message, and wait for the answer."""
        deadline = time.monotonic() + timeout_s
        self.send(message, timeout_s)
        return self.receive(deadline - time.monotonic())

    def send(self, message: Any, timeout_s: float = float("inf")) -> None:
        data, deadline = memoryview(self.channel.frame(message)), time.monotonic() + timeout_s
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                self._wait_for(select.POLLOUT, deadline)
            except (BrokenPipeError, ConnectionResetError):
                raise self._died() from None

    def receive(self, timeout_s: float = float("inf")) -> Any:
        deadline = time.monotonic() + timeout_s
        (size,) = HEAD.unpack(self._take(HEAD.size, deadline))
        try:
            if size > MAX_BYTES:
                raise ValueError
            return self.channel.codec.loads(self._take(size, deadline))
        except ValueError:
            raise ProtocolError(
                "its answer cannot be read: something else was written to the worker's connection"
            ) from None

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._received) < size:
            try:
                part = self.socket.recv(min(max(size - len(self._received), 1 << 16), 1 << 20))
            except BlockingIOError:
                self._wait_for(select.POLLIN, deadline)
                continue
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._died()
            self._received += part
        with memoryview(self._received) as view:
            data = bytes(view[:size])
        del self._received[:size]
        return data

    def _wait_for(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.socket, event)
        while True:
            if self._is_closed():
                raise Closed
            left = deadline - time.monotonic()
            if poll.poll(max(0.0, min(left, _LOOK_EVERY_S)) * 1000):
                return
            if left <= 0:
                raise WorkerTimeout
            if not self.is_alive() and not poll.poll(0):  # its children may hold the connection open
                raise self._died()

    def _died(self) -> WorkerDied:
        """Return the error for a closed connection, after waiting for the process to end; then it is ended."""
        has_ended = self._has_ended(self._ending_s)
        code = self._kill()
        return WorkerDied(code if has_ended else None)

    def _has_ended(self, within_s: float) -> bool:
        deadline, pause_s = time.monotonic() + within_s, 0.0005
        while self.is_alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return True

    def _kill(self) -> int:
        with self._lock:
            if self.process.returncode is None:
                # Kill the group before collecting the process: until then its number cannot belong to another one.
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.process.wait()
        return self.process.returncode

    def kill(self) -> None:
        """Kill the process and its group. It has to be ended nevertheless."""
        if self.is_alive():
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """End the connection, upon which a process may end by itself; also where a fork has a copy of it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = 0.0) -> int:
        """End the process, which has some time to do so by itself, and everything that it started; return its code."""
        if grace_s > 0:
            self.hang_up()
            self._has_ended(grace_s)
        code = self._kill()
        self.socket.close()
        return code

    def written(self) -> str:
        """Return the end of what a process wrote that has ended."""
        if self._keeper is not None:
            self._keeper.join(_KEEPING_S)  # a process that it started may hold the pipe open
        return self._written.decode(errors="replace").strip()

    def _keep(self, output: IO[bytes]) -> None:
        with output:
            while data := os.read(output.fileno(), 1 << 16):
                self._written = (self._written + data)[-_MAX_KEPT:]
