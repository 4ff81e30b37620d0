"""The contract of rollout engines. Every engine passes `tests/rollout/conformance.py`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hotseat.errors import UserError
from hotseat.placement.role_names import Part
from hotseat.types import Completion, Moved, Request

PARTS: tuple[Part, ...] = (Part.WEIGHTS, Part.KV_CACHE)


@dataclass(frozen=True)
class Health:
    """The state of an engine that is alive; one that is not raises instead."""

    version: int
    is_paused: bool
    is_loading: bool  # between `begin_load` and `finish_load`
    offloaded: frozenset[Part]
    resident_bytes: Mapping[Part, int]  # on the device now
    num_running: int  # requests that hold a slot
    num_waiting: int
    num_sampled: int  # tokens since the engine started
    seconds_since_step: float  # since the last decode step ended, or since the start


class Engine(Protocol):
    """An engine: generates from token ids and scores token ids, with weights that are replaced while it runs.

    Calls come from any thread. What waits, waits for a bounded time and raises `DeadlineError`. If the engine dies, its
    pending futures and every later call raise `WorkerError` with the cause.
    """

    @property
    def parts(self) -> frozenset[Part]:
        """List the parts that the engine keeps on the device."""

    @property
    def can_offload(self) -> frozenset[Part]:
        """List the parts that the engine can take off the device."""

    @property
    def scores_with(self) -> frozenset[Part]:
        """List the parts that must be on the device for `score`."""

    @property
    def keeps_cache(self) -> bool:
        """Tell what requests in flight do with their keys and values when weights change: keep, or recompute them."""

    @property
    def version(self) -> int:
        """Return the version of the weights that are served: that of the last complete load."""

    def submit(self, request: Request) -> Future[Completion]:
        """Ask for a completion. Returns at once; the future completes when this request does, whatever the others do.

        The seed decides: the same request gives the same tokens whatever else is asked, in whatever order (bit for bit
        where the engine says so). The sampled tokens include the stop token. `finish` is "stop" at a stop token,
        "length" after `max_new_tokens` or when prompt and completion fill the engine's maximum length, "abort" after
        `abort`. Log-probs are of the distribution that was sampled from, at the sampling temperature and after top-k
        and top-p; a greedy request (temperature 0) gets those of temperature 1. `Future.cancel` works while the request
        waits for its turn; later use `abort`.
        """

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Submit several requests at once, so that they can start together. If one is refused, none is taken."""

    def generate(self, requests: Sequence[Request], timeout_s: float = ...) -> list[Completion]:
        """Return all completions, in the order of the requests. After a failure or `timeout_s` the rest is aborted."""

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, images: Sequence[Sequence[str]] = ()
    ) -> list[list[float]]:
        """Score sequences: entry t is the log-prob of token t after those before it, at `temperature`; entry 0 is 0.

        images: those of each sequence; empty: no sequence has any.
        """

    def sampled(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the tokens sampled so far for requests in flight, each from a position on. Answers at once.

        starts: position by request id. Requests without new tokens are left out. The tokens of a request only grow, and
        its completion begins with them.
        """

    def abort(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """End these requests, or all, with the tokens they have. Returns the ids that were waiting or running."""

    def pause(self) -> None:
        """Stop sampling after the current step. Requests keep their place; new ones may come in and wait."""

    def resume(self) -> None:
        """Continue where `pause` stopped, with the weights that are loaded now; each token records its version."""

    def offload(self, parts: Iterable[Part], keep_weights: bool = True) -> Moved:
        """Take parts off the device. Refused while requests run, unless paused: then their cache is saved.

        keep_weights: False drops the weights instead of saving them; then nothing is generated before the next complete
        load. Requests that come while a part is offloaded are refused.
        """

    def onload(self, parts: Iterable[Part]) -> Moved:
        """Onload parts, bit for bit."""

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, under their Hugging Face names: begin, one bucket, finish."""

    def begin_load(self, version: int) -> None:
        """Start to replace all weights. Sampling stands still until the load is finished; prefixes are forgotten."""

    def load_bucket(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace some weights. Each exactly once between `begin_load` and `finish_load`."""

    def finish_load(self) -> None:
        """Serve the new version. Raises `WeightError` naming what is missing.

        After a load that failed, requests are refused and those in flight stand still until another one succeeds.
        """

    def digest(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Hash each live weight, as the next step would use it, by `tensor_digest`, under each of its names.

        names: the only ones to hash; None is all.
        """

    @property
    def undigested(self) -> frozenset[str]:
        """List weights that the engine has put into a form of its own, so that no digest reaches them."""

    def health(self) -> Health:
        """Report the engine's state. Answers at once, in the middle of a step too."""

    def close(self) -> None:
        """Close the engine. Pending futures raise. Closing twice is fine."""


# --- what every engine refuses ----------------------------------------------------------------------------------------


def check_request(request: Request, max_length: int, vocab_size: int) -> None:
    """Raise a `UserError` for a request that cannot work."""
    sampling, num_prompt = request.sampling, len(request.token_ids)
    where = f"request {request.id!r}"
    if not 0 < num_prompt < max_length:
        raise UserError(
            f"{where}: a prompt of {num_prompt} tokens; it must have at least 1 and leave room for one more within"
            f" max_length {max_length}"
        )
    _check_vocabulary(where, request.token_ids, vocab_size)
    if sampling.max_new_tokens < 1:
        raise UserError(f"{where}: max_new_tokens {sampling.max_new_tokens} must be at least 1")
    if not 0 <= sampling.temperature < math.inf:
        raise UserError(f"{where}: temperature {sampling.temperature} must be 0 (greedy) or above")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"{where}: top_p {sampling.top_p} must be above 0 and at most 1 (all)")
    if sampling.top_k < 0:
        raise UserError(f"{where}: top_k {sampling.top_k} must be 0 (all) or above")


def check_scoring(sequences: Sequence[Sequence[int]], temperature: float, max_length: int, vocab_size: int) -> None:
    """Raise a `UserError` for sequences that cannot be scored."""
    if not 0 < temperature < math.inf:
        raise UserError(f"score: temperature {temperature} must be above 0")
    for token_ids in sequences:
        if not 0 < len(token_ids) <= max_length:
            raise UserError(f"score: {len(token_ids)} tokens, must be 1 to max_length {max_length}")
        _check_vocabulary("score", token_ids, vocab_size)


def check_parts(parts: Iterable[Part], known: frozenset[Part]) -> frozenset[Part]:
    chosen = frozenset(parts)
    if not chosen <= known:
        unknown = [str(part) for part in sorted(chosen - known)]
        raise UserError(f"parts {unknown}: this engine has {[str(part) for part in sorted(known)]}")
    return chosen


def _check_vocabulary(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        stranger = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise UserError(f"{where}: token id {stranger} is not in the vocabulary of {vocab_size}")
