"""The engine of policies that act in numbers: one forward for all observations that wait."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hotseat import faults
from hotseat.errors import HotseatError, UserError
from hotseat.numeric.float_tokens import NUM_IDS, ids_of, values_of
from hotseat.numeric.models import NumericPolicy, gaussian_log_probs, steps_of
from hotseat.placement.role_names import Part
from hotseat.rollout.engine import PARTS, Engine, ServingOptions
from hotseat.rollout.kinds import EngineKind, EngineProcess, EngineSettings
from hotseat.rollout.live_weights import LiveWeights
from hotseat.rollout.open_requests import EngineSequence
from hotseat.rollout.sampling import uniforms
from hotseat.types import Completion, Request

# Rows of a forward. Always as many, because sums of a matrix product depend on its number of rows.
_BLOCK = 16


class NumericEngine(Engine):
    """Samples chunks of numbers from a Gaussian policy, for as many observations at a time as wait.

    A request is finished by one chunk, in the step that takes it: nothing runs between steps, and there is no KV cache.
    On a CPU completions are bit for bit independent of other requests.
    """

    parts: frozenset[Part] = frozenset(PARTS)
    can_offload: frozenset[Part] = frozenset(PARTS)
    scores_with: frozenset[Part] = frozenset({Part.WEIGHTS})
    undigested: frozenset[str] = frozenset()
    keeps_cache = True

    def __init__(self, model: NumericPolicy, *, device: str | torch.device = "cpu", **serving: Unpack[ServingOptions]):
        where = torch.device(device)
        super().__init__(vocab_size=NUM_IDS, device=where, **serving)
        self._model = model.to(where).eval()
        self._config = model.config
        self._weights = LiveWeights(self._model)
        self._start()

    def _checked(self, request: Request) -> EngineSequence:
        sequence = super()._checked(request)
        state_dim, num_sampled = self._config.state_dim, self._config.num_sampled
        if len(request.token_ids) != state_dim or sequence.max_new_tokens < num_sampled:
            raise UserError(
                f"request {request.id!r}: {len(request.token_ids)} numbers, and at most {sequence.max_new_tokens} to be"
                f" sampled: this policy reads {state_dim} and samples {num_sampled}"
            )
        return sequence

    def _step(self) -> None:
        """Sample for requests that wait, and complete them."""
        taken = self._requests.take_waiting(self._num_slots)
        if not taken:
            return
        faults.reach("generation.during")
        states = torch.from_numpy(values_of(np.array([sequence.prompt for sequence in taken])))
        means, log_std = self._forward(states)
        numbers = _noise(torch.tensor([sequence.request.seed for sequence in taken]), means.shape[1])
        temperatures = torch.tensor([[sequence.request.sampling.temperature] for sequence in taken])
        actions = means + numbers * torch.exp(log_std) * temperatures.sqrt()
        # Greedy requests get log-probs of temperature 1, as `Engine.submit` promises.
        at = torch.where(temperatures == 0, 1.0, temperatures)
        log_probs = gaussian_log_probs(actions, means, log_std, at)
        is_finite = log_probs.isfinite().all(1).tolist()
        version = self._serving.version
        done: list[tuple[EngineSequence, Completion | HotseatError]] = []
        rows = zip(taken, ids_of(actions.numpy()).tolist(), log_probs.tolist(), is_finite, strict=True)
        for sequence, token_ids, scores, is_sound in rows:
            if is_sound:
                sequence.extend(token_ids, scores, version)
            done.append((sequence, sequence.completion("length") if is_sound else sequence.not_finite(version)))
        self._steps.record(len(taken) * means.shape[1])
        self._requests.complete(done)

    def _forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return means [n, num_sampled] and log-deviations [num_sampled] on the host, in float32."""
        num_rows = len(states)
        blocks = functional.pad(states, (0, 0, 0, -num_rows % _BLOCK)).split(_BLOCK)
        dtype = next(self._model.parameters()).dtype
        each = [self._model(block.to(self._device, dtype)) for block in blocks]
        means = torch.cat([means for means, _ in each])[:num_rows]
        return means.float().cpu(), each[0][1].float().cpu()

    def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        # All at once, each filled up to whole steps: the canary of every push has hundreds of single ones.
        width = self._config.step_width
        filled = [token for each in sequences for token in (*each, *[0] * (-len(each) % width))]
        states, actions = steps_of(torch.tensor(filled), self._config)
        means, log_std = self._forward(states)
        of_numbers = gaussian_log_probs(actions, means, log_std, temperature)
        of_tokens = functional.pad(of_numbers, (self._config.state_dim, 0)).reshape(-1).tolist()
        lengths = [len(each) + -len(each) % width for each in sequences]
        ends = itertools.accumulate(lengths)
        return [
            of_tokens[end - length : end - length + len(each)]
            for each, length, end in zip(sequences, lengths, ends, strict=True)
        ]

    def _drop(self, sequences: list[EngineSequence]) -> None:
        pass  # none runs between steps

    def _offload_parts(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        if Part.WEIGHTS not in parts:
            return 0, 0
        num_bytes = self._weights.num_bytes
        return num_bytes, self._weights.offload(keep_weights)

    def _onload_parts(self, parts: frozenset[Part]) -> tuple[int, int]:
        if Part.WEIGHTS not in parts:
            return 0, 0
        num_copied = self._weights.onload()
        return self._weights.num_bytes, num_copied

    def _resident_bytes(self) -> dict[Part, int]:
        return {Part.WEIGHTS: self._weights.num_bytes, Part.KV_CACHE: 0}

    def _prepare_load(self) -> None:
        self._weights.names.begin()

    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._weights.load(named_tensors)

    def _missing(self) -> list[str]:
        return self._weights.names.missing()

    def _digest(self, names: Collection[str] | None) -> dict[str, int]:
        return self._weights.digest(names)


def _noise(seeds: Tensor, count: int) -> Tensor:
    """Draw standard normal numbers, [rows] int64 -> [rows, count] float32, by Box and Muller from each row's seed."""
    first, second = uniforms(seeds, 2 * count).view(-1, 2, count).unbind(1)
    return (torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)).float()


class NumericKind(EngineKind):
    """The engine of policies that act in numbers."""

    def check_model(self, config: Any, max_length: int, tensor_parallel_size: int, is_cpu: bool) -> None:
        pass  # its entry says which models it runs

    def make(self, settings: EngineSettings, process: EngineProcess) -> Engine:
        source = settings.model
        source.config()
        model = NumericPolicy.from_pretrained(source.name, dtype=getattr(torch, settings.dtype), use_safetensors=True)
        return NumericEngine(
            model,
            device=process.device,
            max_length=settings.max_length,
            num_slots=settings.num_slots,
            eos_token_ids=settings.eos_token_ids,
            num_threads=settings.num_threads,
        )
