"""Runs of a user's program: in a folder and an environment of its own, ended with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hotseat.agents.confinement import Confinement, best_confinement, warn_if_open
from hotseat.agents.kept_interpreter import CannotFork, KeptInterpreter
from hotseat.processes import supervisor

logger = logging.getLogger(__name__)

HOST_LABEL, EPISODE_LABEL = "hotseat.host", "hotseat.episode"
_KEPT = 4096  # bytes of what a program wrote last
_ATOMIC = 4096  # bytes that a new pipe takes without waiting

# What a program gets of our environment. HOTSEAT_SESSION is how a run finds processes that were left behind.
_PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "HOTSEAT_SESSION",
)  # fmt: skip


def environment(folder: Path, passed_on: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program: without secrets, with the folder as its home, and its own variables."""
    ours = {name: os.environ[name] for name in (*_PASSED_ON, *passed_on) if name in os.environ}
    return {**ours, "HOME": str(folder), "TMPDIR": str(folder), **own}


@dataclass(frozen=True)
class Preload:
    """Modules that the interpreter of a command imports once for all episodes. passed_on: as for `environment`."""

    command: tuple[str, ...]
    modules: tuple[str, ...]
    passed_on: tuple[str, ...] = ()


class ProgramHost:
    """Runs the programs of this process, each in a folder of its own, and ends them with all that they started.

    A supervisor ends them if this process is killed. containers: the command, such as podman, by which containers
    with an episode's labels are removed; None: none are. preload: command and modules of programs that are forked from
    an interpreter with these modules, where that is possible.
    """

    def __init__(
        self,
        containers: str | None = None,
        confinement: Confinement | None = None,
        preload: Preload | None = None,
    ):
        self.name = secrets.token_hex(8)
        self._confinement = confinement or best_confinement(containers is not None)
        warn_if_open(self._confinement, containers is not None)
        self._containers = containers
        self._numbers = itertools.count()
        self._gone: set[str] = set()  # episodes of which it is known that no process is left
        self._folder = Path(tempfile.mkdtemp(prefix="hotseat-agents-"))
        groups = self._confinement.groups
        self._task: supervisor.Remains = {
            "mark": (supervisor.EPISODE, self.name),
            "groups": None if groups is None else (str(groups), f"hotseat-{self.name}-*"),
            "folders": [str(self._folder)],
            "containers": None if containers is None else (containers, f"{HOST_LABEL}={self.name}"),
        }
        self._supervisor = supervisor.start_supervisor(self._task)
        self._kept = None if preload is None else self._started(preload)

    def _started(self, preload: Preload) -> KeptInterpreter | None:
        home = self._folder / "interpreter"
        home.mkdir()
        env = environment(home, preload.passed_on, {supervisor.EPISODE: self.name})
        try:
            return KeptInterpreter(preload.command, preload.modules, env, self._confinement)
        except CannotFork as error:
            logger.warning("agent.preload has no effect, every program imports what it needs: %s", error)
            return None

    def close(self) -> None:
        """End what is left, and the supervisor. Nothing may run any more."""
        if self._kept is not None:
            self._kept.close()
        supervisor.clean_up(self._task)
        supervisor.dismiss_supervisor(self._supervisor)

    @contextlib.asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """Make a folder for one program, and remove it with everything that the program left behind."""
        path = self._folder / f"{self.name}.{next(self._numbers)}"
        path.mkdir()
        _labels_of(path).write_text(f"{HOST_LABEL}={self.name}\n{EPISODE_LABEL}={path.name}\n")
        try:
            yield path
        finally:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._clean, path))

    def _clean(self, path: Path) -> None:
        name = path.name
        self._confinement.end(name)
        if name in self._gone:
            self._gone.remove(name)
        else:
            # Whatever the confinement: a program that may write to control groups can leave its own.
            supervisor.end_marked(supervisor.EPISODE, [name], timeout_s=5.0)
        supervisor.remove_folder(path)
        _labels_of(path).unlink(missing_ok=True)
        if self._containers is not None:
            try:
                supervisor.remove_containers(self._containers, f"{EPISODE_LABEL}={name}")
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                logger.warning("containers of episode %s cannot be removed: %s", name, error)

    async def run(self, command: Sequence[str], folder: Path, env: Mapping[str, str], line: bytes) -> tuple[int, str]:
        """Run a program with a line on its standard input; return its exit code and the end of what it wrote."""
        await asyncio.get_running_loop().run_in_executor(None, check_startable, command[0])
        stores = {}
        if self._containers is not None:  # kept where ours are: the program's HOME is another
            ours = {name: os.environ[name] for name in supervisor.CONTAINER_ENV if name in os.environ}
            stores = {"XDG_DATA_HOME": str(Path.home() / ".local" / "share"), **ours}
        mark = f"{self.name}/{folder.name}"
        marked = {**stores, **env, supervisor.EPISODE: mark, "HOTSEAT_LABEL_FILE": str(_labels_of(folder))}
        if self._kept is not None and not self._kept.is_alive:
            logger.warning("the interpreter that has imported agent.preload has ended: programs are started anew")
            self._kept.close()
            self._kept = None
        if self._kept is not None:
            made = await _run_kept(self._kept, command[1:], folder, marked, line)
            self._gone.add(folder.name)
            return made
        code, written = await _run(self._confinement.command(command, folder.name), folder, marked, line)
        return self._confinement.exit_code(code), written


def check_startable(file: str) -> None:
    """Raise what starting the file would raise: in confinement another program starts it, and only says so."""
    first = b""
    with contextlib.suppress(PermissionError), open(file, "rb") as opened:  # what can be executed need not be readable
        first = opened.readline(256)
    words = first[2:].split() if first.startswith(b"#!") else []
    for needed in (file, *(word.decode(errors="replace") for word in words[:1])):
        if not os.access(needed, os.X_OK):
            reason = errno.EACCES if os.path.exists(needed) else errno.ENOENT
            raise OSError(reason, os.strerror(reason), needed)


def _labels_of(folder: Path) -> Path:
    """Return the file with the labels of a program's containers."""
    return folder.with_name(f"{folder.name}.labels")


async def _run(command: Sequence[str], folder: Path, env: Mapping[str, str], line: bytes) -> tuple[int, str]:
    """Run a command, and kill its process group when it has ended or this is cancelled."""
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
        if len(line) > _ATOMIC:
            _ = loop.run_in_executor(None, _feed, process.stdin, line)
        else:
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


async def _run_kept(
    kept: KeptInterpreter, words: Sequence[str], folder: Path, env: Mapping[str, str], line: bytes
) -> tuple[int, str]:
    """Run a script by an interpreter that is kept. words: the script with its arguments."""
    written, loop = bytearray(), asyncio.get_running_loop()
    (stdin, feeding), (output, stdout) = os.pipe(), os.pipe()
    os.set_blocking(output, False)
    loop.add_reader(output, _read, loop, output, written)
    try:
        pipe = os.fdopen(feeding, "wb")
        if len(line) > _ATOMIC:
            _ = loop.run_in_executor(None, _feed, pipe, line)
        else:
            _feed(pipe, line)
        code = await kept.run(words, folder, env, (stdin, stdout))
    finally:
        os.close(stdin)
        os.close(stdout)
        _read(loop, output, written)
        loop.remove_reader(output)
        os.close(output)
    return code, bytes(written[-_KEPT:]).decode(errors="replace").strip()


def _feed(pipe: IO[bytes], line: bytes) -> None:
    with contextlib.suppress(OSError), pipe:  # a program need not read it
        pipe.write(line)


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
    loop, ended, handle = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    try:
        loop.add_reader(handle, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
