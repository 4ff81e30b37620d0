"""Objects that an agent keeps for each event loop that plays its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Kept = TypeVar("Kept")


class PerLoop(Generic[Kept]):
    """An object for each event loop, made when its loop first asks.

    An agent may get a second host while the first one still closes: what the first one ends is its own only.
    """

    def __init__(self, make: Callable[[], Kept]):
        self._make = make
        self._kept: WeakKeyDictionary[asyncio.AbstractEventLoop, Kept] = WeakKeyDictionary()

    def here(self) -> Kept:
        """Return the object of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._kept:
            self._kept[loop] = self._make()
        return self._kept[loop]

    def take(self) -> Kept | None:
        """Return the object of the running loop, which has none from now on; None if it never asked."""
        return self._kept.pop(asyncio.get_running_loop(), None)
