"""The lanes of devices in the timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from hotseat.observe import Timeline
from hotseat.placement import Plan

MOST_LANES = 64  # devices that have a lane each


class DeviceLanes:
    """Draws what happens on devices: a lane for each device, or for each range of alike ones where there are many.

    Devices of a range hold the same roles, and are leased and handed over together.
    """

    def __init__(self, plan: Plan, timeline: Timeline | None):
        self._timeline = timeline
        self._names: dict[int, str] = {}
        ranges = [each for group in plan.groups for each in group.devices]
        self.are_ranges = sum(last - first + 1 for first, last in ranges) > MOST_LANES
        if self.are_ranges:
            for first, last in ranges:
                self._names |= dict.fromkeys(range(first, last + 1), f"devices {first}-{last}")

    def of(self, devices: Iterable[int]) -> list[str]:
        """Return the lanes of some devices, each once."""
        return list(dict.fromkeys(self._names.get(device, f"device {device}") for device in devices))

    def draw(self, lanes: Iterable[str], what: str, since_s: float, **about: Any) -> None:
        """Draw a span from `since_s`, by `time.time`, until now."""
        if self._timeline is not None:
            for lane in lanes:
                self._timeline.span("devices", lane, what, since_s, time.time(), **about)
