"""Processes that take buckets. They are spawned, so what they get was pickled."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hotseat.algorithms.digest import tensor_digest
from hotseat.weights.broadcast import BroadcastData, BroadcastGroup
from hotseat.weights.bucket import Bucket
from hotseat.weights.transfer import Receiver, Sender
from hotseat.weights.transports import Transport

START_S = 120.0  # to start a process and import torch on a busy machine


def weights(seed: int, num: int = 6, size: int = 1000) -> list[tuple[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(size + i, generator=made)) for i in range(num)]


class Holding:
    """The least engine: it keeps what it gets."""

    def __init__(self, device: str = "cpu"):
        self._device = device
        self.weights: dict[str, torch.Tensor] = {}

    def begin_load(self, version: int) -> None:
        self.weights = {}

    def load_bucket(self, named_tensors: Any) -> None:
        for name, tensor in named_tensors:
            self.weights[name] = tensor.to(self._device, copy=True)
        if self._device != "cpu":
            torch.cuda.synchronize()

    def finish_load(self) -> None:
        pass

    def digest(self, names: object = None) -> dict[str, int]:
        return {name: tensor_digest(tensor) for name, tensor in self.weights.items()}


def serve(connection: Any, device: str) -> None:
    """Answers ("begin", version), ("take", bucket), ("finish", version), ("die", bucket); None ends it."""
    if device != "cpu":
        torch.cuda.set_device(device)
    engine = Holding(device)
    receiver = Receiver(engine.load_bucket, engine.digest, engine.begin_load, engine.finish_load)
    connection.send("ready")
    while (message := connection.recv()) is not None:
        what, value = message
        if what == "die":
            os._exit(3)
        try:
            answer = getattr(receiver, what)(value)
        except Exception as error:
            answer = error
        connection.send(answer)


class Engine:
    """A receiving process, seen from the test."""

    def __init__(self, device: str):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, what: str, value: Any) -> None:
        self._connection.send((what, value))

    def answer(self, timeout_s: float = 60.0) -> Any:
        assert self._connection.poll(timeout_s), "no answer"
        return self._connection.recv()

    def call(self, what: str, value: Any) -> Any:
        self.start(what, value)
        answer = self.answer()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def engines(num: int, device: str = "cpu") -> Iterator[list[Engine]]:
    made = [Engine(device) for _ in range(num)]
    try:
        for engine in made:
            assert engine.answer(START_S) == "ready"
        yield made
    finally:
        for engine in made:
            engine.process.kill()
            engine.process.join(10)


def push(
    sender: Sender,
    receivers: list[Engine],
    version: int,
    transport: Transport,
    broadcast_group: BroadcastGroup | None = None,
) -> float:
    """All weights to all receivers, as the loop does it. Returns the seconds that the buckets took."""
    sender.begin(version, broadcast_group)
    for engine in receivers:
        engine.call("begin", version)
    started_s = time.monotonic()
    num_bytes = sender.pack_next()
    while num_bytes is not None:
        bucket = sender.packed(transport)
        for rank, engine in enumerate(receivers, 1):
            engine.start("take", as_rank(bucket, rank))
        if transport == "broadcast":
            sender.broadcast()
        num_bytes = sender.pack_next()
        for engine in receivers:
            answer = engine.answer()
            if isinstance(answer, Exception):
                raise answer
    sender.finish()
    return time.monotonic() - started_s


def as_rank(bucket: Bucket, rank: int) -> Bucket:
    if not isinstance(bucket.data, BroadcastData):
        return bucket
    return replace(bucket, data=replace(bucket.data, first_rank=rank))
