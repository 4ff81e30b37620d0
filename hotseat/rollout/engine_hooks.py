"""The hooks of a rollout engine: everything that a new engine must fill in, in one place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from hotseat.placement.role_names import Part
from hotseat.rollout.open_requests import EngineSequence


class EngineHooks(ABC):
    """The hooks of an engine, called on its background thread; `_resident_bytes` alone is called from any thread."""

    parts: frozenset[Part]  # that it keeps on the device
    can_offload: frozenset[Part]  # that it can take off the device
    scores_with: frozenset[Part]  # that must be on the device for `score`
    undigested: frozenset[str]  # weights that it has put into a form of its own, so that no digest reaches them
    keeps_cache: bool  # requests in flight keep their KV cache when weights change; False recomputes it

    @abstractmethod
    def _step(self) -> None:
        """Take in waiting requests, sample for those that run, and complete those that end."""

    @abstractmethod
    def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """Score sequences as `Engine.score` promises."""

    @abstractmethod
    def _drop(self, sequences: list[EngineSequence]) -> None:
        """Forget these requests, which may be waiting or running."""

    @abstractmethod
    def _offload_parts(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        """Take parts off the device; return the bytes that left it and the bytes copied.

        What can fail comes first: a failure leaves everything in place.
        """

    @abstractmethod
    def _onload_parts(self, parts: frozenset[Part]) -> tuple[int, int]:
        """Take parts to the device again; return the bytes that came and the bytes copied."""

    @abstractmethod
    def _resident_bytes(self) -> dict[Part, int]:
        """Return the bytes of each part that are on the device now. Called from any thread."""

    @abstractmethod
    def _prepare_load(self) -> None:
        """Forget what was computed with the old weights: new ones are about to come."""

    @abstractmethod
    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace these weights. When it returns, the sender may reuse their memory."""

    def _finish_loading(self) -> None:  # noqa: B027
        """Get requests that are in flight ready to go on: all weights are loaded."""

    @abstractmethod
    def _missing(self) -> list[str]:
        """List the weights that were not loaded since `_prepare_load`."""

    @abstractmethod
    def _digest(self, names: Collection[str] | None) -> dict[str, int]:
        """Hash live weights as `Engine.digest` promises."""

    def _pause(self) -> None:  # noqa: B027
        """Finish steps that are still under way: after this nothing is sampled until the next step."""

    def _end(self) -> None:  # noqa: B027
        """Give back what the thread held, at its end."""
