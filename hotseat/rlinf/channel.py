"""Channels by name, with keys and weights.

Every key of a channel is a queue of its own in the broker. `maxsize` bounds each of them. An item's weight says how
much it adds to a batch of `get_batch`; it is no priority.

A program may use a new key for every item. So a process leaves queues of keys that it has not used for long, beyond
`MAX_IDLE` of them, and the broker frees a queue that is empty once every process has left it. What is in a queue that
a process left stays there, and the process may come back to it; but its end is no failure of that queue any more.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hotseat.errors import DeadlineError, PlacementError
from hotseat.rlinf.keys import key_text
from hotseat.rlinf.queues import Queue, QueueDirectory
from hotseat.rlinf.work import AsyncWork, Lane

DEFAULT_KEY = "default_queue"
UNBOUNDED = 1 << 31  # items
MAX_IDLE = 256  # queues of keys that a process stays connected to while it does not use them
_CONNECT_S = 60.0  # how long `connect` waits for a channel to be created


@dataclass(eq=False)
class _OpenQueue:
    """A queue that this process has opened, with one lane for puts and one for gets."""

    queue: Queue
    puts: Lane = field(default_factory=Lane)
    gets: Lane = field(default_factory=Lane)
    num_uses: int = 0  # operations that have not ended; without meaning if it stays
    stays: bool = False


class QueueSpec(NamedTuple):
    """Names a queue. stays: this process keeps it open, so that the end of the process is a failure of the queue."""

    name: str
    capacity: int = UNBOUNDED
    stays: bool = False


class Post:
    """Queues by name in this process: each is opened once, and has one lane for puts and one for gets.

    An object of this class per directory and process; `post_of` returns it.
    """

    def __init__(self, directory: QueueDirectory):
        self.directory = directory
        self._lock = threading.Lock()
        self._open: dict[str, _OpenQueue] = {}
        self._idle: dict[str, None] = {}  # the names of queues to leave, the one that was not used for longest first

    def queue(self, name: str, capacity: int = UNBOUNDED) -> Queue:
        """Open a queue that stays open."""
        return self._begin(QueueSpec(name, capacity, stays=True)).queue

    def put(self, spec: QueueSpec, item: Any, weight: float = 0.0, *, is_async: bool) -> AsyncWork | None:
        """Put an item into a queue, after what this process has put there before."""
        opened = self._begin(spec)
        work: AsyncWork | None = self._run(opened, opened.puts, lambda queue: queue.put(item, weight=weight), is_async)
        return work

    def get(self, spec: QueueSpec, take: Callable[[Queue], Any], *, is_async: bool) -> Any:
        """Take something out of a queue, after what this process has asked of it before."""
        opened = self._begin(spec)
        return self._run(opened, opened.gets, take, is_async)

    def use(self, spec: QueueSpec, operation: Callable[[Queue], Any]) -> Any:
        """Run an operation on a queue at once, whatever else this process has asked of it."""
        return self._operate(self._begin(spec), operation)

    def leave(self) -> None:
        """Stop using all queues, so that the end of this process is no failure of theirs."""
        with self._lock:
            queues = [opened.queue for opened in self._open.values()]
        for queue in queues:
            queue.leave()

    def _run(self, opened: _OpenQueue, lane: Lane, operation: Callable[[Queue], Any], is_async: bool) -> Any:
        run = functools.partial(self._operate, opened, operation)
        return lane.start(run) if is_async else lane.run(run)

    def _operate(self, opened: _OpenQueue, operation: Callable[[Queue], Any]) -> Any:
        try:
            return operation(opened.queue)
        finally:
            if not opened.stays:
                self._end(opened)

    def _begin(self, spec: QueueSpec) -> _OpenQueue:
        with self._lock:
            opened = self._open.get(spec.name)
            if opened is None:
                opened = self._open[spec.name] = _OpenQueue(self.directory.open(spec.name, spec.capacity))
            if not opened.stays:
                opened.stays = spec.stays
                opened.num_uses += 1
                self._idle.pop(spec.name, None)
            return opened

    def _end(self, opened: _OpenQueue) -> None:
        left = None
        with self._lock:
            opened.num_uses -= 1
            if opened.num_uses == 0 and not opened.stays:
                self._idle[opened.queue.name] = None
            if len(self._idle) > MAX_IDLE:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                left = self._open.pop(oldest)
                self.directory.forget(left.queue)  # with the lock, so that nobody opens it meanwhile
        if left is not None:
            left.puts.end()
            left.gets.end()
            left.queue.leave()


_posts: dict[str, Post] = {}
_posts_lock = threading.Lock()


def post_of(directory: QueueDirectory) -> Post:
    """Return this process's queues of a directory, which may have arrived here in several copies."""
    with _posts_lock:
        if directory.token not in _posts:
            _posts[directory.token] = Post(directory)
        return _posts[directory.token]


def leave_all() -> None:
    """Stop using the queues of all directories: those whose items wait on other nodes have one of their own."""
    with _posts_lock:
        posts = list(_posts.values())
    for post in posts:
        post.leave()


