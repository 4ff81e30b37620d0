"""vLLM as a rollout engine: its scheduler and model runner, stepped by the engine's own thread.

vLLM schedules, caches prefixes and samples. This module keeps requests and the weight version of each sampled token.
`vllm_worker` runs in vLLM's workers; what differs between versions is in `vllm_versions` and `vllm_internals`.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from hotseat import faults
from hotseat.algorithms.digest import combine_digests
from hotseat.algorithms.nf4 import quantise_layers
from hotseat.algorithms.routing import RoutingShape
from hotseat.errors import DeadlineError, HotseatError, RunError, UserError, WeightError
from hotseat.model_source import ModelSource
from hotseat.placement.role_names import Part
from hotseat.rollout.engine import PARTS, Engine, ServingOptions, check_scoring
from hotseat.rollout.live_weights import WeightNames
from hotseat.rollout.open_requests import EngineSequence
from hotseat.rollout.vllm_versions import SCORED_AT_ONCE, AdapterOptions, Core, PromptScores, Sampled
from hotseat.types import Completion, Request
from hotseat.vision import policy_class

_MAX_REASON = 400  # characters of vLLM's error message


class VllmEngine(Engine):
    """The engine on vLLM.

    The same request gives the same tokens only up to rounding, which differs from batch to batch: not bit for bit.

    core: vLLM, started; the engine closes it. names: the weights of the model. max_length: at most the core's.
    keeps_cache: requests in flight keep their KV cache when weights change; False recomputes it. routing: what the
    routing of a token is made of, where the core returns it.
    """

    parts: frozenset[Part] = frozenset(PARTS)
    scores_with: frozenset[Part] = frozenset(PARTS)

    def __init__(
        self,
        core: Core,
        names: WeightNames,
        *,
        keeps_cache: bool = False,
        routing: RoutingShape | None = None,
        **serving: Unpack[ServingOptions],
    ):
        self.can_offload: frozenset[Part] = frozenset() if core.is_cpu else frozenset(PARTS)
        device = torch.device("cpu") if core.is_cpu else torch.device("cuda", torch.cuda.current_device())
        super().__init__(vocab_size=core.vocab_size, device=device, **serving)
        self.keeps_cache = keeps_cache
        self.sees_images = core.sees_images
        self.placeholder_ids = core.placeholder_ids
        self._routing_dtype = None if routing is None else routing.dtype
        self._core = core
        started = core.call("hotseat_start", names, timeout_s=self._call_timeout_s)
        problem = next((rank["problem"] for rank in started if "problem" in rank), None)
        if problem is not None:
            raise RunError(problem)
        self._part_bytes = sum((Counter(rank["bytes"]) for rank in started), Counter())
        self.undigested: frozenset[str] = frozenset(started[0]["undigested"])
        # Sequences that vLLM runs, by the name that it knows; touched by the background thread alone.
        self._running: dict[str, EngineSequence] = {}
        self._num_named = 0
        self._start()

    def _checked(self, request: Request) -> EngineSequence:
        sequence = super()._checked(request)
        self._core.check_images(request.token_ids, request.images)
        return sequence

    # --- one step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        for sequence in self._requests.take_waiting(self._num_slots - len(self._running)):
            # A name that is used once: a step of an aborted request may still be in flight when its id is reused.
            self._num_named += 1
            name = f"{self._num_named}/{sequence.request.id}"
            self._running[name] = sequence
            self._core.add(name, sequence.request, sequence.max_new_tokens, sorted(sequence.stop_ids), self._salt)
        faults.reach("generation.during")
        self._take(self._core.step())

    @property
    def _salt(self) -> str | None:
        """Name the requests that may share cached blocks: those of one version, where blocks of older weights stay."""
        return str(self._serving.version) if self.keeps_cache else None

    def _take(self, step: list[Sampled]) -> None:
        """Add what a step sampled to its sequences; complete those that end."""
        done: list[tuple[str, Completion | HotseatError]] = []
        running_on: list[str] = []  # ended here, while vLLM would sample more
        num_sampled = 0
        for sampled in step:
            sequence = self._running.get(sampled.request_id)
            if sequence is None:
                continue  # aborted while it was in flight
            if sampled.routing is not None and self._routing_dtype is not None:
                rows = sampled.routing.reshape(len(sampled.routing), -1)
                sequence.routing.append(rows.astype(self._routing_dtype))
            for token_id, log_prob in zip(sampled.token_ids, sampled.log_probs, strict=True):
                if not math.isfinite(log_prob):
                    done.append((sampled.request_id, sequence.not_finite(self._serving.version)))
                    running_on.append(sampled.request_id)
                    break
                finish = sequence.extend([token_id], [log_prob], self._serving.version)
                num_sampled += 1
                if finish is not None:
                    done.append((sampled.request_id, sequence.completion(finish)))
                    if sequence.stop is not None:
                        running_on.append(sampled.request_id)
                    break
            else:
                assert not sampled.is_finished, f"vLLM ended request {sampled.request_id!r} and we did not"
        self._steps.record(num_sampled)
        if running_on:
            self._core.abort(running_on)
        self._requests.complete([(self._running.pop(name), outcome) for name, outcome in done])

    def _pause(self) -> None:
        self._take(self._core.drain())

    def _drop(self, sequences: list[EngineSequence]) -> None:
        dropped = {id(sequence) for sequence in sequences}
        names = [name for name, sequence in self._running.items() if id(sequence) in dropped]
        for name in names:
            del self._running[name]
        self._core.abort(names)

    def _end(self) -> None:
        self._core.close()

    # --- what is asked between steps ----------------------------------------------------------------------------------

    def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        scores = self._scores(sequences, images, temperature)
        return [[0.0] if each is None else [0.0, *each.log_probs[:, 0].tolist()] for each in scores]

    def likely_tokens(
        self, sequences: Sequence[Sequence[int]], temperature: float, num_likely: int, vocab_size: int | None = None
    ) -> list[PromptScores | None]:
        """Return the most likely tokens at each place of sequences but the first; None for one of a single token.

        vocab_size: log-probs are of the distribution over the first tokens of the vocabulary; None: over all.
        """
        check_scoring(sequences, temperature, self._max_length, self._vocab_size)
        seen: list[Sequence[str]] = [()] * len(sequences)

        @torch.inference_mode()
        def score() -> list[PromptScores | None]:
            self._serving.raise_unless_scorable(self.scores_with)
            return self._scores(sequences, seen, temperature, num_likely, vocab_size)

        return self._thread.call("likely_tokens", score)

    def _scores(
        self,
        sequences: Sequence[Sequence[int]],
        images: Sequence[Sequence[str]],
        temperature: float,
        num_likely: int = 0,
        vocab_size: int | None = None,
    ) -> list[PromptScores | None]:
        longest = max(map(len, sequences), default=0)
        if longest >= self._core.max_length:
            raise UserError(
                f"score: {longest} tokens; vLLM samples one more to score them, and the model has room for"
                f" {self._core.max_length}: at most {self._core.max_length - 1}"
            )
        for tokens, seen in zip(sequences, images, strict=True):
            self._core.check_images(tokens, seen)
        self._pause()
        if self._running and not self._core.has_room_for(sorted(map(len, sequences))[-SCORED_AT_ONCE:]):
            self._core.forget_cache()  # requests in flight give up their keys, and compute them again afterwards
        self._core.call("hotseat_score_by", temperature, vocab_size, timeout_s=self._call_timeout_s)
        scores: list[PromptScores | None] = [None] * len(sequences)
        chosen = [index for index, tokens in enumerate(sequences) if len(tokens) > 1]
        with self._core.alone():
            for start in range(0, len(chosen), SCORED_AT_ONCE):
                self._score_some(sequences, images, chosen[start : start + SCORED_AT_ONCE], num_likely, scores)
            self._core.drain()
        return scores

    def _score_some(
        self,
        sequences: Sequence[Sequence[int]],
        images: Sequence[Sequence[str]],
        chosen: list[int],
        num_likely: int,
        scores: list[PromptScores | None],
    ) -> None:
        asked = {}
        for index in chosen:
            self._num_named += 1
            name = f"{self._num_named}/score"
            asked[name] = index
            self._core.add_to_score(name, sequences[index], images[index], self._salt, num_likely)
        deadline = time.monotonic() + self._call_timeout_s
        while asked:
            for sampled in self._core.step():
                if sampled.prompt is not None:
                    index = asked[sampled.request_id]
                    before = scores[index]
                    both = (sampled.prompt,) if before is None else (before, sampled.prompt)
                    scores[index] = PromptScores(*(torch.cat(each) for each in zip(*both, strict=True)))
                if sampled.is_finished:
                    del asked[sampled.request_id]
            if time.monotonic() > deadline:
                self._core.abort(list(asked))
                raise DeadlineError(
                    f"score: {len(asked)} of {len(sequences)} sequences had no answer in {self._call_timeout_s:g} s"
                )

    def _offload_parts(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        chosen = sorted(str(part) for part in parts & self.can_offload)
        if not chosen:
            return 0, 0
        self._pause()
        self._core.forget_cache()
        moved = self._core.call("hotseat_offload", chosen, keep_weights, timeout_s=self._call_timeout_s)
        return sum(left for left, _ in moved), sum(copied for _, copied in moved)

    def _onload_parts(self, parts: frozenset[Part]) -> tuple[int, int]:
        chosen = sorted(str(part) for part in parts & self.can_offload)
        if not chosen:
            return 0, 0
        moved = self._core.call("hotseat_onload", chosen, timeout_s=self._call_timeout_s)
        return sum(came for came, _ in moved), sum(copied for _, copied in moved)

    def _resident_bytes(self) -> dict[Part, int]:
        gone = self._serving.offloaded & self.can_offload
        return {part: 0 if part in gone else self._part_bytes[part] for part in PARTS}

    # --- weights ------------------------------------------------------------------------------------------------------

    def _prepare_load(self) -> None:
        self._pause()
        # What vLLM forgets here, it computes again after the load.
        if not self.keeps_cache and Part.KV_CACHE not in self._serving.offloaded & self.can_offload:
            self._core.forget_cache()
        self._core.call("hotseat_begin_load", timeout_s=self._call_timeout_s)

    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._core.tensor_parallel_size > 1 and isinstance(named_tensors, Iterator):
            # A view is pickled with the bytes of its whole bucket: other processes get copies.
            named_tensors = [(name, tensor.clone()) for name, tensor in named_tensors]
        for problem in self._core.call("hotseat_load", named_tensors, timeout_s=self._call_timeout_s):
            if problem is not None:
                raise WeightError(problem)

    def _missing(self) -> list[str]:
        missing: list[str] = self._core.call("hotseat_missing", timeout_s=self._call_timeout_s)[0]
        return missing

    def _digest(self, names: Collection[str] | None) -> dict[str, int]:
        counted: dict[str, list[int]] = {}
        copies: dict[tuple[str, tuple[int, ...]], int] = {}
        chosen = None if names is None else frozenset(names)
        for rank, pieces in enumerate(self._core.call("hotseat_digest", chosen, timeout_s=self._call_timeout_s)):
            if isinstance(pieces, str):
                raise WeightError(pieces)
            for name, offset, digest, is_counted in pieces:
                if copies.setdefault((name, offset), digest) != digest:
                    raise WeightError(f"tensor-parallel rank {rank} holds another {name} than a rank before it")
                if is_counted:
                    counted.setdefault(name, []).append(digest)
        return {name: combine_digests(parts) for name, parts in counted.items()}


def weight_names(model: ModelSource, adapters: AdapterOptions | None = None, has_nf4: bool = False) -> WeightNames:
    """List the weights of a Hugging Face model, from its config alone, and the factors of adapters.

    has_nf4: its linear layers are in NF4, and have bytes and scales.
    """
    config = model.config()
    with torch.device("meta"):
        empty = policy_class(config).from_config(config, **model.arguments)
    empty.tie_weights()
    names = WeightNames.of(empty)
    names = names if adapters is None else names.with_adapters(adapters.layers, adapters.rank)
    if not has_nf4:
        return names
    quantise_layers(empty)
    in_nf4 = WeightNames.of(empty)
    return WeightNames(in_nf4.shapes, in_nf4.first_names, names.factors)


def log_to(path: Path) -> dict[str, str]:
    """Return the environment that sends the log of vLLM and its workers to a file; set it before importing vLLM."""
    path.parent.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(path), "formatter": "plain"},
            "stages": {"class": "hotseat.rollout.vllm_progress.StageHandler"},
        },
        "loggers": {"vllm": {"handlers": ["file", "stages"], "level": "INFO", "propagate": False}},
    }
    described = path.with_suffix(".logging.json")
    described.write_text(json.dumps(settings))
    return {"VLLM_LOGGING_CONFIG_PATH": str(described), "VLLM_CONFIGURE_LOGGING": "1"}


def start_error(error: Exception, model: str, log: Path) -> RunError:
    """Make a short error of why vLLM did not start: its own may list every model that it knows. The log gets all."""
    logging.getLogger("vllm").error("vLLM did not start", exc_info=error)
    problems = getattr(error, "errors", None)  # of pydantic: one for each field
    reason = "; ".join(str(each["msg"]) for each in problems()) if callable(problems) else str(error)
    if len(reason) > _MAX_REASON:
        reason = f"{reason[:_MAX_REASON]} ..."
    return RunError(f"vLLM did not start with the model {model}: {type(error).__name__}: {reason}\nits log: {log}")
