"""`Failed`, for code that must load without torch; elsewhere it is known as `hotseat.types.Failed`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    """What stands in the place of a sample or a reward that there is not: dropped and counted, never a zero."""

    reason: str
