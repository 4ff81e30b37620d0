"""An interpreter that stays, and from which the programs of episodes are forked with modules that it has imported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotseat.agents.confinement import Confinement, kept_capabilities
from hotseat.closing import on_failure

_PROCESS = Path(__file__).with_name("interpreter_process.py")
_CODE = struct.Struct("!i")
_LOADING_S = 300.0


class CannotFork(Exception):
    """Why programs are started anew for each episode."""


class KeptInterpreter:
    """The interpreter of a command `python FILE.py ...`. Every program is a fork of it, in a PID namespace of its own.

    env: of the interpreter, while it imports modules. Raises `CannotFork` where programs have to be started anew.
    """

    def __init__(
        self, command: Sequence[str], modules: Sequence[str], env: Mapping[str, str], confinement: Confinement
    ):
        if len(command) < 2 or not command[1].endswith(".py") or not os.path.isfile(command[1]):
            raise CannotFork("agent.command is not an interpreter with a Python file after it")
        if not confinement.hides_processes:
            raise CannotFork("programs are not confined in a PID namespace here")
        self._control, theirs = socket.socketpair()
        words = [command[0], str(_PROCESS), str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=dict(env),
                cwd=env["HOME"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._control.close()
            raise CannotFork(f"{command[0]} cannot be started: {error}") from None
        finally:
            theirs.close()
        first = {"script": command[1], "modules": list(modules), "kept": kept_capabilities()}
        with on_failure(self.close):
            with contextlib.suppress(OSError):  # it has ended: `_ready` says so
                self._control.sendall(json.dumps(first).encode() + b"\n")
            problem = self._ready()
            if problem is not None:
                raise CannotFork(problem)

    def _ready(self) -> str | None:
        """Wait until the modules are imported; return why nothing can be forked."""
        if not select.select([self._control], [], [], _LOADING_S)[0]:
            return f"its modules were not imported within {_LOADING_S:g} s"
        line = b""
        with contextlib.suppress(OSError):
            line = self._control.makefile("rb").readline()
        if not line:
            return "the interpreter ended while it imported its modules, or is no Python of 3.9 or later"
        problem = json.loads(line)["problem"]
        return None if problem is None else str(problem)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def run(self, words: Sequence[str], folder: Path, env: Mapping[str, str], files: tuple[int, int]) -> int:
        """Run the script with arguments, and return its exit code when everything that it started has ended.

        words: the script with its arguments. files: its standard input, and its output.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._control, [b"+"], [*files, theirs.fileno()])
            asked = {"argv": list(words), "env": dict(env), "cwd": str(folder)}
            try:
                await loop.sock_sendall(ours, json.dumps(asked).encode() + b"\n")
                answer = await _receive(ours)
            except asyncio.CancelledError:
                ours.shutdown(socket.SHUT_WR)  # by which the interpreter ends the program
                await asyncio.shield(_receive(ours))
                raise
        finally:
            ours.close()
        if not answer:
            raise OSError("the interpreter that is kept for programs has ended")
        return int(_CODE.unpack(answer)[0])

    def close(self) -> None:
        """End the interpreter, and the programs that still run."""
        self._control.close()
        self._process.kill()
        self._process.wait()


async def _receive(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) < _CODE.size:
        part = await asyncio.get_running_loop().sock_recv(connection, _CODE.size - len(answer))
        if not part:
            return b""
        answer += part
    return answer