class Channel:
    """First-in, first-out queues, one for each key, for all workers and the driver. `Channel.create` makes it.

    A worker gets it as an argument, or connects by name: `self.connect_channel(name)`.
    """

    def __init__(self, name: str, maxsize: int, directory: QueueDirectory):
        self.name = name
        self._maxsize = maxsize
        self._directory = directory
        # It stays open: there is one for each channel, where other keys may be any number.
        self._default = QueueSpec(f"{name}:{key_text(DEFAULT_KEY)}", maxsize or UNBOUNDED, stays=True)

    @classmethod
    def create(
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        disable_distributed_log: bool = True,
    ) -> Channel:
        """Create a channel, or connect to the one of this name.

        maxsize: items that each key holds at most; 0: any number. node_rank: where they wait. local: for this process
        alone. `distributed` and `disable_distributed_log` have no effect.
        """
        from hotseat.rlinf.rlinf_cluster import Cluster

        if local:
            return cls(name, maxsize, QueueDirectory(None, Cluster.default_timeout_s()))
        return cls.create_in(Cluster().directory(), name, maxsize, items_in=Cluster().directory(node_rank))

    @classmethod
    def create_in(
        cls, directory: QueueDirectory, name: str, maxsize: int = 0, items_in: QueueDirectory | None = None
    ) -> Channel:
        """Create a channel that is found by name in a directory. items_in: where its items wait, if elsewhere."""
        if maxsize < 0:
            raise PlacementError(f"channel {name!r}: maxsize is {maxsize}; it must be 0, for no limit, or more")
        channel: Channel = directory.record(_entry_of(name), cls(name, maxsize, items_in or directory), replaces=False)
        return channel

    @classmethod
    def connect(cls, name: str, current_worker: Any = None) -> Channel:
        """Connect to a channel that was created elsewhere, or will be soon."""
        from hotseat.rlinf.rlinf_cluster import Cluster

        return cls.connect_in(Cluster().directory(), name)

    @classmethod
    def connect_in(cls, directory: QueueDirectory, name: str) -> Channel:
        try:
            channel: Channel = directory.look_up(_entry_of(name), timeout_s=min(_CONNECT_S, directory.timeout_s))
        except DeadlineError as error:
            raise PlacementError(
                f"there is no channel {name!r}: create it first, by Channel.create({name!r})"
            ) from error
        return channel

    # --- putting and getting --------------------------------------------------------------------------------------

    def put(
        self, item: Any, weight: float = 0, key: Any = DEFAULT_KEY, async_op: bool = False, channel_rank: Any = None
    ) -> AsyncWork | None:
        """Wait for room and put the item in; with `async_op` return at once."""
        return self._post.put(self._spec(key), item, weight, is_async=async_op)

    def put_nowait(self, item: Any, weight: float = 0, key: Any = DEFAULT_KEY) -> None:
        """Put the item in if there is room; raise `asyncio.QueueFull` otherwise."""
        try:
            self._post.use(self._spec(key), lambda queue: queue.put(item, weight=weight, timeout_s=0.0))
        except DeadlineError as error:
            raise asyncio.QueueFull(f"channel {self.name!r}, key {key!r}: {self._maxsize} items wait") from error

    def get(self, key: Any = DEFAULT_KEY, async_op: bool = False, channel_rank: Any = None) -> Any:
        """Wait for an item of this key and take it out; with `async_op` return an `AsyncWork`."""
        return self._post.get(self._spec(key), Queue.get, is_async=async_op)

    def get_nowait(self, key: Any = DEFAULT_KEY) -> Any:
        """Take an item of this key out; raise `asyncio.QueueEmpty` if there is none."""
        try:
            return self._post.use(self._spec(key), lambda queue: queue.get(timeout_s=0.0))
        except DeadlineError as error:
            raise asyncio.QueueEmpty(f"channel {self.name!r} has no item with key {key!r}") from error

    def get_batch(self, target_weight: float = 0, key: Any = DEFAULT_KEY, async_op: bool = False) -> Any:
        """Take items until they weigh `target_weight` together, or until the next would exceed it.

        An item that is heavier than that comes alone. 0: one item.
        """

        def take(queue: Queue) -> list[Any]:
            return [queue.get()] if target_weight == 0 else queue.get_weight(target_weight)

        return self._post.get(self._spec(key), take, is_async=async_op)

    def qsize(self, key: Any = DEFAULT_KEY) -> int:
        """Return how many items of this key wait."""
        size: int = self._post.use(self._spec(key), Queue.size)
        return size

    def empty(self, key: Any = DEFAULT_KEY) -> bool:
        return self.qsize(key) == 0

    def full(self, key: Any = DEFAULT_KEY) -> bool:
        return self._maxsize > 0 and self.qsize(key) >= self._maxsize

    def maxsize(self) -> int:
        return self._maxsize

    @property
    def _post(self) -> Post:
        return post_of(self._directory)

    def _spec(self, key: Any) -> QueueSpec:
        if isinstance(key, str) and key == DEFAULT_KEY:
            return self._default
        return QueueSpec(f"{self.name}:{key_text(key)}", self._maxsize or UNBOUNDED)

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, maxsize={self._maxsize})"


def _entry_of(name: str) -> str:
    return f"channel {name}"
