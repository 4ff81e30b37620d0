"""Agents whose episodes are played in other processes, and what data asks of environments."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.agents.agent import AgentError, PlayAgain
from hotseat.agents.black_box import BlackBox
from hotseat.agents.environments.environment_process import EnvironmentProcess, ProcessLost, StartedEnvironment
from hotseat.agents.environments.environment_worker import PolicyClient
from hotseat.agents.environments.families import EnvironmentSettings
from hotseat.agents.episode_jobs import current_job
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.agents.loop_watch import BlockingWarnings
from hotseat.agents.per_loop import PerLoop
from hotseat.errors import UserError
from hotseat.processes import WorkerDied
from hotseat.types import Prompt

logger = logging.getLogger(__name__)

_ALONE = -1  # the place of the process for one episode at a time
_MAX_LOST = 3  # processes that an episode may lose to others, before it is played alone


@dataclass(eq=False)
class _Processes:
    """The processes of one event loop, by their place, and the place of each next episode."""

    started: dict[int, EnvironmentProcess] = field(default_factory=dict)
    places: Iterator[int] = field(default_factory=itertools.count)
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentAgent(BlackBox):
    """Has episodes played by processes in which an environment's library, or a user's `play`, runs, a few for many.

    If a process ends, its episodes are played again. Those whose code ran at the time are played one after another: if
    the process ends again, that tells which one it was, and this sample fails.
    """

    runs_here = False

    def __init__(self, policy: ServedPolicy, environment: EnvironmentSettings):
        super().__init__(policy)
        self._environment = environment
        self._processes = PerLoop(_Processes)
        self.name = str(environment)
        self._warnings = BlockingWarnings(self.name, logger.warning)

    async def play(self, prompt: Prompt, client: PolicyClient) -> Any:
        job = current_job.get()
        if job is not None and job.is_suspect:
            async with self._processes.here().alone:
                try:
                    return await self._play_at(_ALONE, prompt, client)
                except ProcessLost as lost:
                    raise AgentError(f"its process ended twice with it: {lost.how}") from None
        place = next(self._processes.here().places) % self._environment.num_processes
        try:
            return await self._play_at(place, prompt, client)
        except ProcessLost as lost:
            if job is None or lost.is_over:
                raise AgentError(f"its process ended with {lost.how}") from None
            job.num_lost += 1
            job.is_suspect = job.num_lost >= _MAX_LOST or lost.is_to_blame or (not lost.is_known and job.runs_code)
            raise PlayAgain(f"its process ended with {lost.how}") from None

    async def _play_at(self, place: int, prompt: Prompt, client: PolicyClient) -> Any:
        started = self._processes.here().started
        process = started.get(place)
        if process is None or process.has_ended:
            made = EnvironmentProcess(self._environment, self._settings.passed_on, self._warnings)
            process = started[place] = made
        await process.ready()
        return await process.ask({"play": {"text": prompt.text, "label": prompt.label, "client": vars(client)}})

    async def close(self) -> None:
        processes = self._processes.take()
        for process in () if processes is None else processes.started.values():
            await process.close()
        await super().close()


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
        answer = _next_answer(started)
        if asked is not None and "error" not in answer:
            answer = {}
            started.send(asked)
            answer = _next_answer(started)
    except WorkerDied:
        pass
    finally:
        how = started.how_it_ended(has_hung_up=not answer)
    if not answer:
        raise UserError(f"agent.environment: {settings}: its process ended with {how}")
    if "error" in answer:
        raise UserError(f"agent.environment: {settings}: {answer['error']}")
    return answer["result"]


def _next_answer(started: StartedEnvironment) -> dict[str, Any]:
    """Return the next message that is no report of what is printed or blocked."""
    while "id" not in (message := started.receive()):
        continue
    return dict(message)
