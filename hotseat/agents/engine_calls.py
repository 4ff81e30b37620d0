"""Requests of episodes to the engine with their deadlines, and checks of what agents ask for and return."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from hotseat.agents.agent import AgentError, OutOfTimeError
from hotseat.agents.crash_record import CrashRecord
from hotseat.agents.episode_jobs import Deadlines, EpisodeJob, EpisodeJobs, Outcome
from hotseat.errors import UserError, WorkerError
from hotseat.types import Completion, Episode, Request, Sampling, ScoredEpisode, Segment, WhenSampled

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


@dataclass(eq=False)
class EngineCalls:
    """Asks the engine for the answers of all episodes, in the event loop of their host."""

    ask: Ask
    requests: OpenRequests
    jobs: EpisodeJobs
    deadlines: Deadlines
    timeout_s: float
    run_seed: int
    has_own_sampling: bool  # requests may be sampled under other settings than the run's
    are_recorded: bool  # jobs keep completions, by which their episodes are checked
    crashes: CrashRecord | None = None  # notes whose code runs
    _numbers: Iterator[int] = field(default_factory=itertools.count)

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
            raise OutOfTimeError(f"the episode took longer than {self.timeout_s:g} s")
        _check_request(job, token_ids, None if self.has_own_sampling else sampling, turn)
        job.turns.add(turn)
        # The number distinguishes attempts at the same sample; the seed is the same for all of them.
        name = f"{job.key}/{turn}#{next(self._numbers)}"
        seed = job.key.seed(self.run_seed, turn)
        paths = job.prompt.images if images is None else images
        request = Request(name, tuple(token_ids), sampling, seed, paths)
        if when_sampled is not None and self.requests.listen is not None:
            request = replace(request, streams=True)
            self.requests.listen(name, when_sampled)
        asked_s = time.monotonic() - job.started
        self._end_code(job)
        job.in_flight.add(name)
        job.is_given_up = False
        try:
            completion = await self._ask_in_time(job, request)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                self.abort([name])
            else:
                job.engine_error = WorkerError(f"request {name} was cancelled by the engine")
            job.turns.discard(turn)  # nobody got an answer, so the same request may come again
            job.is_given_up = True
            raise
        except AgentError:
            self.abort([name])
            raise
        except Exception as error:
            job.engine_error = error
            raise
        finally:
            job.in_flight.discard(name)
            if not job.in_flight and not job.future.done():
                self._begin_code(job)
        if completion.finish == "abort":
            raise AgentError(f"request {name} was aborted")
        if not completion.token_ids:
            raise AgentError(f"request {name}: the engine sampled no token")
        completion = replace(completion, span_s=(asked_s, time.monotonic() - job.started))
        if self.are_recorded:
            job.completions[request.token_ids, completion.token_ids] = completion
        return completion

    @contextlib.contextmanager
    def code_running(self, job: EpisodeJob) -> Iterator[None]:
        """Enclose the code of an episode's agent, whose time without requests is bounded."""
        if self.crashes is not None:
            self.crashes.enter(str(job.key))
        yield
        self._end_code(job)

    def _begin_code(self, job: EpisodeJob) -> None:
        if job.tool_clock is not None:
            job.tool_clock.start()
        if self.crashes is not None:
            self.crashes.enter(str(job.key))

    def _end_code(self, job: EpisodeJob) -> None:
        """Fail the episode if it took longer than tools may: a loop that it blocked has not fired the timer."""
        if self.crashes is not None:
            self.crashes.leave(str(job.key))
        clock = job.tool_clock
        if clock is not None:
            if not job.in_flight and clock.is_over():
                raise AgentError(clock.reason)
            clock.stop()

    def abort(self, names: list[str]) -> None:
        """End requests whose answers nobody waits for any more."""
        if names and self.requests.abort is not None:
            with contextlib.suppress(Exception):  # the reason why nobody waits is what counts
                self.requests.abort(names)

    async def _ask_in_time(self, job: EpisodeJob, request: Request) -> Completion:
        """Return the engine's answer, or what there is of it when the policy's time is over."""
        asked, limits = self.ask(request), self.deadlines
        awaited = asyncio.wrap_future(asked) if isinstance(asked, Future) else asked
        if limits.turn_s is None and not limits.scores_policy:
            return await awaited
        answer = asyncio.ensure_future(awaited)
        left_s = job.started + self.timeout_s - time.monotonic() if limits.scores_policy else math.inf
        limit_s = left_s if limits.turn_s is None else min(limits.turn_s, left_s)
        try:
            done, _ = await asyncio.wait({answer}, timeout=max(0.0, limit_s))
            if done:
                return answer.result()
            is_turn = limit_s == limits.turn_s
            if not limits.scores_policy:
                reason = f"the policy took longer than {limit_s:g} s for one answer (agent.turn_timeout_s)"
                self.jobs.fail(job, reason)
                raise AgentError(reason)
            job.is_out_of_time = job.is_out_of_time or not is_turn
            return await self._cut(job, request.id, answer)
        finally:
            if not answer.done():
                answer.cancel()

    async def _cut(self, job: EpisodeJob, name: str, answer: asyncio.Future[Completion]) -> Completion:
        """End a request, and return the tokens sampled so far as if it had reached its limit of tokens.

        Raises if there are none: an episode that is out of time then consists of its earlier turns.
        """
        if self.requests.abort is not None:
            self.requests.abort([name])
            await asyncio.wait({answer}, timeout=_CUT_S)
        error = OutOfTimeError if job.is_out_of_time else AgentError
        if not answer.done() or answer.cancelled():
            raise error(f"request {name}: its time was over, and the engine did not return what it had sampled")
        completion = answer.result()
        if not completion.token_ids:
            raise error(f"request {name}: its time was over before a token was sampled")
        return replace(completion, finish="length") if completion.finish == "abort" else completion


def _check_request(job: EpisodeJob, token_ids: list[int], sampling: Sampling | None, turn: int) -> None:
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


def checked(made: object, job: EpisodeJob) -> Outcome:
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
