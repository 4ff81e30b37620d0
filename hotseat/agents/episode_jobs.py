"""The episodes that a host has taken and not finished, each of which gets exactly one outcome, and their deadlines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from hotseat.errors import RunError, WorkerError
from hotseat.types import Completion, Episode, Failed, Prompt, SampleKey, Sampling, ScoredEpisode

Outcome = Episode | ScoredEpisode | Failed

SCORING_S = 60.0  # that an agent has to score an episode whose policy ran out of time


@dataclass(frozen=True)
class Deadlines:
    """Time limits within an episode, beside that of the whole episode (`AgentHost`); None: no limit.

    turn_s: of the policy for one answer. tool_s: of environment, tools or program while the policy is not asked.
    scores_policy: a policy that runs out of time is cut there, and its episode is scored; else the sample fails. Tools
    that run out of time always fail it: the policy is not to blame.
    """

    turn_s: float | None = None
    tool_s: float | None = None
    scores_policy: bool = False


@dataclass(eq=False)
class ToolClock:
    """Calls `when_over` once nothing has been asked of the policy for `limit_s`. Used in one event loop.

    lost_s: returns the seconds that others have kept the loop from running, which do not count.
    """

    limit_s: float
    loop: asyncio.AbstractEventLoop
    when_over: Callable[[], object]
    lost_s: Callable[[], float]
    _timer: asyncio.TimerHandle | None = None
    _began_s: float = math.inf
    _lost_before_s: float = 0.0
    _lost_elsewhere_s: Callable[[], float] | None = None

    @property
    def reason(self) -> str:
        return (
            f"environment, tools or program took longer than {self.limit_s:g} s between answers (agent.tool_timeout_s)"
        )

    def leave_out(self, lost_s: Callable[[], float] | None) -> None:
        """Leave out what another process has lost, too, in which the episode is played from now on; None: in none."""
        self._lost_elsewhere_s = lost_s
        self._lost_before_s = self._all_lost_s()

    def _all_lost_s(self) -> float:
        return self.lost_s() + (0.0 if self._lost_elsewhere_s is None else self._lost_elsewhere_s())

    def start(self) -> None:
        self.stop()
        self._began_s, self._lost_before_s = self.loop.time(), self._all_lost_s()
        self._timer = self.loop.call_later(self.limit_s, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._began_s = math.inf

    def is_over(self) -> bool:
        """Tell whether the time is over, also while the loop cannot fire the timer."""
        return self._left_s() <= 0

    def _left_s(self) -> float:
        return self._began_s + self.limit_s + max(0.0, self._all_lost_s() - self._lost_before_s) - self.loop.time()

    def _look(self) -> None:
        left_s = self._left_s()
        if left_s > 0.001:
            self._timer = self.loop.call_later(left_s, self._look)
        else:
            self.when_over()


class EpisodeFuture(Future[Outcome]):
    """The outcome of an episode. `started_s`: when the episode began, by the monotonic clock; None before that."""

    started_s: float | None = None


@dataclass(eq=False)
class EpisodeJob:
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
    blocked_s: float = 0.0  # for how long it has blocked the event loop
    num_lost: int = 0  # processes that ended while they played it
    is_suspect: bool = False  # one of them may have ended with it
    is_given_up: bool = False  # its last request ended without an answer, as when its client is gone

    @property
    def runs_code(self) -> bool:
        """Tell whether the agent's code ran until now, instead of waiting for the policy."""
        return not self.in_flight and not self.is_given_up

    def begin_again(self) -> None:
        """Forget the sampled tokens, to play the episode from its beginning."""
        self.turns.clear()
        self.completions.clear()
        self.is_given_up = False


# The episode in whose context code runs.
current_job: contextvars.ContextVar[EpisodeJob | None] = contextvars.ContextVar("episode job", default=None)


class EpisodeJobs:
    """The jobs without an outcome. Methods may be called in any thread. name: of the agent, for messages."""

    def __init__(self, name: str):
        self.is_broken = False
        self.closed: str | None = None  # the reason why no job is taken any more
        self.name = name
        self._open: set[EpisodeJob] = set()
        self._playing: set[EpisodeJob] = set()
        self._lock = threading.Lock()

    def add(self, jobs: Iterable[EpisodeJob]) -> None:
        with self._lock:
            if self.closed is not None:
                raise WorkerError(self.closed) if self.is_broken else RunError(self.closed)
            self._open.update(jobs)

    def discard(self, job: EpisodeJob) -> None:
        with self._lock:
            self._open.discard(job)

    def open(self) -> list[EpisodeJob]:
        with self._lock:
            return list(self._open)

    def begin(self, job: EpisodeJob) -> None:
        """Count a job among those whose agents run, until `leave`: it may have an outcome before."""
        with self._lock:
            self._playing.add(job)

    def leave(self, job: EpisodeJob) -> bool:
        """Return whether the job was counted so far."""
        with self._lock:
            is_new = job in self._playing
            self._playing.discard(job)
            return is_new

    def playing(self) -> list[EpisodeJob]:
        with self._lock:
            return list(self._playing)

    @property
    def num_playing(self) -> int:
        return len(self._playing)

    def close(self) -> None:
        with self._lock:
            self.closed = self.closed or "the agent host is closed"

    def stop_broken(self, reason: str) -> None:
        """Take no more jobs, since the host cannot run them."""
        with self._lock:
            self.is_broken = True
            self.closed = reason

    def fail(self, job: EpisodeJob, reason: str) -> None:
        self.finish(job, Failed(f"{self.name}: sample {job.key}: {reason}"))

    def finish(self, job: EpisodeJob, outcome: Outcome | BaseException) -> None:
        with self._lock:
            if job not in self._open:  # another thread has finished it
                return
            self._open.discard(job)
        # Outside of the lock: a callback of the future may submit the next episode in this thread.
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if isinstance(outcome, BaseException):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)

    def finish_all(self, kind: type[RunError]) -> None:
        for job in self.open():
            self.finish(job, kind(f"{self.name}: sample {job.key}: {self.closed}"))
