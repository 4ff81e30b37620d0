"""The template as a fork of the driver, so that libraries are loaded once for both.

The driver can be forked while it is a command that has just begun: it has one thread and no state of a user's program,
and it has loaded the libraries itself, in the environment that workers have. `template.Template` checks that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from hotseat.cluster._ray import template_process

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Fork:
    """The template, seen from the driver. It ends with its standard input, so at the latest with the driver."""

    def __init__(self, pid: int, stdin: int):
        self.pid, self._stdin, self._handle = pid, stdin, os.pidfd_open(pid)

    def close(self) -> None:
        """End the template."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # of a driver that was started with SIGCHLD ignored
            os.waitpid(self.pid, 0)
        os.close(self._handle)
        os.close(self._stdin)


def open_files() -> list[int]:
    """List the files that this process has open, without standard streams."""
    numbers = sorted(map(int, os.listdir("/proc/self/fd")))
    return [fd for fd in numbers if fd > 2 and os.path.lexists(f"/proc/self/fd/{fd}")]


def fork_template(
    address: str,
    for_workers: Sequence[str],
    path: Sequence[str],
    env: Mapping[str, str],
    files: Sequence[int],
) -> Fork:
    """Fork a template from this process, which has loaded the workers' libraries.

    for_workers, path: see `template_process`. env: variables that libraries read when they are loaded, as they were
    then. files: those that the driver had open before it loaded libraries; the fork does not keep them open.
    """
    template = template_process.Template(address, for_workers)
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal to the group of the driver, such as Ctrl-C, must not interrupt the fork in the driver's code.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            _be_template(template, reader, files, mask, path, env)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(reader)
    template.close()
    return Fork(pid, writer)


def _be_template(
    template: template_process.Template,
    stdin: int,
    files: Sequence[int],
    mask: Iterable[int],
    path: Sequence[str],
    env: Mapping[str, str],
) -> NoReturn:
    """Be the template, and in its forks a worker, to the end of the process. mask: signals to block from now on."""
    code: object = 1
    try:
        _leave_the_driver(stdin, files)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        template.env.update(env)
        os.environ.update(env)
        template_process.serve(template, path)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # as the interpreter would: it ends this process, which has nobody above it
        traceback.print_exc()
    finally:
        _end(code)


def _leave_the_driver(stdin: int, files: Sequence[int]) -> None:
    """Give this process a group, streams and signals of its own, and none of the driver's files."""
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, fd in enumerate((stdin, nowhere, nowhere)):
        os.dup2(fd, number)
    for fd in files:  # not closed: an object of the driver may still close this number
        os.dup2(nowhere, fd, inheritable=False)
    os.close(stdin)
    os.close(nowhere)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(code: object) -> NoReturn:
    """End this process as the end of its program would, but not the calls of the driver that have led here."""
    status = code & 255 if isinstance(code, int) else int(code is not None)
    try:
        if status and not isinstance(code, int):
            print(code, file=sys.stderr)
        with contextlib.suppress(BaseException):  # an interrupt ends the wait, as it does the interpreter's
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(status)
