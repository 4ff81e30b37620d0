"""The state of a bounded queue, and of a record beside it: no threads, no sockets, no clock.

A request is answered by calling what was passed with it, at once or later, by which it can also be withdrawn. In one
process, `queues.py` puts a lock around it; between processes, the broker asks on behalf of its clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hotseat.rlinf.wire import DONE, FAILED, ITEMS

Answer = Callable[[int, Any], None]


class BoundedQueue:
    """Queue of at most `capacity` items; puts and gets are served in the order in which they came.

    Answers: (DONE, None), (ITEMS, list), (FAILED, reason).
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.items: deque[tuple[Any, float]] = deque()  # each with its weight
        self.reason: str | None = None  # why it failed
        self._putters: deque[tuple[Answer, Any, float]] = deque()
        self._getters: deque[tuple[Answer, float]] = deque()

    @property
    def is_as_new(self) -> bool:
        """Tell whether it is as it was made, so that a new one can take its place."""
        return not (self.items or self._putters or self._getters) and self.reason is None

    def put(self, item: Any, weight: float, answer: Answer) -> None:
        self._putters.append((answer, item, weight))
        self._settle()

    def get(self, weight: float, answer: Answer) -> None:
        """Ask for items of this weight together, or less if the next would exceed it; 0: for one item."""
        self._getters.append((answer, weight))
        self._settle()

    def cancel(self, answer: Answer) -> bool:
        """Withdraw a request; False if it has been answered."""
        for waiting in (self._putters, self._getters):
            for number, request in enumerate(waiting):
                if request[0] == answer:
                    del waiting[number]
                    self._settle()  # it may have stood in front of one that can be served
                    return True
        return False

    def fail(self, reason: str) -> None:
        """Wake everybody with the reason, and drop the items. The first reason stays."""
        if self.reason is None:
            self.reason = reason
            self.items.clear()
            self._settle()

    def _settle(self) -> None:
        if self.reason is not None:
            for waiting in (self._putters, self._getters):
                while waiting:
                    waiting.popleft()[0](FAILED, self.reason)
            return
        while self._serve_getter() or self._serve_putter():
            pass

    def _serve_getter(self) -> bool:
        if not self._getters:
            return False
        answer, weight = self._getters[0]
        num_taken = self._num_by_weight(weight) if weight > 0 else min(1, len(self.items))
        if num_taken == 0:
            return False
        self._getters.popleft()
        answer(ITEMS, [self.items.popleft()[0] for _ in range(num_taken)])
        return True

    def _num_by_weight(self, limit: float) -> int:
        """Return how many items weigh `limit`, or less if the next would exceed it; 0: wait. One may be too heavy."""
        total = 0.0
        for number, (_, weight) in enumerate(self.items):
            if number and total + weight > limit:
                return number
            total += weight
            if total >= limit:
                return number + 1
        return 0

    def _serve_putter(self) -> bool:
        # A getter waits here only if it wants more than there is: without room for that, both would wait for ever.
        if not self._putters or (len(self.items) >= self.capacity and not self._getters):
            return False
        answer, item, weight = self._putters.popleft()
        self.items.append((item, weight))
        answer(DONE, None)
        return True


class Record:
    """A value that stays, for any number of processes to read; who asks before it is there waits.

    The end of a process that wrote or read it has no effect. Answers: (ITEMS, [value]).
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._readers: list[Answer] = []

    def write(self, value: Any, *, replaces: bool) -> None:
        """Set the value; unless it replaces one, only if there is none."""
        if self.value is None or replaces:
            self.value = value
            readers, self._readers = self._readers, []
            for answer in readers:
                answer(ITEMS, [value])

    def read(self, answer: Answer) -> None:
        if self.value is None:
            self._readers.append(answer)
        else:
            answer(ITEMS, [self.value])

    def cancel(self, answer: Answer) -> bool:
        """Withdraw a request; False if it has been answered."""
        if answer not in self._readers:
            return False
        self._readers.remove(answer)
        return True
