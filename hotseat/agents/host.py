"""The host that runs agents: many independent episodes at a time on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import selectors
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hotseat.agents.agent import Agent, AgentError, PlayAgain, SingleTurn
from hotseat.agents.crash_record import CrashRecord
from hotseat.agents.engine_calls import Ask, EngineCalls, OpenRequests, checked
from hotseat.agents.episode_jobs import (
    SCORING_S,
    Deadlines,
    EpisodeFuture,
    EpisodeJob,
    EpisodeJobs,
    Outcome,
    ToolClock,
    current_job,
)
from hotseat.agents.episode_output import EpisodeLog, EpisodeOutput, current_log
from hotseat.agents.loop_watch import LoopWatch
from hotseat.agents.multi_turn import MultiTurn
from hotseat.agents.user_lines import describe_error
from hotseat.closing import Closing
from hotseat.errors import RunError, UserError, WorkerError
from hotseat.types import Episode, EpisodeFacts, Prompt, SampleKey, Sampling, ScoredEpisode

logger = logging.getLogger(__name__)

_EVENTS = 4  # that the loop handles before it looks at its timers
_CANCEL_S = 1.0  # how long a cancelled episode is waited for before it is abandoned


class AgentHost(Closing):
    """Runs one agent for many prompts, at most `max_concurrent` episodes at a time.

    `ask` reaches the engine: it takes a request and returns at once a future of the completion, or an awaitable.
    `requests` reaches it about those that are open.

    An episode that raises, or takes longer than `timeout_s`, becomes `Failed`, with the reason; the others continue.
    `deadlines` bound its parts. Where they say that the policy is scored, an answer that is not complete in time is
    cut, as at the limit of tokens; after the end of the episode's time nothing more is sampled (`OutOfTimeError`), and
    the agent has `SCORING_S` to score what there is.
    Errors that are not the episode's own failure are raised by its future: a `UserError`, and those of the engine.

    The loop runs in a thread of its own. It takes episodes from `submit` in order, gives each outcome to its future,
    and waits for the agents; `close` wakes it. A second thread, `LoopWatch`, checks whether an agent blocks the loop,
    and whether for `blocked_s` beyond a deadline of its episode. If so, that agent's episode becomes `Failed`, all
    others raise `WorkerError`, `is_broken` is true, and the process has to be replaced. The same happens if an agent
    ends the loop. `when_broken` is called just before the others raise, and need not return.

    crashes: episodes that processes before this one have died of; they are played one at a time, or not at all.
    output: keeps what agents print.
    """

    def __init__(
        self,
        agent: Agent,
        ask: Ask,
        *,
        run_seed: int,
        max_concurrent: int = 128,
        timeout_s: float = 600.0,
        blocked_s: float = 10.0,
        requests: OpenRequests | None = None,
        deadlines: Deadlines | None = None,
        crashes: CrashRecord | None = None,
        output: EpisodeOutput | None = None,
        when_broken: Callable[[], object] = lambda: None,
    ):
        self._agent = agent
        self._crashes = crashes if agent.runs_here else None
        self._output = output
        self._when_broken = when_broken
        self._jobs = EpisodeJobs(agent.name or type(agent).__name__)
        self._calls = EngineCalls(
            ask,
            requests or OpenRequests(),
            self._jobs,
            deadlines or Deadlines(),
            timeout_s=timeout_s,
            run_seed=run_seed,
            has_own_sampling=agent.samples_by_itself,
            # Our own agents' episodes need no check: they are made of what the engine returned.
            are_recorded=not (type(agent) in (SingleTurn, MultiTurn) or agent.makes_checked_episodes),
            crashes=self._crashes,
        )
        self._waiting: deque[EpisodeJob] = deque()  # for a place among the episodes that are played at a time
        self._max_concurrent = max_concurrent
        self._loop = _new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._watch = LoopWatch(
            self._loop,
            self._thread,
            self._jobs,
            timeout_s=timeout_s,
            blocked_s=blocked_s,
            warn=logger.warning,
            when_broken=self._break,
        )
        self._thread.start()
        self._watch.start()

    @property
    def is_broken(self) -> bool:
        """Whether the process has to be replaced."""
        return self._jobs.is_broken

    def submit(self, prompt: Prompt, key: SampleKey, sampling: Sampling) -> EpisodeFuture:
        return self.submit_many([(prompt, key)], sampling)[0]

    def submit_many(self, samples: Sequence[tuple[Prompt, SampleKey]], sampling: Sampling) -> list[EpisodeFuture]:
        """Queue episodes that start together, so that their first requests reach the engine together."""
        jobs = [EpisodeJob(prompt, key, sampling) for prompt, key in samples]
        self._jobs.add(jobs)
        with contextlib.suppress(RuntimeError):  # the loop has just ended, and raises its reason in the futures
            self._loop.call_soon_threadsafe(self._give_places, jobs)
        return [job.future for job in jobs]

    def close(self) -> None:
        """End all episodes. Futures that are not done raise an error. A second call does nothing."""
        self._jobs.close()
        self._watch.is_ending.set()
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        for thread in (self._thread, self._watch):
            if thread is not threading.current_thread():
                thread.join(5.0)
        self._jobs.finish_all(RunError)
        if self._crashes is not None:
            self._crashes.clear()

    def _break(self, job: EpisodeJob | None, reason: str) -> None:
        """Note what the process has to be replaced for. job: the episode to blame, which has failed."""
        if job is not None and self._crashes is not None:
            self._crashes.blame(str(job.key), reason, has_failed=True)
        self._when_broken()

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._watch.show_life)
        try:
            self._loop.run_until_complete(self._stop.wait())
        except BaseException as error:  # a user's task raised something that is no Exception, which ends the loop
            reason = f"an agent ended the event loop of its host: {describe_error(error)}"
            self._jobs.stop_broken(reason)
            self._break(None, reason)
            self._jobs.finish_all(WorkerError)
        finally:
            self._end_tasks()
            self._loop.close()

    def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(BaseException):  # nobody waits for these tasks any more
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=2 * _CANCEL_S))
        close = getattr(self._agent, "close", None)
        if inspect.iscoroutinefunction(close):
            with contextlib.suppress(Exception):  # the loop ends with it
                self._loop.run_until_complete(asyncio.wait_for(close(), 2 * _CANCEL_S))

    # An episode is one task with one timer: a second task to wait for the first would cost as much as its whole turn.

    def _give_places(self, added: Sequence[EpisodeJob] = ()) -> None:
        self._waiting.extend(added)
        struck: list[EpisodeJob] = []  # those that have to wait for another one
        while self._waiting and self._jobs.num_playing < self._max_concurrent and self._jobs.closed is None:
            job = self._waiting.popleft()
            if job.future.done():
                self._jobs.discard(job)
            elif self._is_struck(job) and any(map(self._is_struck, self._jobs.playing())):
                struck.append(job)
            elif not job.future.set_running_or_notify_cancel():
                self._jobs.discard(job)
            else:
                self._begin(job)
        self._waiting.extendleft(reversed(struck))

    def _is_struck(self, job: EpisodeJob) -> bool:
        return self._crashes is not None and self._crashes.is_struck(str(job.key))

    def _begin(self, job: EpisodeJob) -> None:
        reason = None if self._crashes is None else self._crashes.reason_to_skip(str(job.key))
        if reason is not None:
            job.future.started_s = time.monotonic()
            self._jobs.fail(job, reason)
            return
        self._jobs.begin(job)
        job.started = job.future.started_s = time.monotonic()
        tool_s = self._calls.deadlines.tool_s
        if tool_s is not None:
            job.tool_clock = clock = ToolClock(
                tool_s,
                self._loop,
                lambda: self._cancel(job, clock.reason),
                lambda: self._watch.lost_s() - job.blocked_s,
            )
            clock.start()
        job.task = self._loop.create_task(self._episode(job))
        job.task.add_done_callback(lambda _: self._leave(job))
        job.deadline = self._loop.call_later(self._calls.timeout_s, self._end_overdue, job)

    def _end_overdue(self, job: EpisodeJob) -> None:
        reason = f"the agent took longer than {self._calls.timeout_s:g} s"
        if self._calls.deadlines.scores_policy and (job.in_flight or job.is_out_of_time):
            job.is_out_of_time = True
            job.deadline = self._loop.call_later(SCORING_S, self._cancel, job, reason)
        else:
            self._cancel(job, reason)

    def _cancel(self, job: EpisodeJob, reason: str) -> None:
        """Fail an episode and cancel its task, which keeps its place for a moment if it does not end."""
        self._jobs.fail(job, reason)
        assert job.task is not None
        job.task.cancel()
        if job.deadline is not None:
            job.deadline.cancel()
        job.deadline = self._loop.call_later(_CANCEL_S, self._leave, job)

    def _leave(self, job: EpisodeJob) -> None:
        """End what belongs to an episode that has ended, or is abandoned, and give its place to the next."""
        if not self._jobs.leave(job):
            return
        if self._crashes is not None:
            self._crashes.leave(str(job.key))
        if not job.future.done() and self._jobs.closed is None:
            self._jobs.fail(job, "the agent cancelled itself")
        if job.deadline is not None:
            job.deadline.cancel()
        if job.tool_clock is not None:
            job.tool_clock.stop()
        self._calls.abort(sorted(job.in_flight))
        self._give_places()

    async def _episode(self, job: EpisodeJob) -> None:
        log, shown = EpisodeLog(str(job.key), self._output), ""
        current_log.set(log)
        current_job.set(job)
        try:
            with self._calls.code_running(job):
                made = await self._play(job, log)
            self._jobs.finish(job, _with_times(checked(made, job) if self._calls.are_recorded else made, job))
        except UserError as error:
            self._jobs.finish(job, error)
        except GeneratorExit:
            raise
        except BaseException as error:
            if job.engine_error is not None:
                self._jobs.finish(job, job.engine_error)
            elif isinstance(error, AgentError):
                shown = error.shown
                self._jobs.fail(job, str(error))
            elif not isinstance(error, asyncio.CancelledError):
                shown = "".join(traceback.format_exception(error))
                self._jobs.fail(job, f"the agent raised {describe_error(error)}")
        finally:
            log.end(shown)

    async def _play(self, job: EpisodeJob, log: EpisodeLog) -> Any:
        while True:
            try:
                return await self._agent.run(job.prompt, job.key, job.sampling, partial(self._calls.sample, job))
            except PlayAgain as lost:
                log.write(f"{lost}; the episode is played again\n")
                job.begin_again()


def _with_times(made: Outcome, job: EpisodeJob) -> Outcome:
    episode = made.episode if isinstance(made, ScoredEpisode) else made
    if not isinstance(episode, Episode):
        return made
    turns = () if episode.facts is None else episode.facts.turns
    facts = EpisodeFacts(turns, job.started - job.submitted, time.monotonic() - job.started)
    episode = replace(episode, facts=facts)
    return replace(made, episode=episode) if isinstance(made, ScoredEpisode) else episode


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop for thousands of connections.

    A loop handles everything that is ready before it looks at its timers again. Of two thousand requests that arrive
    together all would be read first, which takes a second. Where the system has epoll, few are taken at a time: the
    others stay ready, and their turn comes next.
    """
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()
    selector = selectors.EpollSelector()
    selector._selector = _FewEvents(selector._selector)  # type: ignore[attr-defined]
    return asyncio.SelectorEventLoop(selector)


class _FewEvents:
    """The system's epoll, with a cap on events per poll so that timers are not starved."""

    def __init__(self, epoll: Any):
        self._epoll = epoll

    def poll(self, timeout: float, max_events: int) -> Any:
        return self._epoll.poll(timeout, min(max_events, _EVENTS))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)
