"""The state in which an engine serves: paused, parts offloaded, weights half loaded; and what it refuses then."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from hotseat.errors import RunError, WeightError
from hotseat.placement.role_names import Part


class ServingState:
    """The state that decides whether requests may come and be stepped.

    Every method but `raise_unless_...` and `is_held` locks for itself; the lock may be held already.

    version: of the weights that are served.
    """

    def __init__(self, lock: threading.Condition, version: int):
        self._lock = lock
        self.version = version
        self.is_paused = False
        self.offloaded: frozenset[Part] = frozenset()
        self.loading: int | None = None  # the version that is being loaded
        self._broken: str | None = None  # why the weights are not those of any version

    def is_held(self) -> bool:
        """Tell whether sampling is stopped, whatever requests there are."""
        return self.is_paused or self.loading is not None or self._broken is not None or bool(self.offloaded)

    # --- checks -----------------------------------------------------------------------------------------------------

    def raise_unless_ready(self) -> None:
        """Raise unless requests can be served: now, or as soon as it is resumed or the load in progress is finished."""
        if self.offloaded:
            raise RunError(f"{' and '.join(sorted(self.offloaded))} offloaded: onload before generating or scoring")
        if self._broken is not None:
            raise WeightError(self._broken)

    def raise_unless_scorable(self, needed: frozenset[Part]) -> None:
        """Raise unless given tokens can be scored now, which takes the `needed` parts."""
        with self._lock:
            missing = self.offloaded & needed
            if missing:
                raise RunError(f"{' and '.join(sorted(missing))} offloaded: onload before scoring")
            if self.loading is not None:
                raise RunError(f"score: weights of version {self.loading} are being loaded")
            if self._broken is not None:
                raise WeightError(self._broken)

    def raise_unless_weights(self, purpose: str) -> None:
        """Raise unless the weights are on the device."""
        if Part.WEIGHTS in self.offloaded:
            raise RunError(f"weights offloaded: onload before {purpose}")

    # --- parts ------------------------------------------------------------------------------------------------------

    def begin_offload(self, parts: frozenset[Part], num_in_flight: int) -> frozenset[Part]:
        """Mark parts as offloaded, so that requests are refused from here on; return those that were resident."""
        with self._lock:
            if num_in_flight and not self.is_paused:
                raise RunError(
                    f"offload: {num_in_flight} requests in flight: wait for them, abort them, or pause first"
                )
            if self.loading is not None:
                raise RunError(f"offload: weights of version {self.loading} are being loaded: finish the load first")
            parts = parts - self.offloaded
            self.offloaded |= parts
        return parts

    def end_onload(self, parts: frozenset[Part]) -> None:
        """Mark parts as resident: they are on the device again, or have never left it."""
        with self._lock:
            self.offloaded -= parts

    def drop_weights(self) -> None:
        """Mark the weights as lost: they were offloaded without a copy."""
        with self._lock:
            self._broken = "the weights were dropped when they were offloaded: load new ones first"

    # --- loads ------------------------------------------------------------------------------------------------------

    def begin_load(self, version: int) -> None:
        with self._lock:
            self.raise_unless_weights("loading new ones")
            self.loading, self._broken = version, None

    def raise_unless_loading(self, operation: str) -> None:
        if self.loading is None:
            raise RunError(f"{operation}: no load has begun: call begin_load first")

    def finish_load(self, missing: list[str]) -> None:
        """Serve the version that was loaded; raise if weights of it are missing."""
        if missing:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            self.fail_load(f"missing {names}")
            raise WeightError(self._broken)
        assert self.loading is not None
        with self._lock:
            self.version, self.loading = self.loading, None

    def fail_load(self, reason: str) -> None:
        """Mark the weights as those of no version, since a load has failed."""
        with self._lock:
            self._broken = f"weights of version {self.loading} were loaded in part ({reason}): load them all again"
            self.loading = None


@dataclass
class StepCounter:
    """A count of tokens sampled since the engine started, and the time of its last step."""

    num_sampled: int = 0
    last_step: float = field(default_factory=time.monotonic)

    def record(self, num_sampled: int) -> None:
        """Record the end of a step that sampled so many tokens."""
        self.num_sampled += num_sampled
        self.last_step = time.monotonic()
