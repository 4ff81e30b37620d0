"""Requests of episodes to the engine, and the deadlines of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from hotseat.agents.agent import AgentError, OutOfTimeError
from hotseat.agents.deadlines import Deadlines
from hotseat.agents.episode_checks import check_request
from hotseat.agents.episode_jobs import EpisodeJob, EpisodeJobs
from hotseat.errors import WorkerError
from hotseat.types import Completion, Request, Sampling, WhenSampled

Ask = Callable[[Request], "Future[Completion] | Awaitable[Completion]"]

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


class EngineCalls:
    """Asks the engine for the answers of all episodes, in the event loop of their host.

    has_own_sampling: requests may be sampled under other settings than the run's. are_recorded: jobs keep completions,
    by which their episodes are checked.
    """

    def __init__(
        self,
        ask: Ask,
        requests: OpenRequests,
        jobs: EpisodeJobs,
        deadlines: Deadlines,
        *,
        timeout_s: float,
        run_seed: int,
        has_own_sampling: bool,
        are_recorded: bool,
    ):
        self._ask = ask
        self._requests = requests
        self._jobs = jobs
        self._deadlines = deadlines
        self._timeout_s = timeout_s
        self._run_seed = run_seed
        self._has_own_sampling = has_own_sampling
        self._are_recorded = are_recorded
        self._numbers = itertools.count()

    async def sample(
        self,
        job: EpisodeJob,
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
        check_request(job, token_ids, None if self._has_own_sampling else sampling, turn)
        job.turns.add(turn)
        # The number distinguishes attempts at the same sample; the seed is the same for all of them.
        name = f"{job.key}/{turn}#{next(self._numbers)}"
        seed = job.key.seed(self._run_seed, turn)
        streams = when_sampled is not None and self._requests.listen is not None
        paths = job.prompt.images if images is None else images
        request = Request(name, tuple(token_ids), sampling, seed, paths, streams)
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
        if self._are_recorded:
            job.completions[request.token_ids, completion.token_ids] = completion
        return completion

    def _begin_request(self, job: EpisodeJob, name: str) -> None:
        job.in_flight.add(name)
        if job.tool_clock is not None:
            job.tool_clock.stop()

    def _end_request(self, job: EpisodeJob, name: str) -> None:
        job.in_flight.discard(name)
        if not job.in_flight and job.tool_clock is not None and not job.future.done():
            job.tool_clock.start()

    def _abort_request(self, job: EpisodeJob, name: str) -> None:
        """End a request whose answer nobody waits for any more, while its episode may continue."""
        if self._requests.abort is not None:
            with contextlib.suppress(Exception):  # the reason why nobody waits is what counts
                self._requests.abort([name])
        self._end_request(job, name)

    def abort_all(self, job: EpisodeJob) -> None:
        """End the requests of an episode that has ended."""
        if job.in_flight and self._requests.abort is not None:
            with contextlib.suppress(Exception):
                self._requests.abort(sorted(job.in_flight))

    async def _ask_in_time(self, job: EpisodeJob, request: Request) -> Completion:
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
                self._jobs.fail(job, reason)
                raise AgentError(reason)
            job.is_out_of_time = job.is_out_of_time or not is_turn
            return await self._cut(job, request.id, answer)
        finally:
            if not answer.done():
                answer.cancel()

    async def _cut(self, job: EpisodeJob, name: str, answer: asyncio.Future[Completion]) -> Completion:
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
