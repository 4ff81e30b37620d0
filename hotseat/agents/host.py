"""The host that runs agents: many independent episodes at a time on one event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hotseat.agents.agent import Agent, AgentError, OutOfTimeError, SingleTurn
from hotseat.agents.deadlines import SCORING_S, Deadlines, ToolClock
from hotseat.agents.fair_loop import new_event_loop
from hotseat.agents.multi_turn import MultiTurn
from hotseat.closing import Closing
from hotseat.errors import RunError, UserError, WorkerError
from hotseat.types import (
    Completion,
    Episode,
    EpisodeFacts,
    Failed,
    Prompt,
    Request,
    SampleKey,
    Sampling,
    ScoredEpisode,
    Segment,
    WhenSampled,
)

Outcome = Episode | ScoredEpisode | Failed
Ask = Callable[[Request], "Future[Completion] | Awaitable[Completion]"]

_NOT_THE_USERS = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)))
_BEAT_S = 0.1
_CANCEL_S = 1.0  # how long a cancelled episode is waited for before it is abandoned
_CUT_S = 30.0  # how long the engine may take to hand over what it has sampled of a request


@dataclass(frozen=True)
class OpenRequests:
    """Calls about requests that are not complete. None: the engine does not take them.

    abort: takes the ids of requests to end: those that nobody waits for any more, and those whose time is over, for
    which the engine then returns what it has sampled so far.
    listen: takes the id of a request that will stream, and a function for its tokens as they are sampled.
    """

    abort: Callable[[list[str]], object] | None = None
    listen: Callable[[str, WhenSampled], object] | None = None


class EpisodeFuture(Future[Outcome]):
    """The outcome of an episode. `started_s`: when the episode began, by the monotonic clock; None before that."""

    started_s: float | None = None


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    key: SampleKey
    sampling: Sampling
    future: EpisodeFuture = field(default_factory=EpisodeFuture)
    submitted: float = field(default_factory=time.monotonic)
    started: float = math.inf
    task: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None  # calls what is next if the episode does not end by itself
    in_flight: set[str] = field(default_factory=set)
    turns: set[int] = field(default_factory=set)
    completions: dict[tuple[tuple[int, ...], tuple[int, ...]], Completion] = field(default_factory=dict)
    engine_error: BaseException | None = None  # what the engine raised instead of returning a completion
    tool_clock: ToolClock | None = None  # runs while nothing is in flight
    is_out_of_time: bool = False  # the episode's time ended while the policy was asked


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
    and waits for the agents; `close` wakes it. A second thread checks whether an agent blocks the loop, for `blocked_s`
    and beyond an episode's deadline. If so, that agent's episode becomes `Failed`, all others raise `WorkerError`,
    `is_broken` is true, and the process has to be replaced. The same happens if an agent ends the loop.
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
    ):
        self.is_broken = False
        self._agent = agent
        # Programs may sample by settings of their own: those answers are not learned from.
        self._is_program = bool(getattr(agent, "samples_by_itself", False))
        # Our own agents' episodes need no check: they are made of what the engine returned.
        self._is_ours = type(agent) in (SingleTurn, MultiTurn) or bool(getattr(agent, "makes_checked_episodes", False))
        self._name = getattr(agent, "name", type(agent).__name__)
        self._ask = ask
        self._requests = requests or OpenRequests()
        self._run_seed = run_seed
        self._timeout_s = timeout_s
        self._blocked_s = blocked_s
        self._deadlines = deadlines or Deadlines()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._jobs: set[_Job] = set()
        self._waiting: deque[_Job] = deque()  # for a place among the episodes that are played at a time
        self._playing: set[_Job] = set()
        self._max_concurrent = max_concurrent
        self._closed: str | None = None
        self._is_ending = threading.Event()
        self._beat = time.monotonic()
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._watch = threading.Thread(target=self._look_after, name="agents-watch", daemon=True)
        self._thread.start()
        self._watch.start()

    def submit(self, prompt: Prompt, key: SampleKey, sampling: Sampling) -> EpisodeFuture:
        """Queue an episode, and return its future at once."""
        return self.submit_many([(prompt, key)], sampling)[0]

    def submit_many(self, samples: Sequence[tuple[Prompt, SampleKey]], sampling: Sampling) -> list[EpisodeFuture]:
        """Queue episodes that start together, so that their first requests reach the engine together."""
        jobs = [_Job(prompt, key, sampling) for prompt, key in samples]
        with self._lock:
            if self._closed is not None:
                raise WorkerError(self._closed) if self.is_broken else RunError(self._closed)
            self._jobs.update(jobs)
        with contextlib.suppress(RuntimeError):  # the loop has just ended, and raises its reason in the futures
            self._loop.call_soon_threadsafe(self._start, jobs)
        return [job.future for job in jobs]

    def close(self) -> None:
        """End all episodes. Futures that are not done raise an error. A second call does nothing."""
        with self._lock:
            self._closed = self._closed or "the agent host is closed"
        self._is_ending.set()
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        for thread in (self._thread, self._watch):
            if thread is not threading.current_thread():
                thread.join(5.0)
        self._finish_all(RunError)

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._show_life)
        try:
            self._loop.run_until_complete(self._stop.wait())
        except BaseException as error:  # a user's task raised something that is no Exception, which ends the loop
            self._break(f"an agent ended the event loop of its host: {_describe(error)}")
            self._finish_all(WorkerError)
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

    def _show_life(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(_BEAT_S, self._show_life)

    # An episode is one task with one timer: a second task to wait for the first would cost as much as its whole turn.

    def _start(self, jobs: Sequence[_Job]) -> None:
        self._waiting.extend(jobs)
        self._give_places()

    def _give_places(self) -> None:
        while self._waiting and len(self._playing) < self._max_concurrent and self._closed is None:
            job = self._waiting.popleft()
            if job.future.done() or not job.future.set_running_or_notify_cancel():
                with self._lock:
                    self._jobs.discard(job)
                continue
            self._playing.add(job)
            self._begin(job)

    def _begin(self, job: _Job) -> None:
        job.started = job.future.started_s = time.monotonic()
        job.task = self._loop.create_task(self._episode(job))
        job.task.add_done_callback(lambda _: self._leave(job))
        job.deadline = self._loop.call_later(self._timeout_s, self._end_overdue, job)
        if self._deadlines.tool_s is not None:
            job.tool_clock = ToolClock(self._deadlines.tool_s, lambda: self._end_overdue_tool(job))
            job.tool_clock.start()

    def _end_overdue(self, job: _Job) -> None:
        if self._deadlines.scores_policy and (job.in_flight or job.is_out_of_time):
            job.is_out_of_time = True
            job.deadline = self._loop.call_later(SCORING_S, self._give_up_on, job)
        else:
            self._give_up_on(job)

    def _give_up_on(self, job: _Job) -> None:
        self._cancel(job, f"the agent took longer than {self._timeout_s:g} s")

    def _end_overdue_tool(self, job: _Job) -> None:
        limit_s = self._deadlines.tool_s
        self._cancel(
            job, f"environment, tools or program took longer than {limit_s:g} s between answers (agent.tool_timeout_s)"
        )

    def _cancel(self, job: _Job, reason: str) -> None:
        """Fail an episode and cancel its task, which keeps its place for a moment if it does not end."""
        self._fail(job, reason)
        assert job.task is not None
        job.task.cancel()
        if job.deadline is not None:
            job.deadline.cancel()
        job.deadline = self._loop.call_later(_CANCEL_S, self._leave, job)

    def _leave(self, job: _Job) -> None:
        """End what belongs to an episode that has ended, or is abandoned, and give its place to the next."""
        if job not in self._playing:
            return
        self._playing.discard(job)
        if not job.future.done() and self._closed is None:
            self._fail(job, "the agent cancelled itself")
        if job.deadline is not None:
            job.deadline.cancel()
        if job.tool_clock is not None:
            job.tool_clock.stop()
        if job.in_flight and self._requests.abort is not None:
            with contextlib.suppress(Exception):
                self._requests.abort(sorted(job.in_flight))
        self._give_places()

    async def _episode(self, job: _Job) -> None:
        try:
            made = await self._agent.run(job.prompt, job.key, job.sampling, partial(self._sample, job))
            self._finish(job, _with_times(made if self._is_ours else _checked(made, job), job))
        except UserError as error:
            self._finish(job, error)
        except GeneratorExit:
            raise
        except BaseException as error:
            if job.engine_error is not None:
                self._finish(job, job.engine_error)
            elif isinstance(error, AgentError):
                self._fail(job, str(error))
            elif not isinstance(error, asyncio.CancelledError):
                self._fail(job, f"the agent raised {_describe(error)}")

    async def _sample(
        self,
        job: _Job,
        token_ids: list[int],
        sampling: Sampling,
        turn: int,
        images: tuple[str, ...] | None = None,
        when_sampled: WhenSampled | None = None,
    ) -> Completion:
        if job.future.done():
            raise AgentError("the episode is over")
        if job.is_out_of_time:
            raise OutOfTimeError(f"the episode took longer than {self._timeout_s:g} s")
        _check_request(job, token_ids, None if self._is_program else sampling, turn)
        job.turns.add(turn)
        # The number distinguishes attempts at the same sample; the seed is the same for all of them.
        name = f"{job.key}/{turn}#{next(self._numbers)}"
        seed = job.key.seed(self._run_seed, turn)
        streams = when_sampled is not None and self._requests.listen is not None
        seen = job.prompt.images if images is None else images
        request = Request(name, tuple(token_ids), sampling, seed, seen, streams)
        if when_sampled is not None and self._requests.listen is not None:
            self._requests.listen(name, when_sampled)
        asked_s = time.monotonic() - job.started
        self._begin_request(job, name)
        try:
            completion = await self._ask_in_time(job, request)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                self._abort_request(job, name)
            else:
                job.engine_error = WorkerError(f"request {name} was cancelled by the engine")
                self._end_request(job, name)
            job.turns.discard(turn)  # nobody got an answer, so the same request may come again
            raise
        except AgentError:
            self._abort_request(job, name)
            raise
        except Exception as error:
            job.engine_error = error
            self._end_request(job, name)
            raise
        self._end_request(job, name)
        if completion.finish == "abort":
            raise AgentError(f"request {name} was aborted")
        if not completion.token_ids:
            raise AgentError(f"request {name}: the engine sampled no token")
        completion = replace(completion, span_s=(asked_s, time.monotonic() - job.started))
        if not self._is_ours:
            job.completions[request.token_ids, completion.token_ids] = completion
        return completion

    def _begin_request(self, job: _Job, name: str) -> None:
        job.in_flight.add(name)
        if job.tool_clock is not None:
            job.tool_clock.stop()

    def _end_request(self, job: _Job, name: str) -> None:
        job.in_flight.discard(name)
        if not job.in_flight and job.tool_clock is not None and not job.future.done():
            job.tool_clock.start()

    def _abort_request(self, job: _Job, name: str) -> None:
        """End a request whose answer nobody waits for any more, while its episode may continue."""
        if self._requests.abort is not None:
            with contextlib.suppress(Exception):  # the reason why nobody waits is what counts
                self._requests.abort([name])
        self._end_request(job, name)

    async def _ask_in_time(self, job: _Job, request: Request) -> Completion:
        """Return the engine's answer, or what there is of it when the policy's time is over."""
        asked, limits = self._ask(request), self._deadlines
        awaited = asyncio.wrap_future(asked) if isinstance(asked, Future) else asked
        if limits.turn_s is None and not limits.scores_policy:
            return await awaited
        answer = asyncio.ensure_future(awaited)
        left_s = job.started + self._timeout_s - time.monotonic() if limits.scores_policy else math.inf
        limit_s = left_s if limits.turn_s is None else min(limits.turn_s, left_s)
        try:
            done, _ = await asyncio.wait({answer}, timeout=max(0.0, limit_s))
            if done:
                return answer.result()
            is_turn = limit_s == limits.turn_s
            if not limits.scores_policy:
                reason = f"the policy took longer than {limit_s:g} s for one answer (agent.turn_timeout_s)"
                self._fail(job, reason)
                raise AgentError(reason)
            job.is_out_of_time = job.is_out_of_time or not is_turn
            return await self._cut(job, request.id, answer)
        finally:
            if not answer.done():
                answer.cancel()

    async def _cut(self, job: _Job, name: str, answer: asyncio.Future[Completion]) -> Completion:
        """End a request, and return what the engine has sampled of it as if it had reached its limit of tokens.

        Without a token of it, the episode has no such turn: at the end of its time it consists of the earlier ones.
        """
        if self._requests.abort is not None:
            self._requests.abort([name])
            await asyncio.wait({answer}, timeout=_CUT_S)
        error = OutOfTimeError if job.is_out_of_time else AgentError
        if not answer.done() or answer.cancelled():
            raise error(f"request {name}: its time was over, and the engine did not return what it had sampled")
        completion = answer.result()
        if not completion.token_ids:
            raise error(f"request {name}: its time was over before a token was sampled")
        return replace(completion, finish="length") if completion.finish == "abort" else completion

    # --- in any thread ------------------------------------------------------------------------------------------------

    def _fail(self, job: _Job, reason: str) -> None:
        self._finish(job, Failed(f"{self._name}: sample {job.key}: {reason}"))

    def _finish(self, job: _Job, outcome: Outcome | BaseException) -> None:
        with self._lock:
            if job not in self._jobs:  # another thread has finished it
                return
            self._jobs.discard(job)
        # Outside of the lock: a callback of the future may submit the next episode in this thread.
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if isinstance(outcome, BaseException):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)

    def _finish_all(self, kind: type[RunError]) -> None:
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            self._finish(job, kind(f"{self._name}: sample {job.key}: {self._closed}"))

    def _break(self, reason: str) -> None:
        with self._lock:
            self.is_broken = True
            self._closed = reason

    def _look_after(self) -> None:
        while not self._is_ending.wait(_BEAT_S):
            now = time.monotonic()
            with self._lock:
                overdue = [job for job in self._jobs if now - job.started > self._timeout_s + self._blocked_s]
            if overdue and now - self._beat > self._blocked_s:
                self._give_up(overdue)
                return

    def _give_up(self, overdue: list[_Job]) -> None:
        """Fail the episode that the loop is executing (the overdue ones if unknown), and break off the others."""
        current = asyncio.current_task(self._loop)
        with self._lock:
            blamed = [job for job in self._jobs if job.task is not None and job.task is current] or overdue
        where = _stack_top(self._thread)
        self._break(f"an agent blocks the event loop of its host, at {where}")
        for job in blamed:
            self._fail(job, f"the agent blocks the event loop of its host, at {where}")
        self._finish_all(WorkerError)


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_request(job: _Job, token_ids: list[int], sampling: Sampling | None, turn: int) -> None:
    """Refuse a request that no episode may make. sampling: None leaves its settings to the agent."""
    for name in ("temperature", "top_p", "top_k") if sampling is not None else ():
        asked, expected = getattr(sampling, name), getattr(job.sampling, name)
        if asked != expected:
            raise UserError(
                f"an agent asked for {name} {asked}, but the run samples at {expected}, and the trainer's log-probs are"
                f" taken there: set rollout.{name}, or leave it"
            )
    if turn in job.turns:
        raise AgentError(f"turn {turn} was sampled twice: each call of an episode needs a number of its own")
    if not token_ids:
        raise AgentError("the agent asked to sample from no tokens")


def _checked(made: object, job: _Job) -> Outcome:
    """Return an agent's result after checking that its tokens are the engine's and its reward is a number."""
    episode = made.episode if isinstance(made, ScoredEpisode) else made
    if not isinstance(episode, Episode):
        raise AgentError(f"the agent returned a {type(made).__name__}, neither an Episode nor a ScoredEpisode")
    if episode.key != job.key:
        raise AgentError(f"the agent returned the episode of sample {episode.key}")
    if isinstance(made, ScoredEpisode):
        for name in ("reward", "score"):
            if not math.isfinite(getattr(made, name)):
                raise AgentError(f"the agent returned an episode with a {name} of {getattr(made, name)}")
    lengths = list(episode.turn_lengths)
    num_sampled = episode.num_sampled
    if num_sampled == 0:
        raise AgentError("the agent returned an episode without a sampled token")
    if lengths and sum(lengths) != num_sampled:
        raise AgentError(f"the agent returned turn_lengths {lengths} for {num_sampled} sampled tokens")
    for segment in episode.segments:
        _check_segment(segment, lengths if episode.turn_lengths else None, job.completions)
    return made  # type: ignore[return-value]


def _check_segment(
    segment: Segment, lengths: list[int] | None, completions: dict[tuple[tuple[int, ...], tuple[int, ...]], Completion]
) -> None:
    """Check that each turn of a segment is a completion that the engine made of the tokens before it.

    Removes the lengths of the segment's turns from the front of `lengths`.
    """
    tokens, mask = segment.token_ids.tolist(), segment.mask.tolist()
    at = 0
    while True in mask[at:]:
        at = mask.index(True, at)
        end = at + lengths.pop(0) if lengths else mask.index(False, at) if False in mask[at:] else len(mask)
        completion = completions.get((tuple(tokens[:at]), tuple(tokens[at:end])))
        if completion is None:
            raise AgentError(
                f"the agent returned tokens {at} to {end} of a segment as sampled, but the engine did not sample them"
                " after the tokens before them: let `Transcript` put the episode together"
            )
        log_probs = torch.tensor(completion.log_probs, dtype=torch.float32)
        is_same = torch.equal(segment.log_probs[at:end], log_probs)
        if not is_same or segment.versions[at:end].tolist() != list(completion.versions):
            raise AgentError(f"the agent returned tokens {at} to {end} of a segment with log-probs of its own")
        at = end


def _with_times(made: Outcome, job: _Job) -> Outcome:
    """Return an outcome with how long its episode waited and took."""
    episode = made.episode if isinstance(made, ScoredEpisode) else made
    if not isinstance(episode, Episode):
        return made
    turns = () if episode.facts is None else episode.facts.turns
    facts = EpisodeFacts(turns, job.started - job.submitted, time.monotonic() - job.started)
    episode = replace(episode, facts=facts)
    return replace(made, episode=episode) if isinstance(made, ScoredEpisode) else episode


def _describe(error: BaseException) -> str:
    """Format an error with its place: the innermost line that is neither ours nor a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (*_NOT_THE_USERS, "<frozen")
    own = [frame for frame in frames if not frame.filename.startswith(others) and "site-packages" not in frame.filename]
    frame = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _stack_top(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place"
