"""POST requests to one HTTP server or several that do the same work, with retries, pauses and deadlines."""

from __future__ import annotations

import asyncio
import atexit
import json
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import aiohttp

from hotseat.closing import Closing
from hotseat.errors import RunError
from hotseat.failed import Failed
from hotseat.rewards.addresses import TOKEN
from hotseat.rewards.answers import BadAnswer, Score, read_answer
from hotseat.rewards.scorer import SampleGroup, Scorer, named_samples, to_stderr
from hotseat.words import quantity, without_url_secrets

_CONNECT_TIMEOUT_S = 10.0
_KEEP_IDLE_S = 2.0  # many servers close a connection that was idle for five seconds
_LOOK_EVERY_S = 0.1  # while no server can be reached
_MAX_ANSWER_BYTES = 64 << 20
_MAX_SHOWN = 200  # characters of an answer that cannot be used
_LONGEST_PAUSE_S = 30.0
_FIRST_REST_S, _LONGEST_REST_S = 0.5, 5.0
_RANDOM = random.Random()  # not the global one, which agents draw from
_NOT_THERE = (502, 503)  # a proxy in front of a server that is down, or a server that starts or stops


class _Unreachable(Exception):
    """No server took the request."""


class _Busy(Exception):
    """The server asks to send the request later."""

    def __init__(self, problem: str, after_s: float):
        super().__init__(problem)
        self.after_s = after_s


class _Broken(Exception):
    """The server took the request and gave no usable answer."""


class _Refused(Exception):
    """The server rejects the request; it would reject it again."""


@dataclass(frozen=True)
class _Job:
    body: bytes
    ids: tuple[str, ...]
    read: Callable[[bytes, str], Any]
    failed: Callable[[Failed], Any]
    future: Future[Any]


