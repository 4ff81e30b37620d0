"""The template as a fork of the driver, so that the two load their libraries together, once.

It can be one while the driver is nothing but a command that has just begun: it has one thread, no state of a user's
program, and loads the libraries itself, in the environment that workers have. Whether it is one, `Template` looks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from hotseat.cluster._ray import template_process


class Fork:
    """The template, seen from the driver. It ends with its standard input, so at the latest with the driver."""

    def __init__(self, pid: int, stdin: int):
        self.pid, self._stdin = pid, stdin

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
        os.waitpid(self.pid, 0)
        os.close(self._stdin)


def fork_template(
    address: str,
    for_workers: Sequence[str],
    path: Sequence[str],
    env: Mapping[str, str],
    close_others: Callable[[], object],
) -> Fork:
    """Fork a template from this process, which has loaded the workers' libraries.

    for_workers, path: see `template_process`. env: variables that libraries read when they are loaded, as they were
    then. close_others: closes, in the fork, files that are only for the driver.
    """
    template = template_process.Template(address, for_workers)
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid != 0:
        os.close(reader)
        template.close()
        return Fork(pid, writer)
    code: object = 1
    try:
        os.close(writer)
        close_others()
        _leave_the_driver(reader)
        template.env.update(env)
        os.environ.update(env)
        template_process.serve(template, path, env.get("OMP_NUM_THREADS"))
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _leave_the_driver(stdin: int) -> None:
    """Give this process a group, streams and signals of its own."""
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, fd in enumerate((stdin, nowhere, nowhere)):
        os.dup2(fd, number)
    os.close(stdin)
    os.close(nowhere)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(code: object) -> NoReturn:
    """End this process as the end of its program would, but not the calls of the driver that have led here."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if isinstance(code, str):
        os.write(2, f"{code}\n".encode())
    os._exit(code if isinstance(code, int) else int(code is not None))
