"""Processes of environments, seen from the rollout host and from where data is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotseat.agents._confinement import best_confinement, warn_if_open
from hotseat.agents._programs import check_startable, environment
from hotseat.agents.agent import AgentError
from hotseat.agents.black_box import BlackBox, Client
from hotseat.agents.environments.families import EnvironmentSettings
from hotseat.agents.gateway.settings import ProgramSettings
from hotseat.errors import UserError
from hotseat.processes import supervisor
from hotseat.types import Prompt

_MAX_LINE = 1 << 26
_MAX_SHOWN = 400  # characters of what a process wrote last
_KEEPING_S = 1.0
_ENDING_S = 5.0
_READY = 0  # the id of the first line of a process


class EnvironmentAgent(BlackBox):
    """Has episodes played by processes in which an environment's library runs, a few for many episodes at once."""

    def __init__(self, tokenizer: Any, settings: ProgramSettings, environment: EnvironmentSettings, **limits: Any):
        super().__init__(tokenizer, settings, **limits)
        self._environment = environment
        self._processes: list[_Process] = []
        self._places = itertools.count()
        self.name = str(environment)

    async def play(self, prompt: Prompt, client: Client) -> Any:
        process = await self._process(next(self._places) % self._environment.num_processes)
        return await process.ask(
            {
                "play": {
                    "text": prompt.text,
                    "label": prompt.label,
                    "seed": client.seed,
                    "base_url": client.base_url,
                    "api_key": client.api_key,
                    "root_url": client.root_url,
                    "model": client.model,
                    "content": client.content,
                }
            }
        )

    async def close(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            await process.close()
        await super().close()

    async def _process(self, place: int) -> _Process:
        while len(self._processes) <= place:
            self._processes.append(_Process(self._environment, self._settings.passed_on))
        process = self._processes[place]
        if process.has_ended:
            self._processes[place] = process = _Process(self._environment, self._settings.passed_on)
        await process.ready()
        return process


class _Started:
    """A process with a folder and a socket of its own; it leads a process group.

    A supervisor ends it with what it started, and removes the folder, if this process is killed.
    """

    def __init__(self, settings: EnvironmentSettings, passed_on: Sequence[str]):
        self.settings = settings
        self._folder = Path(tempfile.mkdtemp(prefix="hotseat-environment-"))
        self._name = secrets.token_hex(8)
        self._left: supervisor.Task = {"mark": (supervisor.EPISODE, self._name), "folders": [str(self._folder)]}
        self._supervisor = supervisor.start_supervisor(self._left, is_awaited=False)
        self._written = b""
        self.connection, theirs = socket.socketpair()
        env = environment(self._folder, passed_on, {supervisor.EPISODE: self._name})
        self._confinement = best_confinement()
        warn_if_open(self._confinement, False)
        confined = self._confinement.prefix  # what it starts is found by its mark, too: it needs no control group
        env["PATH"] = os.pathsep.join([os.path.dirname(settings.command[0]), env.get("PATH", os.defpath)])
        try:
            check_startable(shutil.which(settings.command[0]) or settings.command[0])
            self._process = subprocess.Popen(
                [*confined, *settings.command, str(theirs.fileno()), settings.spec],
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self.connection.close()
            self._clean_up()
            raise AgentError(f"{settings}: its process cannot be started: {error}") from None
        finally:
            theirs.close()
        self._keeping = threading.Thread(target=self._keep_written, name="environment-output", daemon=True)
        self._keeping.start()

    def _keep_written(self) -> None:
        """Read what the process writes until nobody can write any more, and keep the end of it."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := os.read(output.fileno(), 1 << 16):
                self._written = (self._written + data)[-4 * _MAX_SHOWN :]

    def _clean_up(self) -> None:
        supervisor.clean_up(self._left)
        supervisor.dismiss_supervisor(self._supervisor)

    def end(self, *, has_hung_up: bool = False) -> str:
        """Kill the process and what it started, and return how it had ended, with the end of what it wrote.

        has_hung_up: its end of the socket is closed, so that it is about to end by itself, if it has not yet.
        """
        if has_hung_up:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._confinement.exit_code(self._process.wait())
        self._clean_up()
        self._keeping.join(_KEEPING_S)  # a process that has removed its mark may hold the pipe open
        text = self._written.decode(errors="replace").strip()[-_MAX_SHOWN:]
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return how + (f": {text}" if text else "")


class _Process:
    """A process that plays episodes. One task reads its answers; its end fails all that wait for one."""

    def __init__(self, settings: EnvironmentSettings, passed_on: Sequence[str]):
        self._settings = settings
        self._passed_on = passed_on
        self._started: _Started | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(_READY + 1)
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[_READY] = self._ready
        self._reading: asyncio.Task[None] | None = None
        self.has_ended = False

    async def ready(self) -> None:
        """Start the process, and wait until the environment is loaded."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        await asyncio.shield(self._ready)

    async def ask(self, asked: dict[str, Any]) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send({"id": number, **asked})
            return await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    def _send(self, line: dict[str, Any]) -> None:
        if self._writer is not None and not self.has_ended:
            self._writer.write(json.dumps(line).encode() + b"\n")
        elif "cancel" not in line:
            raise AgentError(f"{self._settings}: its process has ended")

    async def _read(self) -> None:
        how, has_hung_up = "", False
        try:
            self._started = _Started(self._settings, self._passed_on)
            reader, self._writer = await asyncio.open_connection(sock=self._started.connection, limit=_MAX_LINE)
            while line := await _line(reader):
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is None or waiting.done():
                    continue  # cancelled meanwhile
                if "error" in answer:
                    waiting.set_exception(AgentError(f"{self._settings}: {answer['error']}"))
                else:
                    waiting.set_result(answer["result"])
            has_hung_up = True
        except AgentError as error:
            how = str(error)
        finally:
            self.has_ended = True
            if self._writer is not None:
                self._writer.close()
            if self._started is not None:
                how = f"{self._settings}: its process ended with {self._started.end(has_hung_up=has_hung_up)}"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(AgentError(how))
                    waiting.exception()  # nobody may be there to take it


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except (ConnectionError, ValueError):  # ended, or a line that is longer than any should be
        return b""


# --- where data is read -----------------------------------------------------------------------------------------------


def check_environment(settings: EnvironmentSettings, passed_on: Sequence[str] = ()) -> None:
    """Raise if the environment cannot be loaded."""
    _ask(settings, passed_on, None)


def environment_rows(
    settings: EnvironmentSettings, first: int, last: int, passed_on: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Return the tasks of an environment from one number to another: `text`, and the number as `label`."""
    texts = _ask(settings, passed_on, {"id": 1, "prompts": [first, last]})
    return [{"text": text, "label": str(first + at)} for at, text in enumerate(texts)]


def _ask(settings: EnvironmentSettings, passed_on: Sequence[str], asked: dict[str, Any] | None) -> Any:
    """Start the process of an environment for one question. Python's signals end it with us."""
    try:
        started = _Started(settings, passed_on)
    except AgentError as error:
        raise UserError(f"agent.environment: {error}") from None
    answers = [b"-"]
    try:
        with started.connection, started.connection.makefile("rwb") as stream:
            answers = [stream.readline()]
            if asked is not None and answers[0] and "error" not in json.loads(answers[0]):
                stream.write(json.dumps(asked).encode() + b"\n")
                stream.flush()
                answers.append(stream.readline())
    finally:
        how = started.end(has_hung_up=not answers[-1])
    if not answers[-1]:
        raise UserError(f"agent.environment: {settings}: its process ended with {how}")
    answer = json.loads(answers[-1])
    if "error" in answer:
        raise UserError(f"agent.environment: {settings}: {answer['error']}")
    return answer["result"]
