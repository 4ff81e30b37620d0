"""A watch over the event loop that all episodes of a host share: an agent must not block it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable

from hotseat.agents.episode_jobs import EpisodeJob, EpisodeJobs
from hotseat.agents.user_lines import line_of
from hotseat.errors import WorkerError

_BEAT_S = 0.1
_NUM_SILENT = 5  # looks in a row without a sign of life, after which the loop counts as blocked
_NUM_OWN = 3  # of such looks, after which the time counts as the episode's own
_LATE_S = 0.25  # a beat that is so late was held up
_MAX_WARNINGS = 20  # a file has few lines that block


class BlockingWarnings:
    """Warnings about code that blocks an event loop, one for each line. name: of the agent."""

    def __init__(self, name: str, warn: Callable[[str], object]):
        self._name = name
        self._warn = warn
        self._warned: set[str] = set()

    def warn_once(self, where: str) -> None:
        if where in self._warned or len(self._warned) >= _MAX_WARNINGS:
            return
        self._warned.add(where)
        self._warn(
            f"{self._name}: {where} blocks the event loop, which all episodes share, for more than"
            f" {_NUM_SILENT * _BEAT_S:g} s: await what takes time, or let the method be plain instead of `async`, and"
            " it runs in a thread"
        )


class LoopWatch(threading.Thread):
    """Looks every tenth of a second whether the event loop still runs.

    A loop that has been blocked for half a second is warned of, once for each line of the user's. While it is blocked,
    its timers cannot keep deadlines, so those of the episode that blocks it are kept here. If it is blocked for
    `blocked_s` beyond that, the host is given up: `when_broken` is called, and then all its episodes fail.

    Other episodes are not to blame: `lost_s` is the time that their clocks leave out.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        jobs: EpisodeJobs,
        *,
        timeout_s: float,
        blocked_s: float,
        warn: Callable[[str], object],
        when_broken: Callable[[EpisodeJob | None, str], object],
    ):
        super().__init__(name="agents-watch", daemon=True)
        self.is_ending = threading.Event()
        self._loop = loop
        self._loop_thread = thread
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._blocked_s = blocked_s
        self._warnings = BlockingWarnings(jobs.name, warn)
        self._when_broken = when_broken
        self._beat = time.monotonic()
        self._lost_s = 0.0
        self._missed: dict[EpisodeJob, str] = {}  # why the loop's timers would have failed an episode

    def show_life(self) -> None:
        """Note that the loop runs, again and again. Called in the loop."""
        self._lost_s = self.lost_s()
        self._beat = time.monotonic()
        self._loop.call_later(_BEAT_S, self.show_life)

    def lost_s(self) -> float:
        """Return for how long the loop has been blocked in all."""
        late_s = time.monotonic() - self._beat - _BEAT_S
        return self._lost_s + (late_s if late_s > _LATE_S else 0.0)

    def run(self) -> None:
        beat, num_silent, num_over, looked_s = self._beat, 0, 0, time.monotonic()
        while not self.is_ending.wait(_BEAT_S):
            passed_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            if self._beat != beat:
                beat, num_silent, num_over = self._beat, 0, 0
                continue
            num_silent += 1
            job, where = self._blocking()
            if job is not None and num_silent >= _NUM_OWN:
                job.blocked_s += passed_s * (_NUM_OWN if num_silent == _NUM_OWN else 1)
            # Looks are counted, not seconds: a machine may have kept this thread waiting just as long as the loop.
            if num_silent >= _NUM_SILENT and where is not None:
                self._warnings.warn_once(where)
            if num_silent >= _NUM_SILENT and job is not None:
                self._keep_deadline(job, where)
            num_over += job is not None and job.future.done()
            is_blocked = num_silent * _BEAT_S >= self._blocked_s
            if is_blocked and (num_over * _BEAT_S >= self._blocked_s or self._is_overdue()):
                self._give_up(job, where)
                return

    def _blocking(self) -> tuple[EpisodeJob | None, str | None]:
        """Return the episode that the loop is executing, as far as it is known, and the user's line."""
        current = asyncio.current_task(self._loop)
        jobs = self._jobs.playing()
        job = next((job for job in jobs if job.task is not None and job.task is current), None)
        return job, line_of(sys._current_frames().get(self._loop_thread.ident or 0))

    def _keep_deadline(self, job: EpisodeJob, where: str | None) -> None:
        """Fail the episode that blocks the loop once its time is over: the timers cannot fire."""
        if job.tool_clock is not None and job.tool_clock.is_over():
            missed = job.tool_clock.reason
        elif time.monotonic() - job.started > self._timeout_s:
            missed = f"the agent took longer than {self._timeout_s:g} s"
        else:
            return
        if not job.future.done():
            at = "" if where is None else f", where {where} blocks the event loop of all episodes"
            self._missed[job] = f"{missed}{at}"
            self._jobs.fail(job, self._missed[job])

    def _is_overdue(self) -> bool:
        limit_s = self._timeout_s + self._blocked_s
        return any(time.monotonic() - each.started > limit_s for each in self._jobs.open())

    def _give_up(self, job: EpisodeJob | None, where: str | None) -> None:
        at = where or "an unknown place"
        reason = f"an agent blocks the event loop of its host, at {at}"
        self._jobs.stop_broken(reason)
        blamed = [job] if job is not None else [each for each in self._jobs.open() if each.started < float("inf")]
        for each in blamed:
            self._jobs.fail(each, f"the agent blocks the event loop of its host, at {at}")
        self._when_broken(job, reason if job is None else self._missed.get(job, reason))
        self._jobs.finish_all(WorkerError)
