"""Operations that run beside their caller."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from hotseat.rlinf.work import Lane


def test_a_coroutine_that_stops_waiting_does_not_stop_the_operation_nor_those_after_it():
    lane, may_end = Lane(), threading.Event()
    first = lane.start(lambda: may_end.wait(60))

    async def stop_waiting():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.async_wait(), 0.01)

    asyncio.run(stop_waiting())
    second = lane.start(lambda: "second")
    may_end.set()
    assert first.wait() is True
    assert second._future.result(60) == "second"


class Item:
    """What is put or taken."""


def test_a_lane_keeps_nothing_of_the_operations_that_are_done():
    lane, item = Lane(), Item()
    kept = weakref.ref(item)
    assert lane.start(lambda item=item: item).wait() is item
    del item
    until = time.monotonic() + 60
    while kept() is not None:  # until the thread of the lane has come to its next wait
        gc.collect()
        assert time.monotonic() < until
        time.sleep(0.001)
