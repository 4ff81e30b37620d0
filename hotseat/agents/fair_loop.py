"""An event loop that takes few events at a time, so that a burst of them does not make timers late."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

_EVENTS = 4  # at a time


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop for thousands of connections.

    A loop handles everything that is ready before it looks at its timers again. Of two thousand requests that arrive
    together all would be read first, which takes a second. Where the system has epoll, few are taken at a time: the
    others stay ready, and their turn comes next.
    """
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()
    selector = selectors.EpollSelector()
    selector._selector = _FewEvents(selector._selector)  # type: ignore[attr-defined]
    return asyncio.SelectorEventLoop(selector)


class _FewEvents:
    """The system's epoll, with a cap on events per poll so that timers are not starved."""

    def __init__(self, epoll: Any):
        self._epoll = epoll

    def poll(self, timeout: float, max_events: int) -> Any:
        return self._epoll.poll(timeout, min(max_events, _EVENTS))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)
