"""A stand-in for a rollout engine: it samples nothing, and answers as late as an engine would."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotseat.algorithms.digest import tensor_digest
from hotseat.placement.role_names import Part
from hotseat.rollout.engine import Engine
from hotseat.rollout.kinds import EngineKind, EngineProcess, EngineSettings
from hotseat.rollout.open_requests import EngineSequence
from lib.simulated.costs import DECODE_STEP_S, real_s

# Tokens of an answer, log-normal. Few: the driver sees none of them, and hosts have only the cores of this machine.
MEDIAN_LENGTH = 40
SPREAD = 0.6
TOKEN = 5  # any of the vocabulary
LOG_PROB = -1.0
LEAST_WAIT_S = 0.05  # answers that end within it come together
MOST_WAIT_S = 0.25  # a command may have come just before


@dataclass(eq=False)
class _Running:
    """A request that has a slot. length: of its answer. is_stopped: a stop token ends it."""

    sequence: EngineSequence
    length: int
    is_stopped: bool
    since_s: float
    num_before: int = 0  # tokens that it had then


class SimulatedEngine(Engine):
    """Gives every request an answer whose length depends on its seed alone."""

    parts = frozenset({Part.WEIGHTS, Part.KV_CACHE})
    can_offload = parts
    scores_with = frozenset({Part.WEIGHTS})
    undigested: frozenset[str] = frozenset()
    keeps_cache = True

    def __init__(self, settings: EngineSettings, vocab_size: int):
        super().__init__(
            vocab_size=vocab_size,
            device=torch.device("cpu"),
            max_length=settings.max_length,
            num_slots=settings.num_slots,
            eos_token_ids=settings.eos_token_ids,
        )
        self._eos_id = min(settings.eos_token_ids)
        self._weights: dict[str, Tensor] = {}
        self._running: dict[str, _Running] = {}
        self._is_stopped = False
        self._start()

    def _step(self) -> None:
        """Wait until the next answers end, or somebody wants something."""
        now = time.monotonic()
        if self._is_stopped:
            for each in self._running.values():
                each.since_s = now
            self._is_stopped = False
        for sequence in self._requests.take_waiting(self._num_slots - len(self._running)):
            length = self._length(sequence)
            most = sequence.max_new_tokens
            self._running[sequence.request.id] = _Running(sequence, min(length, most), length <= most, now)
        ends_s = [
            each.since_s + real_s((each.length - each.num_before) * DECODE_STEP_S) for each in self._running.values()
        ]
        wait_s = min(MOST_WAIT_S, max(min(ends_s, default=now) - now, real_s(LEAST_WAIT_S)))
        with self._wake:
            self._wake.wait(wait_s)
        self._advance(time.monotonic())

    def _advance(self, now: float) -> None:
        """Give running requests the tokens that they have by now, and complete those that are at their end."""
        done = []
        for name, each in list(self._running.items()):
            num = min(each.length, each.num_before + int((now - each.since_s) / real_s(DECODE_STEP_S)))
            new = num - len(each.sequence.token_ids)
            if new > 0:
                last = self._eos_id if num == each.length and each.is_stopped else TOKEN
                each.sequence.extend([TOKEN] * (new - 1) + [last], [LOG_PROB] * new, self._serving.version)
            if num == each.length:
                done.append((each.sequence, each.sequence.completion("stop" if each.is_stopped else "length")))
                del self._running[name]
        self._steps.record(sum(len(sequence.token_ids) for sequence, _ in done))
        self._requests.complete(done)

    def _length(self, sequence: EngineSequence) -> int:
        drawn = random.Random(sequence.request.seed).lognormvariate(math.log(MEDIAN_LENGTH), SPREAD)
        return max(1, round(drawn))

    def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        return [[0.0, *[LOG_PROB] * (len(each) - 1)] for each in sequences]

    def _drop(self, sequences: list[EngineSequence]) -> None:
        for sequence in sequences:
            self._running.pop(sequence.request.id, None)

    def _offload_parts(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        return 0, 0

    def _onload_parts(self, parts: frozenset[Part]) -> tuple[int, int]:
        return 0, 0

    def _resident_bytes(self) -> dict[Part, int]:
        return dict.fromkeys(self.parts, 0)

    def _prepare_load(self) -> None:
        self._pause()

    def _pause(self) -> None:
        """Stop the clocks of running requests."""
        self._advance(time.monotonic())
        for each in self._running.values():
            each.num_before = len(each.sequence.token_ids)
        self._is_stopped = True

    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._weights |= {name: tensor.clone() for name, tensor in named_tensors}

    def _missing(self) -> list[str]:
        return []

    def _digest(self, names: Collection[str] | None) -> dict[str, int]:
        return {name: tensor_digest(each) for name, each in self._weights.items() if names is None or name in names}


class SimulatedKind(EngineKind):
    """Makes stand-ins."""

    def check_model(self, config: Any, max_length: int, tensor_parallel_size: int, is_cpu: bool) -> None:
        pass

    def make(self, settings: EngineSettings, process: EngineProcess) -> SimulatedEngine:
        return SimulatedEngine(settings, settings.model.config().vocab_size)
