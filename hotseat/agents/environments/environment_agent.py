"""Processes of environments, seen from the rollout host and from where data is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotseat.agents.agent import AgentError
from hotseat.agents.black_box import BlackBox
from hotseat.agents.confinement import best_confinement, warn_if_open
from hotseat.agents.environments.environment_worker import PolicyClient
from hotseat.agents.environments.families import EnvironmentSettings, interpreter
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.agents.programs import check_startable, environment
from hotseat.errors import UserError
from hotseat.processes import ChildProcess, WorkerDied, exit_words, supervisor
from hotseat.types import Prompt

_WORKER = Path(__file__).with_name("environment_worker.py")
_MAX_BYTES = 1 << 26
_MAX_SHOWN = 400  # characters of what a process wrote last
_ENDING_S = 5.0
_READY = 0  # the id of the first message of a process


class EnvironmentAgent(BlackBox):
    """Has episodes played by processes in which an environment's library runs, a few for many episodes at once."""

    runs_here = False

    def __init__(self, policy: ServedPolicy, environment: EnvironmentSettings):
        super().__init__(policy)
        self._environment = environment
        self._processes: dict[int, _Process] = {}
        self._places = itertools.count()
        self.name = str(environment)

    async def play(self, prompt: Prompt, client: PolicyClient) -> Any:
        place = next(self._places) % self._environment.num_processes
        process = self._processes.get(place)
        if process is None or process.has_ended:
            process = self._processes[place] = _Process(self._environment, self._settings.passed_on)
        await process.ready()
        return await process.ask({"play": {"text": prompt.text, "label": prompt.label, "client": vars(client)}})

    async def close(self) -> None:
        processes, self._processes = self._processes, {}
        for process in processes.values():
            await process.close()
        await super().close()


class StartedEnvironment(ChildProcess):
    """A process of an environment, with a folder of its own.

    A supervisor ends it with what it started, and removes the folder, if this process is killed.
    """

    def __init__(self, settings: EnvironmentSettings, passed_on: Sequence[str]):
        folder = Path(tempfile.mkdtemp(prefix="hotseat-environment-"))
        name = secrets.token_hex(8)
        self._left: supervisor.Remains = {"mark": (supervisor.EPISODE, name), "folders": [str(folder)]}
        self._supervisor = supervisor.start_supervisor(self._left, is_awaited=False)
        self._confinement = best_confinement()
        warn_if_open(self._confinement, False)
        confined = self._confinement.prefix  # what it starts is found by its mark, too: it needs no control group
        python = interpreter(settings.python)
        env = environment(folder, passed_on, {supervisor.EPISODE: name})
        env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", os.defpath)])
        try:
            check_startable(shutil.which(python) or python)
            super().__init__(
                _WORKER,
                settings.spec,
                command=(*confined, python),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=folder,
            )
        except OSError as error:
            self._clean_up()
            raise AgentError(f"{settings}: its process cannot be started: {error}") from None

    def _clean_up(self) -> None:
        supervisor.clean_up(self._left)
        supervisor.dismiss_supervisor(self._supervisor)

    def how_it_ended(self, *, has_hung_up: bool = False) -> str:
        """Kill the process and what it started, and return how it had ended, with the end of what it wrote.

        has_hung_up: its end of the channel is closed, so that it is about to end by itself, if it has not yet.
        """
        code = self._confinement.exit_code(self.end(_ENDING_S if has_hung_up else 0.0))
        self._clean_up()
        text = self.written()[-_MAX_SHOWN:]
        return exit_words(code) + (f": {text}" if text else "")


class _Process:
    """A process that plays episodes. One task reads its answers; its end fails all that wait for one."""

    def __init__(self, settings: EnvironmentSettings, passed_on: Sequence[str]):
        self._settings = settings
        self._passed_on = passed_on
        self._started: StartedEnvironment | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(_READY + 1)
        self._ready = self._waiting[_READY] = asyncio.get_running_loop().create_future()
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

    def _send(self, asked: dict[str, Any]) -> None:
        if self._started is not None and self._writer is not None and not self.has_ended:
            self._writer.write(self._started.channel.frame(asked))
        elif "cancel" not in asked:
            raise AgentError(f"{self._settings}: its process has ended")

    async def _read(self) -> None:
        how, has_hung_up = "", False
        try:
            self._started = StartedEnvironment(self._settings, self._passed_on)
            reader, self._writer = await asyncio.open_connection(sock=self._started.socket)
            # Until it has ended, or sends what no environment sends.
            with contextlib.suppress(EOFError, ConnectionError, ValueError):
                while True:
                    answer = await self._started.channel.receive_from(reader, _MAX_BYTES)
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
                how = f"{self._settings}: its process ended with {self._started.how_it_ended(has_hung_up=has_hung_up)}"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(AgentError(how))
                    waiting.exception()  # nobody may be there to take it


# --- where data is read -----------------------------------------------------------------------------------------------


def check_environment(settings: EnvironmentSettings, passed_on: Sequence[str] = ()) -> None:
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
        started = StartedEnvironment(settings, passed_on)
    except AgentError as error:
        raise UserError(f"agent.environment: {error}") from None
    answer: dict[str, Any] = {}
    try:
        answer = started.receive()
        if asked is not None and "error" not in answer:
            answer = {}
            started.send(asked)
            answer = started.receive()
    except WorkerDied:
        pass
    finally:
        how = started.how_it_ended(has_hung_up=not answer)
    if not answer:
        raise UserError(f"agent.environment: {settings}: its process ended with {how}")
    if "error" in answer:
        raise UserError(f"agent.environment: {settings}: {answer['error']}")
    return answer["result"]