class Poster(Closing):
    """Posts bodies to one server or several, `max_open` at a time, and hands on what is read from their answers.

    A request that breaks, takes longer than `timeout_s`, or has another status or another answer is made again after a
    pause, `retries` times at most, by another server if there is one. A server that cannot be reached (or answers 502
    or 503) costs no attempt: others take its requests; with no other, each request waits for it up to `timeout_s`, so a
    server may be restarted. Requests that a server rejects (other statuses 4xx) are not repeated. After that, the
    result is `Failed`, with address, reason and samples named.

    token: sent as a bearer token. back_off_s: first pause between attempts; each is twice the last one, less a random
    share. report: is called with a line when a server begins to fail, and when it answers again.

    One thread runs all requests; `post` may be called from any. `close` ends it within seconds.
    """

    kind: str  # of servers, such as "reward server"
    url_key: str  # the option that holds their addresses
    token_name: str  # the environment variable that holds the bearer token

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 180.0,
        retries: int = 4,
        max_open: int = 64,
        token: str | None = None,
        back_off_s: float = 0.5,
        report: Callable[[str], object] | None = None,
    ):
        self.timeout_s = timeout_s
        self.retries = retries
        self._servers = Servers(urls)
        self._token = token
        self._back_off_s = back_off_s
        self._report = report or to_stderr
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_jobs = 0  # that have no result yet
        started: Future[asyncio.AbstractEventLoop] = Future()
        name = self.kind.replace(" ", "-")
        self._thread = threading.Thread(target=self._serve, args=(started, max_open), name=name, daemon=True)
        self._thread.start()
        self._loop = started.result(60.0)
        atexit.register(self.close)

    def post(
        self,
        body: bytes,
        ids: Sequence[str],
        read: Callable[[bytes, str], Any],
        failed: Callable[[Failed], Any] = lambda failure: failure,
    ) -> Future[Any]:
        """Make one request. `ids` name the samples in messages.

        read: returns the result from an answer and the address that gave it, or raises `BadAnswer`. failed: returns the
        result where there is no answer. Both are called in the thread.
        """
        job = _Job(body, tuple(ids), read, failed, Future())
        with self._lock:
            if self._is_closed:
                raise RunError(f"the client of {self.kind}s is closed")
            asyncio.run_coroutine_threadsafe(self._run(job), self._loop)
        return job.future

    def close(self) -> None:
        """End the thread and its requests. Unfinished futures raise an error. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        atexit.unregister(self.close)
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _serve(self, started: Future[asyncio.AbstractEventLoop], max_open: int) -> None:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"

        async def serve() -> None:
            self._stop = asyncio.Event()
            self._places = asyncio.Semaphore(max_open)
            connect_s = min(_CONNECT_TIMEOUT_S, self.timeout_s)
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=connect_s),
                headers=headers,
            ) as self._session:
                started.set_result(asyncio.get_running_loop())
                await self._stop.wait()
                jobs = asyncio.all_tasks() - {asyncio.current_task()}
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)

        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _run(self, job: _Job) -> None:
        """Get a job's answer, and give the result to its future, whatever happens."""
        if not job.future.set_running_or_notify_cancel():
            return
        if self._num_jobs == 0:
            self._servers.begin()
        self._num_jobs += 1
        try:
            async with self._places:
                result = await self._answer(job)
        except asyncio.CancelledError:
            samples = named_samples(job.ids)
            problem = f"the client of {self.kind}s was closed before {samples} had an answer"
            job.future.set_exception(RunError(problem))
        except BaseException as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        finally:
            self._num_jobs -= 1

    async def _answer(self, job: _Job) -> Any:
        """Ask servers until one answers, or the attempts or the time to wait for one are used up."""
        num_attempts, problem = 0, ""
        last: Server | None = None
        busy_since_s: float | None = None
        while True:
            now_s = self._loop.time()
            # All requests have waited as long as the first: a server that is away for good is found out once.
            waits_since_s = self._servers.away_since_s if busy_since_s is None else busy_since_s
            if waits_since_s is not None and now_s - waits_since_s >= self.timeout_s:
                return self._failed(job, f"{problem or self._servers.problems()} (tried for {self.timeout_s:g} s)")
            server = self._servers.choose(now_s, last)
            if server is None:
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            try:
                result = await self._ask(server.url, job)
            except _Unreachable as error:
                self._note_failure(server, str(error), is_reachable=False)
            except _Busy as error:
                busy_since_s = now_s if busy_since_s is None else busy_since_s
                self._servers.released(server)
                problem = f"{server.url}: {error}"
                await asyncio.sleep(max(error.after_s, self._pause_s(1)))
            except _Refused as error:
                self._servers.answered(server)
                return self._failed(job, f"{server.url}: {error}")
            except (_Broken, BadAnswer) as error:
                busy_since_s, last, problem = None, server, ""
                self._note_failure(server, str(error), is_reachable=True)
                num_attempts += 1
                if num_attempts > self.retries:
                    return self._failed(job, f"{server.url}: {error} ({quantity(num_attempts, 'attempt')})")
                await asyncio.sleep(self._pause_s(num_attempts))
            except BaseException:
                self._servers.released(server)
                raise
            else:
                if server.num_failures:
                    self._report(f"{self.kind} {without_url_secrets(server.url)}: answers again")
                self._servers.answered(server)
                return result

    def _note_failure(self, server: Server, problem: str, *, is_reachable: bool) -> None:
        was_well = not server.num_failures
        self._servers.failed(server, self._loop.time(), problem, is_reachable=is_reachable)
        if was_well:
            self._report(without_url_secrets(f"{self.kind} {server.url}: {problem}; trying again"))

    def _pause_s(self, num_attempts: int) -> float:
        longest_s = min(_LONGEST_PAUSE_S, self._back_off_s * 2.0 ** (num_attempts - 1))
        return longest_s * _RANDOM.uniform(0.5, 1.0)

    def _failed(self, job: _Job, reason: str) -> Any:
        return job.failed(Failed(f"{self.kind} {without_url_secrets(reason)}; {named_samples(job.ids)}"))

    async def _ask(self, url: str, job: _Job) -> Any:
        """Make one request. Raises one of the errors above, or `BadAnswer`."""
        try:
            async with self._session.post(url, data=job.body, allow_redirects=False) as response:
                status, headers, content = response.status, response.headers, await _content(response)
        except aiohttp.ConnectionTimeoutError:
            raise _Unreachable("no connection in time") from None
        except aiohttp.ClientConnectorError as error:
            raise _Unreachable(f"cannot be reached: {error.strerror or error}") from None
        except TimeoutError:
            raise _Broken(f"no answer within {self.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Broken(f"the connection broke: {str(error) or type(error).__name__}") from None
        if 200 <= status < 300:
            return job.read(content, without_url_secrets(url))
        if self._token:  # which some proxies quote in their refusals
            content = content.replace(self._token.encode(), b"***")
        problem = f"status {status}: {excerpt(content)}"
        if status in _NOT_THERE:
            raise _Unreachable(problem)
        if status == 429:
            after = headers.get("Retry-After", "")
            raise _Busy(problem, min(float(after), _LONGEST_PAUSE_S) if after.isdecimal() else 0.0)
        if status == 408 or status >= 500:
            raise _Broken(problem)
        if 300 <= status < 400:
            place = headers.get("Location", "nowhere")
            raise _Refused(f"status {status}: it redirects to {place}; set {self.url_key} to where it answers")
        if status == 401:
            raise _Refused(f"{problem}; the environment variable {self.token_name} holds the token to send")
        raise _Refused(problem)


async def _content(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise _Broken(f"its answer is larger than {_MAX_ANSWER_BYTES >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


def read_json(content: bytes) -> Any:
    """Return the JSON of an answer; raises `BadAnswer` if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadAnswer(f"its answer is no JSON: {excerpt(content)}") from None


def excerpt(content: bytes) -> str:
    """Return the beginning of an answer, for a message."""
    text = " ".join(content[: 4 * _MAX_SHOWN].decode(errors="replace").split())
    return (text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}...") or "(empty)"


# --- reward servers that speak OpenRLHF's protocol --------------------------------------------------------------------


class RewardService(Poster, Scorer):
    """Scores groups by one HTTP server or several, `max_open` groups at a time, each in one request; see `Poster`.

    A request is a POST to the URL as given, with `query` (prompt and answer), `prompts` and `labels`, one entry per
    sample. The answer is an object: `rewards` is required, `scores` defaults to it, `extra_logs` is optional. Where no
    server answers, the group's samples are `Failed`. A reward in a good answer that is null or not finite fails its
    sample alone.
    """

    kind, url_key, token_name = "reward server", "reward.url", TOKEN

    def score(self, group: SampleGroup) -> Future[list[Score | Failed]]:
        body = json.dumps({"query": group.queries, "prompts": group.prompts, "labels": group.labels}).encode()
        names = group.ids
        return self.post(body, names, lambda content, url: _read(content, url, names), lambda why: [why] * len(names))


def _read(content: bytes, url: str, ids: Sequence[str]) -> list[Score | Failed]:
    answer = read_json(content)
    if not isinstance(answer, dict):
        raise BadAnswer(f"its answer is no object with 'rewards': {excerpt(content)}")
    return [
        sample if isinstance(sample, Score) else Failed(f"reward server {url}: {sample.reason}; sample {name}")
        for sample, name in zip(read_answer(answer, len(ids)), ids, strict=True)
    ]


# --- the choice among servers, by what became of earlier requests -----------------------------------------------------


@dataclass
class Server:
    """One server, and what is known of it."""

    url: str
    num_open: int = 0  # requests without an answer yet
    num_failures: int = 0  # in a row
    is_reachable: bool = True
    away_since_s: float | None = None  # since then it could not be reached, as far as requests have tried
    rests_until_s: float = 0.0  # others are preferred until then
    last_use: int = 0  # number of the request, over all servers
    problem: str = ""  # of the last failure


class Servers:
    """Chooses the server of each request: of those that work, the one with the fewest open requests.

    A server that failed rests, longer after each failure in a row, while others work. One that cannot be reached gets
    nothing meanwhile; after the rest one request tries it, and others follow when it has answered.
    """

    def __init__(self, urls: Sequence[str]):
        self.all = [Server(url) for url in urls]
        self._num_requests = 0

    def choose(self, now_s: float, avoid: Server | None = None) -> Server | None:
        """Return the server for a request, which counts as open from now on; None if none can take it now.

        avoid: is chosen only if nothing else is left.
        """
        able = [each for each in self.all if each.is_reachable or (now_s >= each.rests_until_s and each.num_open == 0)]
        if not able:
            return None
        chosen = min(able, key=lambda each: (now_s < each.rests_until_s, each is avoid, each.num_open, each.last_use))
        self._num_requests += 1
        chosen.last_use = self._num_requests
        chosen.num_open += 1
        return chosen

    @property
    def away_since_s(self) -> float | None:
        """The time since which no server could be reached; None if one can, or nothing has tried."""
        times = [each.away_since_s for each in self.all]
        return None if None in times else max(time for time in times if time is not None)

    def begin(self) -> None:
        """Count anew how long servers are away: nothing has tried them for a while."""
        for each in self.all:
            each.away_since_s = None

    def answered(self, server: Server) -> None:
        server.num_open -= 1
        server.num_failures = 0
        server.is_reachable = True
        server.away_since_s = None
        server.rests_until_s = 0.0
        server.problem = ""

    def failed(self, server: Server, now_s: float, problem: str, *, is_reachable: bool) -> None:
        """Note that a server took no request, or took one and gave no usable answer (is_reachable)."""
        server.num_open -= 1
        server.is_reachable = is_reachable
        server.away_since_s = None if is_reachable else now_s if server.away_since_s is None else server.away_since_s
        server.problem = problem
        server.rests_until_s = now_s + min(_LONGEST_REST_S, _FIRST_REST_S * 2.0**server.num_failures)
        server.num_failures = min(server.num_failures + 1, 30)

    def released(self, server: Server) -> None:
        """Note that a request ended without telling anything about the server."""
        server.num_open -= 1

    def problems(self) -> str:
        """Return the last problem of every server that has one."""
        return "; ".join(f"{each.url}: {each.problem}" for each in self.all if each.problem)
