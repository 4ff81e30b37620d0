"""A process of an environment or of a user's `play`, seen from the rollout host."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotseat.agents.agent import AgentError
from hotseat.agents.confinement import Confinement, best_confinement, warn_if_open
from hotseat.agents.environments.families import EnvironmentSettings, interpreter
from hotseat.agents.episode_jobs import EpisodeJob, current_job
from hotseat.agents.loop_watch import BlockingWarnings
from hotseat.agents.programs import check_startable, environment
from hotseat.processes import ChildProcess, exit_words, supervisor

_WORKER = Path(__file__).with_name("environment_worker.py")
_MAX_BYTES = 1 << 26
_MAX_SHOWN = 400  # characters of what a process wrote last
_ENDING_S = 5.0
_BLOCKED_S = 10.0  # that a process may take to end an episode whose time is over
_READY = 0  # the id of the first message of a process


class StartedEnvironment(ChildProcess):
    """A process of an environment, with a folder of its own.

    A supervisor ends it with what it started, and removes the folder, if this process is killed.
    """

    def __init__(self, settings: EnvironmentSettings, passed_on: Sequence[str]):
        name = secrets.token_hex(8)
        python = interpreter(settings.python)
        self._left: supervisor.Remains = {"mark": (supervisor.EPISODE, name), "folders": []}
        if settings.has_our_rights:
            self._confinement = Confinement("process group")
            env, cwd = {**os.environ, supervisor.EPISODE: name}, os.getcwd()
        else:
            folder = Path(tempfile.mkdtemp(prefix="hotseat-environment-"))
            self._left["folders"] = [str(folder)]
            self._confinement = best_confinement()
            warn_if_open(self._confinement, False)
            env, cwd = environment(folder, passed_on, {supervisor.EPISODE: name}), str(folder)
            env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", os.defpath)])
        # What it starts is found by its mark, too: it needs no control group.
        command = (*self._confinement.prefix, python, *(("-P",) if settings.has_our_rights else ()))
        self._supervisor = supervisor.start_supervisor(self._left, is_awaited=False)
        try:
            check_startable(shutil.which(python) or python)
            super().__init__(
                _WORKER,
                settings.spec,
                command=command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                imports_from=sys.path if settings.has_our_rights else (),
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


class ProcessLost(Exception):
    """The process that played an episode has ended. how: with its exit code, and the end of what it wrote.

    is_known: it is known which episode it ended with. is_to_blame: it was this one. is_over: it was closed by us.
    """

    def __init__(self, how: str, *, is_known: bool = False, is_to_blame: bool = False, is_over: bool = False):
        super().__init__(how)
        self.how, self.is_known, self.is_to_blame, self.is_over = how, is_known, is_to_blame, is_over


@dataclass(eq=False)
class _Waiting:
    """One who waits for an answer. job: the episode, in whose context its output is shown."""

    answer: asyncio.Future[Any]
    job: EpisodeJob | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    blocked_s: float = 0.0  # for how long it has blocked the process's event loop


class EnvironmentProcess:
    """A process that plays episodes. One task reads its answers; its end raises `ProcessLost` for all that wait.

    An episode that is cancelled has `_BLOCKED_S` to end; a process in which it does not is killed.
    """

    def __init__(self, settings: EnvironmentSettings, passed_on: Sequence[str], warnings: BlockingWarnings):
        self._settings = settings
        self._passed_on = passed_on
        self._warnings = warnings
        self._started: StartedEnvironment | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._cancelled: dict[int, asyncio.TimerHandle] = {}  # what kills the process if such an episode does not end
        self._numbers = itertools.count(_READY + 1)
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[_READY] = _Waiting(self._ready)
        self._reading: asyncio.Task[None] | None = None
        self._exits: tuple[int, str] | None = None  # the episode that ends the process, and how
        self._lost_s = 0.0  # for how long its event loop has been blocked
        self._is_closing = False
        self.has_ended = False

    async def ready(self) -> None:
        """Start the process, and wait until the environment is loaded."""
        if self._reading is None:
            # In a context of its own: what it logs is no episode's output.
            self._reading = contextvars.Context().run(asyncio.ensure_future, self._read())
        await asyncio.shield(self._ready)

    async def ask(self, asked: dict[str, Any]) -> Any:
        number = next(self._numbers)
        waiting = _Waiting(asyncio.get_running_loop().create_future(), current_job.get())
        self._waiting[number] = waiting
        clock = None if waiting.job is None else waiting.job.tool_clock
        if clock is not None:
            clock.leave_out(lambda: self._lost_s - waiting.blocked_s)
        try:
            self._send({"id": number, **asked})
            return await waiting.answer
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self._waiting.pop(number, None)
            if clock is not None:
                clock.leave_out(None)

    def _cancel(self, number: int) -> None:
        if not self.has_ended and self._started is not None:
            self._send({"cancel": number})
            self._cancelled[number] = asyncio.get_running_loop().call_later(_BLOCKED_S, self._kill, number)

    def _kill(self, number: int) -> None:
        """End a process in which an episode goes on after its end."""
        self._exits = number, f"a kill, since an episode had not ended {_BLOCKED_S:g} s after its time was over"
        if self._started is not None and not self.has_ended:
            self._started.kill()

    async def close(self) -> None:
        self._is_closing = True
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    def _send(self, asked: dict[str, Any]) -> None:
        if self._started is not None and self._writer is not None and not self.has_ended:
            self._writer.write(self._started.channel.frame(asked))
        elif "cancel" not in asked:
            raise self._lost(asked["id"], "an end before it was asked")

    async def _read(self) -> None:
        how, has_hung_up = "", False
        try:
            self._started = StartedEnvironment(self._settings, self._passed_on)
            reader, self._writer = await asyncio.open_connection(sock=self._started.socket)
            # Until it has ended, or sends what no environment sends.
            with contextlib.suppress(EOFError, ConnectionError, ValueError, KeyError):
                while True:
                    self._take(await self._started.channel.receive_from(reader, _MAX_BYTES))
            has_hung_up = True
        except AgentError as error:
            how = str(error)
        finally:
            self.has_ended = True
            for timer in self._cancelled.values():
                timer.cancel()
            if self._writer is not None:
                self._writer.close()
            if self._started is not None:
                how = self._started.how_it_ended(has_hung_up=has_hung_up)
            for number, waiting in self._waiting.items():
                if waiting.answer.done():
                    continue
                if number != _READY:
                    waiting.answer.set_exception(self._lost(number, how))
                else:
                    at = f"{self._settings}: its process ended with " if self._started is not None else ""
                    waiting.answer.set_exception(AgentError(f"{at}{how}"))
                waiting.answer.exception()  # nobody may be there to take it

    def _lost(self, number: int, how: str) -> ProcessLost:
        known = self._exits
        if known is None:
            return ProcessLost(how, is_over=self._is_closing)
        return ProcessLost(known[1], is_known=True, is_to_blame=known[0] == number, is_over=self._is_closing)

    def _take(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the process: an answer, or what `worker_reports.py` reports."""
        if "prints" in message:
            printing = self._waiting.get(message["prints"])
            if printing is not None:
                printing.context.run(sys.stdout.write, message["text"])  # captured, and kept under its episode
        elif "exits" in message:
            self._exits = message["exits"], message["how"]
        elif "blocked" in message:
            self._lost_s += message["s"]
            if message["blocked"] in self._waiting:
                self._waiting[message["blocked"]].blocked_s += message["s"]
            if message["where"] is not None:
                self._warnings.warn_once(message["where"])
        else:
            self._settle(message)

    def _settle(self, message: Mapping[str, Any]) -> None:
        timer = self._cancelled.pop(message["id"], None)
        if timer is not None:
            timer.cancel()
        waiting = self._waiting.get(message["id"])
        if waiting is None or waiting.answer.done():
            return  # cancelled meanwhile
        if "error" not in message:
            waiting.answer.set_result(message["result"])
            return
        is_users = self._settings.family is None and message["id"] != _READY
        error = AgentError(f"{'the agent raised' if is_users else f'{self._settings}:'} {message['error']}")
        error.shown = message["traceback"]
        waiting.answer.set_exception(error)
