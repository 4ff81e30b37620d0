"""Bounded queues that carry failures, between processes and within one: what channels are made of.

`put` waits while the queue is full, so a fast producer is held back by a slow consumer. The death of a process that
used the queue wakes every waiter at once with the reason. Every wait has a deadline.

Between processes an item crosses two sockets, by way of a broker (`broker.py`). Sockets, not actor calls: one closes
when the process at its other end is killed, which is how the others learn of it, and it is several times as fast. Of a
large item on one machine only a descriptor crosses them: the producer writes its bytes to memory without a name, which
the consumer maps, and which the system frees with the last process that has it. CUDA tensors inside items stay on their
device (`device_items/`).
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from hotseat.cluster import Cluster
from hotseat.errors import DeadlineError, WorkerError
from hotseat.rlinf import wire
from hotseat.rlinf.bounded_queue import Answer, BoundedQueue, Record
from hotseat.rlinf.broker import Broker, BrokerAddress, BrokerClient, client_of


class Queue:
    """A queue of at most `capacity` items. link: to the queue itself, which is in a broker or in this process.

    Any number of workers may put and get; they are served in the order in which they ask.
    """

    def __init__(self, name: str, capacity: int, link: BrokerClient | _LocalLink, *, timeout_s: float = 600.0):
        if capacity < 1:
            raise ValueError(f"channel {name!r}: capacity {capacity} must be at least 1")
        self.name = name
        self.capacity = capacity
        self.timeout_s = timeout_s
        self.link = link

    def put(self, item: Any, *, weight: float = 0.0, timeout_s: float | None = None) -> None:
        """Wait for room, then put the item in. Its weight counts in `get_weight`."""
        waits = self._deadline(timeout_s)
        kind, payload = self.link.put(item, weight, waits)
        if kind != wire.DONE:
            self._raise(kind, payload, "to put an item", waits)

    def get(self, *, timeout_s: float | None = None) -> Any:
        """Wait for an item and take it out."""
        return self._take(0.0, "for an item", timeout_s)[0]

    def get_weight(self, weight: float, *, timeout_s: float | None = None) -> list[Any]:
        """Take items until they weigh that much together, or until the next one would exceed it.

        An item that is too heavy by itself is taken alone.
        """
        if not weight > 0:
            raise ValueError(f"channel {self.name!r}: a batch of weight {weight}; it must be above 0")
        return self._take(weight, f"for items of weight {weight}", timeout_s)

    def leave(self) -> None:
        """Stop using the queue in this process, so that the end of the process is no failure of the queue.

        What this process put in stays there. It may use the channel again.
        """
        self.link.leave()

    def size(self) -> int:
        """Return how many items wait to be taken."""
        return self.link.facts()["size"]

    def _take(self, weight: float, purpose: str, timeout_s: float | None) -> list[Any]:
        waits = self._deadline(timeout_s)
        kind, payload = self.link.get(weight, waits)
        if kind != wire.ITEMS:
            self._raise(kind, payload, purpose, waits)
        return payload

    def _deadline(self, timeout_s: float | None) -> float:
        waits = self.timeout_s if timeout_s is None else timeout_s
        if not (waits >= 0 and math.isfinite(waits)):
            raise ValueError(f"channel {self.name!r}: timeout_s is {waits}; every wait has a deadline, in seconds")
        return waits

    def _raise(self, kind: int, payload: Any, purpose: str, waited_s: float) -> NoReturn:
        if kind == wire.FAILED:
            raise WorkerError(f"channel {self.name!r} failed: {payload}")
        ends = "".join(
            f"; {role} {', '.join(payload[role])}" for role in ("producers", "consumers") if payload.get(role)
        )
        raise DeadlineError(
            f"channel {self.name!r}: waited {waited_s:.1f} s {purpose}; it has {payload['size']} of {self.capacity}"
            f"{ends}"
        )


class QueueDirectory:
    """Opens queues by name: in all processes of a cluster, one name is one queue. broker: where their items wait.

    It can be sent to workers, unless the queues are in this process (None). Whoever opens a name first decides its
    capacity. It also has records, which are values by name; the end of a process that wrote or read one, at whatever
    point, has no effect on it.
    """

    def __init__(self, broker: BrokerAddress | None, timeout_s: float):
        self.timeout_s = timeout_s
        self._broker = broker
        self.token = secrets.token_hex(8)
        self._local: dict[str, _LocalLink] = {}  # without a broker

    def __getstate__(self) -> dict[str, Any]:
        if self._broker is None:
            raise TypeError(
                "a channel of the local runtime stays in its process; make it with a cluster on Ray to send it to"
                " another"
            )
        return self.__dict__

    @classmethod
    def of_node(cls, cluster: Cluster, node: int | None, timeout_s: float) -> QueueDirectory:
        """Make a directory of queues whose items wait on a node of a cluster, by default the driver's."""
        return cls(cluster.service(Broker, node=node), timeout_s)

    def open(self, name: str, capacity: int) -> Queue:
        """Return the queue of this name."""
        return Queue(name, capacity, self._link(name, capacity), timeout_s=self.timeout_s)

    def forget(self, left: Queue) -> None:
        """Free what this directory itself keeps of a queue, unless something is in it.

        Nobody may use the object any more then; the same name opens another.
        """
        if self._broker is None and self._local[left.name].is_as_new():
            del self._local[left.name]

    def record(self, name: str, value: Any, *, replaces: bool = True) -> Any:
        """Publish a value under a name, for all processes, and return it.

        replaces: an earlier value. Otherwise the earlier one stays and is returned.
        """
        return self._link("records", 1).record(name, value, replaces)

    def look_up(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Return the value that was recorded by this name, or will be soon."""
        waits = self.timeout_s if timeout_s is None else timeout_s
        kind, values = self._link("records", 1).look_up(name, waits)
        if kind != wire.ITEMS:
            raise DeadlineError(f"waited {waits:.1f} s for {name!r}, which nobody has recorded")
        return values[0]

    def _link(self, name: str, capacity: int) -> BrokerClient | _LocalLink:
        if self._broker is not None:
            return client_of(self._broker, f"{name}/{self.token}", capacity)
        return self._local.get(name) or self._local.setdefault(name, _LocalLink(capacity))


class _LocalLink:
    """A queue of this process, and records beside it: asked as a broker is."""

    def __init__(self, capacity: int):
        self._queue = BoundedQueue(capacity)
        self._records: defaultdict[str, Record] = defaultdict(Record)
        self._lock = threading.Lock()

    def put(self, item: Any, weight: float, timeout_s: float) -> tuple[int, Any]:
        return self._ask(self._queue, partial(self._queue.put, item, weight), timeout_s)

    def get(self, weight: float, timeout_s: float) -> tuple[int, Any]:
        return self._ask(self._queue, partial(self._queue.get, weight), timeout_s)

    def record(self, name: str, value: Any, replaces: bool) -> Any:
        with self._lock:
            record = self._records[name]
            record.write(value, replaces=replaces)
            return record.value

    def look_up(self, name: str, timeout_s: float) -> tuple[int, Any]:
        with self._lock:
            record = self._records[name]
        return self._ask(record, record.read, timeout_s)

    def leave(self) -> None:
        """Do nothing: a queue of this process ends with it."""

    def facts(self) -> dict[str, Any]:
        with self._lock:
            return {"size": len(self._queue.items)}

    def is_as_new(self) -> bool:
        with self._lock:
            return self._queue.is_as_new

    def _ask(self, source: BoundedQueue | Record, ask: Callable[[Answer], None], timeout_s: float) -> tuple[int, Any]:
        """Ask with the lock held, and wait for the answer without it; at the deadline the request is withdrawn."""
        answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

        def answer(kind: int, payload: Any) -> None:
            answers.put((kind, payload))

        with self._lock:
            ask(answer)
        try:
            return answers.get(timeout=timeout_s)
        except queue.Empty:
            with self._lock:
                is_withdrawn = source.cancel(answer)
        return (wire.LATE, self.facts()) if is_withdrawn else answers.get()
