"""Bounded, typed queues that close and carry failures, between processes and within one: what channels are made of.

`put` waits while the queue is full, so a fast producer is held back by a slow consumer. `close` ends the stream:
what was put before is still delivered, then every `get` raises `QueueClosed`. `fail` wakes every waiter at once
with the reason, and so does the death of a process that used the queue, unless it was a producer that had closed
it. Every wait has a deadline.

Between processes an item crosses two sockets, by way of a broker (`broker.py`). Sockets, not actor calls: one closes
when the process at its other end is killed, which is how the others learn of it, and it is several times as fast. Of a
large item on one machine only a descriptor crosses them: the producer writes its bytes to memory without a name, which
the consumer maps, and which the system frees with the last process that has it. CUDA tensors inside items stay on their
device (`device_items/`).
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from hotseat.cluster import Cluster
from hotseat.errors import DeadlineError, RunError, WorkerError
from hotseat.rlinf import wire
from hotseat.rlinf.bounded_queue import BoundedQueue, Record, Waiter
from hotseat.rlinf.broker import Broker, BrokerAddress, BrokerClient, client_of

Item = TypeVar("Item")


class QueueClosed(RunError):
    """The stream ended: its producers closed it and everything put before has been taken."""


class Queue(Generic[Item]):
    """A queue of at most `capacity` items of `item_type`. broker: where items wait; None: in this process.

    Pass it to the workers that use it as an argument. Any number of them may put and get; they are served in the order
    in which they ask. `num_producers` of them have to close it to end the stream.
    """

    def __init__(
        self,
        name: str,
        item_type: type[Item] | tuple[type, ...],
        capacity: int,
        *,
        num_producers: int = 1,
        timeout_s: float = 600.0,
        broker: BrokerAddress | None = None,
        token: str | None = None,
    ):
        """Make a queue of its own; with a token, that of the same name and token in any process."""
        if capacity < 1 or num_producers < 1:
            raise ValueError(
                f"channel {name!r}: capacity {capacity} and num_producers {num_producers} must be at least 1"
            )
        self.name = name
        self.item_type = item_type
        self.capacity = capacity
        self.num_producers = num_producers
        self.timeout_s = timeout_s
        if broker is None:
            self._link: _LocalQueue | BrokerClient = _LocalQueue(capacity, num_producers)
        else:
            self._link = client_of(broker, f"{name}/{token or secrets.token_hex(8)}", capacity, num_producers)

    def put(self, item: Item, *, weight: float = 0.0, timeout_s: float | None = None) -> None:
        """Wait for room, then put the item in. Its weight counts in `get_weight`."""
        self.put_many([item], weight=weight, timeout_s=timeout_s)

    def put_many(self, items: Sequence[Item], *, weight: float = 0.0, timeout_s: float | None = None) -> None:
        """Put items in together, in one message: all or, if the deadline passes first, none. Each has the weight."""
        for item in items:
            if not isinstance(item, self.item_type):
                raise TypeError(
                    f"channel {self.name!r} takes {_type_names(self.item_type)}, not {_type_names(type(item))}"
                )
        if len(items) > self.capacity:
            raise ValueError(f"channel {self.name!r} has room for {self.capacity} items, not for {len(items)} at once")
        waits = self._deadline(timeout_s)
        kind, payload = self._link.put(list(items), waits, weight)
        if kind != wire.DONE:
            raise self._error(kind, payload, f"to put {len(items)} items", waits)

    def get(self, *, timeout_s: float | None = None) -> Item:
        """Wait for an item and take it out."""
        return self.get_many(1, timeout_s=timeout_s)[0]

    def get_many(self, most: int, *, at_least: int = 1, timeout_s: float | None = None) -> list[Item]:
        """Wait for `at_least` items, or the end of the stream, and take up to `most`; at the deadline take none."""
        if not 1 <= at_least <= min(most, self.capacity):
            raise ValueError(
                f"channel {self.name!r} holds {self.capacity} items: cannot wait for {at_least} to take {most}"
            )
        waits = self._deadline(timeout_s)
        kind, payload = self._link.get(most, at_least, waits)
        if kind != wire.ITEMS:
            raise self._error(kind, payload, f"for {at_least} items", waits)
        return payload

    def get_weight(self, weight: float, *, timeout_s: float | None = None) -> list[Item]:
        """Take items until they weigh that much together, or until the next one would exceed it.

        An item that is too heavy by itself is taken alone. At the end of the stream, what is left is taken.
        """
        if not weight > 0:
            raise ValueError(f"channel {self.name!r}: a batch of weight {weight}; it must be above 0")
        waits = self._deadline(timeout_s)
        kind, payload = self._link.get(self.capacity, 1, waits, weight)
        if kind != wire.ITEMS:
            raise self._error(kind, payload, f"for items of weight {weight}", waits)
        return payload

    def __iter__(self) -> Iterator[Item]:
        """Yield items until the stream ends, each waited for at most `timeout_s` of the queue."""
        with contextlib.suppress(QueueClosed):
            while True:
                yield self.get()

    def close(self) -> None:
        """Declare that this producer puts nothing more. When `num_producers` have said so, the stream ends."""
        self._link.close()

    def leave(self) -> None:
        """Stop using the queue in this process, so that the end of the process is no failure of the queue.

        What this process put in stays there. It may use the channel again.
        """
        self._link.leave()

    def fail(self, error: BaseException | str) -> None:
        """End the stream for everybody, now, with this reason. What was not taken is dropped."""
        if isinstance(error, BaseException):
            error = "".join(traceback.format_exception(error)).rstrip()
        self._link.fail(error)

    def size(self) -> int:
        """Return how many items wait to be taken."""
        return self._link.facts()["size"]

    def _deadline(self, timeout_s: float | None) -> float:
        waits = self.timeout_s if timeout_s is None else timeout_s
        if not (waits >= 0 and math.isfinite(waits)):
            raise ValueError(f"channel {self.name!r}: timeout_s is {waits}; every wait has a deadline, in seconds")
        return waits

    def _error(self, kind: int, payload: Any, purpose: str, waited_s: float) -> Exception:
        if kind == wire.CLOSED:
            return QueueClosed(f"channel {self.name!r} is closed")
        if kind == wire.FAILED:
            return WorkerError(f"channel {self.name!r} failed: {payload}")
        ends = "".join(
            f"; {role} {', '.join(payload[role])}" for role in ("producers", "consumers") if payload.get(role)
        )
        return DeadlineError(
            f"channel {self.name!r}: waited {waited_s:.1f} s {purpose}; it has {payload['size']} of {self.capacity}"
            f"{ends}"
        )


class QueueDirectory:
    """Opens queues by name: in all processes of a cluster, one name is one queue. broker: where their items wait.

    It can be sent to workers. Whoever opens a name first decides its capacity. It also has records, which are values by
    name; the end of a process that wrote or read one, at whatever point, has no effect on it.
    """

    def __init__(self, broker: BrokerAddress | None, timeout_s: float):
        self.timeout_s = timeout_s
        self._broker = broker
        self.token = secrets.token_hex(8)
        self._local: _LocalQueues | None = _LocalQueues() if broker is None else None

    @classmethod
    def of_node(cls, cluster: Cluster, node: int | None, timeout_s: float) -> QueueDirectory:
        """Make a directory of queues whose items wait on a node of a cluster, by default the driver's."""
        return cls(cluster.service(Broker, node=node), timeout_s)

    def open(self, name: str, capacity: int) -> Queue[Any]:
        """Return the queue of this name."""
        if self._local is not None:
            return self._local.open(name, capacity, self.timeout_s)
        return Queue(name, object, capacity, timeout_s=self.timeout_s, broker=self._broker, token=self.token)

    def forget(self, queue: Queue[Any]) -> None:
        """Free what this directory itself keeps of a queue, unless something is in it.

        Nobody may use the object any more then; the same name opens another.
        """
        if self._local is not None:
            self._local.forget(queue)

    def record(self, name: str, value: Any, *, replaces: bool = True) -> Any:
        """Have all processes find a value by this name, and return it.

        replaces: in place of one that is there. Otherwise that one stays and is returned.
        """
        return self._records().record(name, value, replaces)

    def look_up(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Return the value that was recorded by this name, or will be soon."""
        waits = self.timeout_s if timeout_s is None else timeout_s
        kind, values = self._records().look_up(name, waits)
        if kind != wire.ITEMS:
            raise DeadlineError(f"waited {waits:.1f} s for {name!r}, which nobody has recorded")
        return values[0]

    def _records(self) -> _LocalQueues | BrokerClient:
        if self._local is not None:
            return self._local
        assert self._broker is not None
        return client_of(self._broker, f"records/{self.token}", 1, 1)


class _LocalQueues:
    def __init__(self) -> None:
        self._queues: dict[str, Queue[Any]] = {}
        self._records: defaultdict[str, Record] = defaultdict(Record)
        self._lock = threading.Lock()

    def open(self, name: str, capacity: int, timeout_s: float) -> Queue[Any]:
        with self._lock:
            if name not in self._queues:
                self._queues[name] = Queue(name, object, capacity, timeout_s=timeout_s)
            return self._queues[name]

    def forget(self, queue: Queue[Any]) -> None:
        with self._lock:
            if isinstance(queue._link, _LocalQueue) and queue._link.is_as_new():
                del self._queues[queue.name]

    def record(self, name: str, value: Any, replaces: bool) -> Any:
        with self._lock:
            record = self._records[name]
            record.write(value, replaces=replaces)
            return record.value

    def look_up(self, name: str, timeout_s: float) -> tuple[int, Any]:
        with self._lock:
            record = self._records[name]
        return _answered(self._lock, record, record.read, timeout_s) or (wire.LATE, None)

    def __len__(self) -> int:
        return len(self._queues)


def _type_names(types: type | tuple[type, ...]) -> str:
    return " or ".join(kind.__qualname__ for kind in (types if isinstance(types, tuple) else (types,)))


# --- within a process -------------------------------------------------------------------------------------------------


def _answered(
    lock: threading.Lock, source: BoundedQueue | Record, ask: Callable[[Any], Waiter], timeout_s: float
) -> tuple[int, Any] | None:
    """Ask with the lock held, and wait for the answer without it; None: the request was withdrawn at the deadline."""
    is_answered, answers = threading.Event(), []

    def answer(kind: int, payload: Any) -> None:
        answers.append((kind, payload))
        is_answered.set()

    with lock:
        waiter = ask(answer)
    if not is_answered.wait(timeout_s):
        with lock:
            if source.cancel(waiter):
                return None
    return answers[0]


class _LocalQueue:
    def __init__(self, capacity: int, num_producers: int):
        self._queue = BoundedQueue(capacity, num_producers)
        self._lock = threading.Lock()

    def put(self, items: list[Any], timeout_s: float, weight: float) -> tuple[int, Any]:
        return self._ask(lambda answer: self._queue.put(items, answer, weight), timeout_s)

    def get(self, most: int, at_least: int, timeout_s: float, weight: float = 0.0) -> tuple[int, Any]:
        return self._ask(lambda answer: self._queue.get(most, at_least, answer, weight), timeout_s)

    def leave(self) -> None:
        """Do nothing: a queue of this process ends with it."""

    def close(self) -> None:
        with self._lock:
            self._queue.close()

    def fail(self, reason: str) -> None:
        with self._lock:
            self._queue.fail(reason)

    def facts(self) -> dict[str, Any]:
        with self._lock:
            return {"size": len(self._queue.items)}

    def is_as_new(self) -> bool:
        with self._lock:
            return self._queue.is_as_new

    def _ask(self, ask: Any, timeout_s: float) -> tuple[int, Any]:
        return _answered(self._lock, self._queue, ask, timeout_s) or (wire.LATE, self.facts())

    def __reduce__(self) -> Any:
        raise TypeError(
            "a channel of the local runtime stays in its process; make it with a cluster on Ray to send it to another"
        )
