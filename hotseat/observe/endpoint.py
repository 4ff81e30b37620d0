"""Serves a run's metrics to Prometheus, and its health, by HTTP.

A thread of its own answers, from values that the loop leaves behind: it takes no lock of the loop, clients have a
deadline, and an answer is made at most once a second, however often it is asked for.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotseat import __version__
from hotseat.closing import Closing
from hotseat.connections import Connections
from hotseat.observe.machine_use import PREFIX
from hotseat.observe.run_progress import RunProgress

_MAX_CONNECTIONS = 64
_HEADERS_S = 5.0
_BACKLOG = 64
_MADE_ANEW_S = 1.0


class Endpoint(Closing):
    """Answers `GET /metrics` and `GET /healthz` at a bound socket, until it is closed.

    labels: facts about the run. machine: returns the newest figures of the machine. token: what clients have to show.
    """

    def __init__(
        self,
        bound: socket.socket,
        run_progress: RunProgress,
        labels: Mapping[str, str],
        machine: Callable[[], Mapping[str, float]],
        say: Callable[..., object],
        token: str | None = None,
    ):
        bound.listen(_BACKLOG)
        self._progress = run_progress
        self._labels = labels
        self._machine = machine
        self._say = say
        self._token = token
        self._page = 0.0, b""  # when it was made
        self._connections = Connections(_MAX_CONNECTIONS, headers_s=_HEADERS_S)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(bound,), name="metrics endpoint", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Return the number of clients that are connected."""
        return self._connections.unknown.num_connections

    def close(self) -> None:
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5.0)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self, bound: socket.socket) -> None:
        with bound:
            try:
                self._loop.run_until_complete(self._serve(bound))
            except Exception as error:
                self._say(f"the metrics endpoint ended: {type(error).__name__}: {error}", kind="warning")
        self._loop.close()

    async def _serve(self, bound: socket.socket) -> None:
        app = web.Application(middlewares=[self._connections.watch], client_max_size=1024)
        app.router.add_get("/metrics", self._answer_metrics)
        app.router.add_get("/healthz", self._answer_health)
        runner = self._connections.runner(app, shutdown_s=1.0)
        await runner.setup()
        server = await self._connections.listen(runner, bound, _BACKLOG)
        try:
            await self._stop.wait()
        finally:
            server.close()
            await runner.cleanup()

    async def _answer_metrics(self, request: web.Request) -> web.StreamResponse:
        if not self._is_allowed(request):
            headers = {"WWW-Authenticate": "Bearer"}
            return web.Response(status=401, text="the token is missing or wrong\n", headers=headers)
        made_s, page = self._page
        if not page or time.monotonic() - made_s > _MADE_ANEW_S:
            page = generate_latest(_Families(self._families))
            self._page = time.monotonic(), page
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _answer_health(self, request: web.Request) -> web.StreamResponse:
        made = self._progress
        quiet_s, limit_s = made.quiet_s, made.limit_s
        answer: dict[str, Any] = {"status": "ok" if quiet_s <= limit_s else "stuck"}
        if self._is_allowed(request):
            answer |= {
                "step": made.steps_made,
                "num_steps": made.num_steps,
                "doing": made.doing,
                "since": made.since_s,
                "without_progress_s": round(quiet_s, 3),
                "limit_s": round(limit_s, 3),
            }
        return web.json_response(answer, status=200 if quiet_s <= limit_s else 503)

    def _is_allowed(self, request: web.Request) -> bool:
        if self._token is None:
            return True
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        sent, expected = (each.encode(errors="surrogateescape") for each in (token.strip(), self._token))
        return kind.lower() == "bearer" and hmac.compare_digest(sent, expected)

    def _families(self) -> Iterator[Metric]:
        made = self._progress
        is_healthy = float(made.quiet_s <= made.limit_s)
        run = GaugeMetricFamily("hotseat_run_info", "The run. Always 1.", labels=[*self._labels, "version"])
        run.add_metric([*map(_printable, self._labels.values()), __version__], 1.0)
        yield run
        for name, text, value in (
            ("hotseat_step", "Last step that was finished.", float(made.steps_made)),
            ("hotseat_steps", "Steps that the run makes.", float(made.num_steps)),
            (
                "hotseat_healthy",
                "1: the run makes progress; 0: none for too long.",
                is_healthy,
            ),
            ("hotseat_without_progress_seconds", "Seconds since the last progress.", made.quiet_s),
            ("hotseat_without_progress_limit_seconds", "Seconds without progress that are too long.", made.limit_s),
        ):
            yield GaugeMetricFamily(name, text, value)
        phase = GaugeMetricFamily("hotseat_phase_since_seconds", "Begin of the present phase.", labels=["phase"])
        phase.add_metric([_printable(made.doing)], made.since_s)
        yield phase
        events = CounterMetricFamily("hotseat_events", "Messages of this process, by kind.", labels=["kind"])
        for kind, number in made.num_events.copy().items():
            events.add_metric([kind], float(number))
        yield events
        # One family, whose label is the name in metrics.jsonl: names may have any characters.
        metrics = GaugeMetricFamily("hotseat_metric", "Metrics of the last step, by name.", labels=["name"])
        for name, value in {_printable(name): value for name, value in made.metrics.items()}.items():
            metrics.add_metric([name], float(value))
        yield metrics
        machine = GaugeMetricFamily("hotseat_machine", "Present use of the driver's machine, by name.", labels=["name"])
        for name, value in self._machine().items():
            machine.add_metric([name.removeprefix(PREFIX)], value)
        yield machine


class _Families(Collector):
    """The part of a registry that `generate_latest` uses."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]):
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def _printable(text: str) -> str:
    """Remove what is no valid character from a text: names of metrics come from users' functions."""
    return text.encode(errors="replace").decode()
