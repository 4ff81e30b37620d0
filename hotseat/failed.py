"""`Failed` for modules that must load without torch; others import it from `hotseat.types`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    """A sample or reward that could not be made, with the reason. It is dropped and counted, never taken for a zero."""

    reason: str


@dataclass(frozen=True)
class NotApplicable(Failed):
    """The None of a reward function of TRL's form: the sample's other rewards count without it, if it has any."""
