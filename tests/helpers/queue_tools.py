"""Queues of a broker for tests."""

from __future__ import annotations

from hotseat.rlinf.broker import Broker, BrokerClient
from hotseat.rlinf.queues import Queue, QueueDirectory


def queue_of(broker: Broker, name: str, capacity: int) -> Queue:
    """Make a queue of its own in a broker."""
    return QueueDirectory(broker.address, 600.0).open(name, capacity)


def fail(queue: Queue) -> None:
    """Have a process that uses the queue end without notice, so that all that is in it is dropped."""
    user = BrokerClient(queue.link.address, queue.link.channel, queue.capacity)
    user.put(None, 0.0, 0.0)
    for connection in user._idle:
        connection.close()
    user._idle.clear()
