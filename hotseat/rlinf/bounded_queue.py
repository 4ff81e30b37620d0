"""The state of a bounded queue, and of a record beside it: no threads, no sockets, no clock.

A request is answered by calling what was passed with it, at once or later. In one process, `queues.py` puts a lock
around it; between processes, the broker asks on behalf of its clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hotseat.rlinf.wire import CLOSED, DONE, FAILED, ITEMS


class Waiter:
    """A request that has not been answered yet."""

    __slots__ = ("answer", "at_least", "batch", "most", "weight")

    def __init__(
        self, answer: Callable[[int, Any], None], batch: list[Any], most: int, at_least: int, weight: float = 0.0
    ):
        self.answer = answer
        self.batch = batch
        self.most = most
        self.at_least = at_least
        self.weight = weight  # of each item that is put; of the whole batch that is taken


class BoundedQueue:
    """Queue of at most `capacity` items; puts and gets are served in the order in which they came.

    A batch goes in whole or not at all. Answers: (DONE, None), (ITEMS, list), (CLOSED, None), (FAILED, reason).
    """

    def __init__(self, capacity: int, num_producers: int = 1):
        self.capacity = capacity
        self.items: deque[Any] = deque()
        self._weights: deque[float] = deque()  # one per item
        self.reason: str | None = None  # why it failed
        self._num_producers = self._producers_left = num_producers
        self._putters: deque[Waiter] = deque()
        self._getters: deque[Waiter] = deque()

    @property
    def is_closed(self) -> bool:
        return self._producers_left <= 0

    @property
    def is_as_new(self) -> bool:
        """Tell whether it is as it was made, so that a new one can take its place."""
        is_idle = not (self.items or self._putters or self._getters)
        return is_idle and self.reason is None and self._producers_left == self._num_producers

    def put(self, batch: list[Any], answer: Callable[[int, Any], None], weight: float = 0.0) -> Waiter:
        waiter = Waiter(answer, batch, 0, 0, weight)
        self._putters.append(waiter)
        self._settle()
        return waiter

    def get(self, most: int, at_least: int, answer: Callable[[int, Any], None], weight: float = 0.0) -> Waiter:
        """Ask for items. With a weight, wait until that much is there, and take no item that would exceed it."""
        waiter = Waiter(answer, [], most, at_least, weight)
        self._getters.append(waiter)
        self._settle()
        return waiter

    def cancel(self, waiter: Waiter) -> bool:
        """Withdraw a request; False if it has been answered."""
        for queue in (self._putters, self._getters):
            if waiter in queue:
                queue.remove(waiter)
                self._settle()  # it may have stood in front of one that can be served
                return True
        return False

    def close(self) -> None:
        """Record that a producer is done. The last one ends the stream."""
        self._producers_left -= 1
        self._settle()

    def fail(self, reason: str) -> None:
        """Wake everybody with the reason. The first reason stays; a stream that ended well and was read cannot fail."""
        if self.reason is None and not (self.is_closed and not self.items):
            self.reason = reason
            self.items.clear()
            self._weights.clear()
            self._settle()

    def _settle(self) -> None:
        if self.reason is not None:
            self._wake(self._putters, FAILED, self.reason)
            self._wake(self._getters, FAILED, self.reason)
            return
        if self.is_closed:
            self._wake(self._putters, CLOSED, None)
        moved = True
        while moved:
            moved = self._serve_getter() or self._serve_putter()

    def _serve_getter(self) -> bool:
        if not self._getters:
            return False
        getter = self._getters[0]
        if self.is_closed and not self.items:
            self._wake(self._getters, CLOSED, None)
            return False
        num_taken = self._num_by_weight(getter.weight) if getter.weight > 0 else self._num_by_count(getter)
        if num_taken == 0:
            return False
        self._getters.popleft()
        for _ in range(num_taken):
            self._weights.popleft()
        getter.answer(ITEMS, [self.items.popleft() for _ in range(num_taken)])
        return True

    def _num_by_count(self, getter: Waiter) -> int:
        """Return how many items the getter can take now; 0: it waits for more."""
        if len(self.items) < getter.at_least and not self.is_closed:
            return 0
        return min(getter.most, len(self.items))

    def _num_by_weight(self, limit: float) -> int:
        """Return how many items weigh `limit`, or less if the next would exceed it; 0: wait. One may be too heavy."""
        total = 0.0
        for number, weight in enumerate(self._weights):
            if number and total + weight > limit:
                return number
            total += weight
            if total >= limit:
                return number + 1
        return len(self.items) if self.is_closed else 0

    def _serve_putter(self) -> bool:
        if not self._putters:
            return False
        putter = self._putters[0]
        # A getter waits here only if it wants more than there is; its answer takes what is above the capacity.
        # Otherwise a batch that does not fit and a getter that wants more would wait for each other.
        if len(self.items) + len(putter.batch) > self.capacity and not self._getters:
            return False
        self._putters.popleft()
        self.items.extend(putter.batch)
        self._weights.extend([putter.weight] * len(putter.batch))
        putter.answer(DONE, None)
        return True

    @staticmethod
    def _wake(waiters: deque[Waiter], kind: int, payload: Any) -> None:
        while waiters:
            waiters.popleft().answer(kind, payload)


class Record:
    """A value that stays, for any number of processes to read; who asks before it is there waits.

    The end of a process that wrote or read it has no effect. Answers: (ITEMS, [value]).
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._waiters: list[Waiter] = []

    def write(self, value: Any, *, replaces: bool) -> bool:
        """Set the value; unless it replaces one, only if there is none. Tell whether it was set."""
        if self.value is not None and not replaces:
            return False
        self.value = value
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.answer(ITEMS, [value])
        return True

    def read(self, answer: Callable[[int, Any], None]) -> Waiter:
        waiter = Waiter(answer, [], 1, 1)
        if self.value is None:
            self._waiters.append(waiter)
        else:
            answer(ITEMS, [self.value])
        return waiter

    def cancel(self, waiter: Waiter) -> bool:
        """Withdraw a request; False if it has been answered."""
        if waiter not in self._waiters:
            return False
        self._waiters.remove(waiter)
        return True
