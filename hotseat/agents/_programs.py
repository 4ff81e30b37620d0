"""Runs of a user's program: in a folder and an environment of its own, ended with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_KEPT = 4096  # bytes of what a program wrote last

# What a program gets of our environment. HOTSEAT_SESSION is how a run finds processes that were left behind.
_PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "HOTSEAT_SESSION",
)  # fmt: skip


def environment(folder: Path, passed_on: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program: no secrets of ours, the folder as its home, and what is its own."""
    ours = {name: os.environ[name] for name in (*_PASSED_ON, *passed_on) if name in os.environ}
    return {**ours, "HOME": str(folder), "TMPDIR": str(folder), **own}


async def run_program(command: Sequence[str], folder: Path, env: Mapping[str, str], line: bytes) -> tuple[int, str]:
    """Run a program with a line on its standard input; return its exit code and the end of what it wrote.

    The program leads a process group, all of which is ended when the program has, or when this is cancelled.
    """
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    written = bytearray()
    assert process.stdin is not None
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    output = process.stdout.fileno()
    os.set_blocking(output, False)
    loop.add_reader(output, _read, loop, output, written)
    try:
        feeding = loop.run_in_executor(None, _feed, process.stdin, line) if len(line) > _ATOMIC else None
        if feeding is None:
            _feed(process.stdin, line)
        await _ended(process.pid)
    finally:
        # The leader is not reaped yet, so its number is nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        _read(loop, output, written)
        loop.remove_reader(output)
        process.stdout.close()
        code = process.wait()
    return code, bytes(written[-_KEPT:]).decode(errors="replace").strip()


_ATOMIC = 4096  # bytes that a new pipe takes without waiting


def _feed(pipe: object, line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, OSError):  # a program need not read it
        pipe.write(line)  # type: ignore[attr-defined]
        pipe.flush()  # type: ignore[attr-defined]
    with contextlib.suppress(BrokenPipeError, OSError):
        pipe.close()  # type: ignore[attr-defined]


def _read(loop: asyncio.AbstractEventLoop, output: int, written: bytearray) -> None:
    """Take what a program has written, and keep the end of it. Other processes may hold the pipe open."""
    try:
        data = os.read(output, 1 << 20)  # once a call: a program that never stops writing must not keep the loop
    except BlockingIOError:
        return
    if not data:
        loop.remove_reader(output)
    written += data
    del written[:-_KEPT]


async def _ended(pid: int) -> None:
    """Wait until a process has ended, without reaping it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    handle = os.pidfd_open(pid)
    try:
        loop.add_reader(handle, _settle, ended)
        await ended
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
