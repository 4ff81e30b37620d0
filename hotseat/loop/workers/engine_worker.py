"""A rollout engine in its process: hosts submit requests and fetch completions, the actor pushes weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hotseat import faults
from hotseat.cluster import in_worker_process
from hotseat.cluster.activity import activity
from hotseat.determinism import keep_float32, use_deterministic_kernels
from hotseat.errors import HotseatError, RunError
from hotseat.loop.devices.held_memory import DeviceWorker, device_of_process
from hotseat.loop.workers.engine_client import FailedRequest, SampledTokens
from hotseat.loop.workers.weight_check import Canary, TakesWeights, WeightCheck
from hotseat.rollout import Engine
from hotseat.rollout.kinds import EngineProcess, EngineSettings, engine_kind
from hotseat.rollout.vllm_progress import stages_shown
from hotseat.train.lora import target_layers
from hotseat.types import Completion, Moved, Request
from hotseat.weights.transfer import Receiver

_STREAM_S = 0.02  # between two looks at the tokens of requests that stream


@dataclass(eq=False)
class _Streams:
    """Requests of a client that stream. starts: by request id, how many tokens were fetched."""

    starts: dict[str, int] = field(default_factory=dict)
    looked_s: float = 0.0  # when tokens were looked for last


class EngineWorker(DeviceWorker, TakesWeights):
    """A rollout engine in its process. Hosts submit requests and fetch completions."""

    max_concurrency = 16  # a fetch waits; requests, health checks and weights must get through meanwhile

    def __init__(self, settings: EngineSettings):
        with activity.doing(f"loading {settings.entry.title if settings.entry.compiles else 'weights'}"):
            self._engine = make_engine(settings, int(os.environ.get("RANK", "0")), activity.becomes)
        engine = self._engine
        self._receiver = Receiver(engine.load_bucket, engine.digest, engine.begin_load, engine.finish_load)
        self._changed = threading.Condition()
        self._finished: dict[str, list[Completion | FailedRequest]] = {}
        self._open: dict[str, set[str]] = {}  # ids of requests, by client
        self._streams: dict[str, _Streams] = {}  # by client
        self._is_paused = False
        self._held: list[tuple[str, Sequence[Request]]] = []  # came while paused, by client

    def submit(self, client: str, requests: Sequence[Request]) -> None:
        """Take requests of a client. While paused they wait, because an engine may be off its device."""
        with self._changed:
            if self._is_paused:
                self._held.append((client, requests))
                return
        try:
            futures = self._engine.submit_many(requests)
        except HotseatError as error:
            if len(requests) == 1:
                self._finish(client, FailedRequest(requests[0].id, error))
            else:  # the others are not to fail for one that is refused
                for request in requests:
                    self.submit(client, [request])
            return
        with self._changed:
            self._open.setdefault(client, set()).update(request.id for request in requests)
            streams = {request.id: 0 for request in requests if request.streams}
            if streams:
                self._streams.setdefault(client, _Streams()).starts.update(streams)
                self._changed.notify_all()
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(partial(self._finish_done, client, request.id))

    def fetch(self, client: str, wait_s: float) -> list[Completion | FailedRequest | SampledTokens]:
        """Return the outcomes of a client's requests, waiting at most `wait_s` for the first.

        Of requests that stream, tokens are returned as they are sampled, at most every `_STREAM_S`.
        """
        deadline = time.monotonic() + wait_s
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._finished.get(client) or self._has_streams(client),
                    timeout=max(0.0, deadline - time.monotonic()),
                )
                if self._has_streams(client):
                    next_look_s = self._streams[client].looked_s + _STREAM_S
                    self._changed.wait_for(
                        lambda: self._finished.get(client),
                        timeout=max(0.0, min(deadline, next_look_s) - time.monotonic()),
                    )
                finished = self._finished.pop(client, [])
            sampled = self._take_sampled(client)
            if finished or sampled or time.monotonic() >= deadline:
                return [*finished, *sampled]

    def _has_streams(self, client: str) -> bool:
        return client in self._streams and bool(self._streams[client].starts)

    def _take_sampled(self, client: str) -> list[SampledTokens]:
        """Return the tokens sampled since the last look for requests that stream; none if that was just now."""
        now = time.monotonic()
        with self._changed:
            streams = self._streams.get(client)
            if streams is None or not streams.starts or now < streams.looked_s + _STREAM_S:
                return []
            streams.looked_s, starts = now, dict(streams.starts)
        new = [SampledTokens(name, starts[name], tokens) for name, tokens in self._engine.sampled(starts).items()]
        with self._changed:
            for each in new:
                if each.request_id in streams.starts:
                    streams.starts[each.request_id] = each.start + len(each.token_ids)
        return new

    def abort(self, request_ids: Sequence[str]) -> None:
        names = set(request_ids)
        with self._changed:
            self._held = [(client, [each for each in held if each.id not in names]) for client, held in self._held]
        self._engine.abort(request_ids)

    def drop_requests(self, connected: Sequence[str] = ()) -> None:
        """Abort the requests of all other clients: these clients are gone, or will send them again."""
        with self._changed:
            gone = self._open.keys() - set(connected)
            names = sorted(name for client in gone for name in self._open[client])
            self._held = [(client, held) for client, held in self._held if client in connected]
        self._engine.abort(names)
        with self._changed:
            for client in gone | (self._finished.keys() - set(connected)):
                self._open.pop(client, None)
                self._streams.pop(client, None)
                self._finished.pop(client, None)

    def pause(self) -> None:
        """Stop sampling. Open requests keep their place, and the engine may leave its device with them."""
        with self._changed:
            self._is_paused = True
        self._engine.pause()

    def resume(self) -> None:
        """Resume open requests, and begin those that came meanwhile."""
        self._engine.resume()
        with self._changed:
            held, self._held, self._is_paused = self._held, [], False
        for client, requests in held:
            self.submit(client, requests)

    def _finish_done(self, client: str, request_id: str, done: Future[Completion]) -> None:
        error = done.exception()
        if error is None:
            self._finish(client, done.result())
        else:
            self._finish(
                client, FailedRequest(request_id, error if isinstance(error, Exception) else RunError(str(error)))
            )

    def _finish(self, client: str, outcome: Completion | FailedRequest) -> None:
        with self._changed:
            self._open.get(client, set()).discard(outcome.request_id)
            if client in self._streams:
                self._streams[client].starts.pop(outcome.request_id, None)
            self._finished.setdefault(client, []).append(outcome)
            self._changed.notify_all()

    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        digests = self._receiver.finish(version)
        is_offloaded = bool(self._engine.health().offloaded & self._engine.scores_with)
        log_probs = None if canary is None or is_offloaded else self.score_canary(canary)
        return WeightCheck(digests, log_probs, self._engine.undigested)

    def score_canary(self, canary: Canary) -> list[float]:
        return canary.sampled(self._engine.score(canary.sequences, canary.temperature, canary.images))

    def answer(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Return the tokens sampled for each request, when all are done. These are the canary's, not a rollout's.

        An engine that pauses resumes meanwhile, with the requests that it has open.
        """
        is_paused = self._engine.health().is_paused
        if is_paused:
            self._engine.resume()
        try:
            with faults.ignoring("generation.during"):
                return [completion.token_ids for completion in self._engine.generate(requests)]
        finally:
            if is_paused:
                self._engine.pause()

    def offload(self, parts: Sequence[Any], keep_weights: bool = True) -> Moved:
        return self._engine.offload(parts, keep_weights=keep_weights)

    def onload(self, parts: Sequence[Any]) -> Moved:
        return self._engine.onload(parts)

    def health(self) -> Any:
        return self._engine.health()

    def close(self) -> None:
        self._engine.close()


def make_engine(settings: EngineSettings, rank: int, show: Callable[[str], object] = lambda stage: None) -> Engine:
    """Make the engine of a rank. show: is called with what happens now, where the engine says so."""
    keep_float32()
    if settings.is_deterministic:
        use_deterministic_kernels()
    layers: list[str] = []
    if settings.options.adapter_rank:
        layers = target_layers(settings.model, settings.options.adapter_targets)
    process = EngineProcess(rank, device_of_process(), in_worker_process(), tuple(layers))
    with stages_shown(show):
        return engine_kind(settings.engine).make(settings, process)
